"""Which models must shard exactly? Tiny, unmodified Hugging Face models with their batches, losses and gradients.

A case is pure data: `build` and `batch` are seeded and give the same float64 tensors each time, `loss` is a
pure function. Sizes are divisible by 4. Every weight is random, biases and norms too, so that a bias added
once per rank shows. Models are in training mode with dropout 0.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    zero_grad: str = ""  # pattern of the parameters whose gradient is rightly zero, but for rounding


class Float64(TorchFunctionMode):
    """Answers a request for float32 with float64.

    Hugging Face's norms, routers and softmaxes compute in float32 whatever the model's dtype. Their rounding
    would hide a wrong gradient below 1e-7; in this mode two ways to compute a loss agree to 1e-10.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = [torch.float64 if arg is torch.float32 else arg for arg in args]
        kwargs = {key: torch.float64 if arg is torch.float32 else arg for key, arg in (kwargs or {}).items()}
        return func(*args, **kwargs)


def reference(case: Case) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, a float64 scalar, and the gradient of each parameter by name, on one device by plain autograd."""
    model = case.build()
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    loss = case.loss(model, case.batch())
    return loss.detach(), dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))


VOCAB, BATCH, SEQ = 64, 4, 16
IGNORED = -100  # the label that cross-entropy skips


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over the labels that are not IGNORED; logits [..., v], labels [...]."""
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED)


