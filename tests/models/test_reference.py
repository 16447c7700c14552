"""The reference models compute what Hugging Face's do: logits and every gradient, in float64."""

import pytest
import torch
import transformers
from zoo import Float64

from megalith.models.gpt import GPT, GPTConfig
from megalith.models.llama import Llama, LlamaConfig


@pytest.fixture
def float64():
    """Both models compute rotary angles in float32, in another order; their norms round to it."""
    with Float64():
        yield


def logits_and_grads(model, logits_fn, input_ids, cotangent):
    parameters = dict(model.named_parameters())
    logits = logits_fn(input_ids)
    grads = torch.autograd.grad((logits * cotangent).sum(), list(parameters.values()))
    return logits, dict(zip(parameters, grads, strict=True))


def assert_equal(ours, theirs):
    (logits, grads), (expected, expected_grads) = ours, theirs
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)
    assert grads.keys() == expected_grads.keys()
    for name, grad in grads.items():
        assert grad.abs().max() > 1e-6, name
        torch.testing.assert_close(grad, expected_grads[name], rtol=0, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
def test_llama_equals_hugging_face(n_kv_heads, tied):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab=96, dim=32, hidden=64, n_layers=2, n_heads=4, n_kv_heads=n_kv_heads, tied=tied, init_std=0.2
    )
    ours = Llama(config).double()
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab,
            hidden_size=config.dim,
            intermediate_size=config.hidden,
            num_hidden_layers=config.n_layers,
            num_attention_heads=config.n_heads,
            num_key_value_heads=config.n_kv_heads,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=tied,
        )
    ).double()
    theirs.load_state_dict(ours.state_dict())
    input_ids = torch.randint(config.vocab, (3, 17))
    cotangent = torch.randn(3, 17, config.vocab, dtype=torch.float64)
    expected = logits_and_grads(theirs, lambda i: theirs(i, use_cache=False).logits, input_ids, cotangent)
    assert_equal(logits_and_grads(ours, ours, input_ids, cotangent), expected)


def gpt2_state(tensors):
    """Our weights under GPT-2's names; its Conv1D keeps weights as (in, out)."""
    renames = {
        "embed_tokens": "wte",
        "embed_positions": "wpe",
        "layers": "h",
        "norm": "ln_f",
        "self_attn.qkv_proj": "attn.c_attn",
        "self_attn.o_proj": "attn.c_proj",
        "mlp.up_proj": "mlp.c_fc",
        "mlp.down_proj": "mlp.c_proj",
    }

    def rename(name):
        name = name.replace("model.", "transformer.")
        for ours, theirs in renames.items():
            name = name.replace(f".{ours}.", f".{theirs}.")
        return name

    return {rename(name): tensor.T if name.endswith("_proj.weight") else tensor for name, tensor in tensors.items()}


def test_gpt_equals_hugging_face():
    torch.manual_seed(0)
    config = GPTConfig(vocab=96, positions=24, dim=32, n_layers=2, n_heads=4, init_std=0.2)
    ours = GPT(config).double()
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=config.vocab,
            n_positions=config.positions,
            n_embd=config.dim,
            n_layer=config.n_layers,
            n_head=config.n_heads,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
        )
    ).double()
    to_theirs = gpt2_state
    torch.nn.init.normal_(ours.model.layers[0].self_attn.qkv_proj.bias)  # zeros would hide a wrong order
    theirs.load_state_dict(to_theirs(ours.state_dict()))
    input_ids = torch.randint(config.vocab, (3, 17))
    cotangent = torch.randn(3, 17, config.vocab, dtype=torch.float64)
    expected = logits_and_grads(theirs, lambda i: theirs(i, use_cache=False).logits, input_ids, cotangent)
    logits, grads = logits_and_grads(ours, ours, input_ids, cotangent)
    assert_equal((logits, to_theirs(grads)), expected)


@pytest.mark.parametrize("build", [lambda: Llama(LlamaConfig(n_layers=1)), lambda: GPT(GPTConfig(n_layers=1))])
def test_initialisation_has_the_given_std_and_follows_the_seed(build):
    torch.manual_seed(1)
    model = build()
    torch.manual_seed(1)
    again = build()
    for (name, one), two in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two)
        if one.ndim == 2:
            assert one.std().item() == pytest.approx(0.02, rel=0.02), name
        else:
            assert (one == (0 if name.endswith("bias") else 1)).all(), name


def test_unusable_sizes_are_errors_that_name_them():
    with pytest.raises(ValueError, match="n_kv_heads=3"):
        LlamaConfig(n_heads=8, n_kv_heads=3)
    with pytest.raises(ValueError, match="n_heads=7"):
        GPTConfig(n_heads=7)
    model = GPT(GPTConfig(vocab=8, positions=4, dim=8, n_layers=1, n_heads=2))
    with pytest.raises(ValueError, match="longer than positions=4"):
        model(torch.zeros(1, 5, dtype=torch.long))