def output_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy of the logits the model gives for every entry of the batch but `labels`."""
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    float64 = next(model.parameters()).dtype == torch.float64
    with Float64() if float64 else nullcontext():
        return cross_entropy(model(**inputs).logits, batch["labels"])


def builder(model_class: type, config: hf.PretrainedConfig, attention: str = "sdpa") -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(0)
        model = model_class._from_config(config, attn_implementation=attention)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.15)
        return model.double()

    return build


def seeded(make: Callable[[torch.Generator], Batch]) -> Callable[[], Batch]:
    return lambda: make(torch.Generator().manual_seed(1))


def ids(generator: torch.Generator, seq: int = SEQ) -> Tensor:
    return torch.randint(3, VOCAB, (BATCH, seq), generator=generator)


@seeded
def causal(generator):
    tokens = ids(generator, SEQ + 1)
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}


@seeded
def masked(generator):
    """Rows of different length, a third of the tokens to predict."""
    input_ids = ids(generator)
    attention_mask = (torch.arange(SEQ) < torch.tensor([[16], [12], [9], [5]])).long()
    hidden = (torch.rand(BATCH, SEQ, generator=generator) < 0.3) & attention_mask.bool()
    return {
        "input_ids": input_ids.masked_fill(hidden, 1),
        "attention_mask": attention_mask,
        "token_type_ids": (torch.arange(SEQ) >= 4).long().expand(BATCH, SEQ).contiguous(),
        "labels": input_ids.masked_fill(~hidden, IGNORED),
    }


@seeded
def sequence_to_sequence(generator):
    target = ids(generator, 9)
    return {
        "input_ids": ids(generator),
        "attention_mask": (torch.arange(SEQ) < torch.tensor([[16], [12], [9], [5]])).long(),
        "decoder_input_ids": target[:, :-1],
        "labels": target[:, 1:],
    }


@seeded
def images(generator):
    return {
        "pixel_values": torch.randn(BATCH, 3, 16, 16, generator=generator, dtype=torch.float64),
        "labels": torch.randint(8, (BATCH,), generator=generator),
    }


@seeded
def speech(generator):
    target = ids(generator, 9)
    return {
        "input_features": torch.randn(BATCH, 16, 2 * SEQ, generator=generator, dtype=torch.float64),
        "decoder_input_ids": target[:, :-1],
        "labels": target[:, 1:],
    }


# What the decoder-only models share.
DECODER = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    use_cache=False,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
# A window shorter than the sequence, and one layer of each kind.
SLIDING = dict(head_dim=8, sliding_window=8, layer_types=["sliding_attention", "full_attention"])
NO_DROPOUT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)

CASES = [
    Case("llama", builder(hf.LlamaForCausalLM, hf.LlamaConfig(**DECODER)), causal, output_loss),
    Case("mistral", builder(hf.MistralForCausalLM, hf.MistralConfig(**DECODER, sliding_window=8)), causal, output_loss),
    Case("qwen2", builder(hf.Qwen2ForCausalLM, hf.Qwen2Config(**DECODER)), causal, output_loss),
    Case("qwen3", builder(hf.Qwen3ForCausalLM, hf.Qwen3Config(**DECODER, head_dim=16)), causal, output_loss),
    # Eager: sdpa would silently leave out the soft cap on attention scores.
    Case("gemma2", builder(hf.Gemma2ForCausalLM, hf.Gemma2Config(**DECODER, **SLIDING), "eager"), causal, output_loss),
    Case("gemma3", builder(hf.Gemma3ForCausalLM, hf.Gemma3TextConfig(**DECODER, **SLIDING)), causal, output_loss),
    Case(
        "gpt2",
        builder(
            hf.GPT2LMHeadModel,
            hf.GPT2Config(
                vocab_size=VOCAB,
                n_positions=32,
                n_embd=32,
                n_layer=2,
                n_head=4,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                bos_token_id=1,
                eos_token_id=2,
                use_cache=False,
            ),
        ),
        causal,
        output_loss,
    ),
    Case(
        "bert",
        builder(
            hf.BertForMaskedLM,
            hf.BertConfig(
                vocab_size=VOCAB,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                max_position_embeddings=32,
                use_cache=False,
                **NO_DROPOUT,
            ),
        ),
        masked,
        output_loss,
        # Moves all scores of a query alike, which softmax does not see.
        zero_grad="*.attention.self.key.bias",
    ),
    Case(
        "t5",
        builder(
            hf.T5ForConditionalGeneration,
            hf.T5Config(
                vocab_size=VOCAB,
                d_model=32,
                d_kv=8,
                d_ff=64,
                num_layers=2,
                num_heads=4,
                relative_attention_num_buckets=8,
                relative_attention_max_distance=16,
                dropout_rate=0.0,
                use_cache=False,
            ),
        ),
        sequence_to_sequence,
        output_loss,
    ),
    Case(
        "vit",
        builder(
            hf.ViTForImageClassification,
            hf.ViTConfig(
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                image_size=16,
                patch_size=4,
                num_labels=8,
                **NO_DROPOUT,
            ),
        ),
        images,
        output_loss,
        zero_grad="*.attention.k_proj.bias",
    ),
    Case(
        "whisper",
        builder(
            hf.WhisperForConditionalGeneration,
            hf.WhisperConfig(
                vocab_size=VOCAB,
                num_mel_bins=16,
                d_model=32,
                encoder_layers=2,
                decoder_layers=2,
                encoder_attention_heads=4,
                decoder_attention_heads=4,
                encoder_ffn_dim=64,
                decoder_ffn_dim=64,
                max_source_positions=SEQ,
                max_target_positions=32,
                dropout=0.0,
                use_cache=False,
                pad_token_id=0,
                bos_token_id=1,
                eos_token_id=2,
                decoder_start_token_id=1,
            ),
        ),
        speech,
        output_loss,
    ),
    # Experts by batched_mm: torch's grouped_mm has no float64, and "eager" branches on the routing.
    Case(
        "mixtral",
        builder(
            hf.MixtralForCausalLM,
            hf.MixtralConfig(**DECODER, num_local_experts=4, experts_implementation="batched_mm"),
        ),
        causal,
        output_loss,
    ),
    Case(
        "qwen3_moe",
        builder(
            hf.Qwen3MoeForCausalLM,
            hf.Qwen3MoeConfig(
                **DECODER,
                head_dim=16,
                num_experts=8,
                num_experts_per_tok=2,
                moe_intermediate_size=32,
                norm_topk_prob=True,
                experts_implementation="batched_mm",
            ),
        ),
        causal,
        output_loss,
    ),
]

ZOO: dict[str, Case] = {case.name: case for case in CASES}
