"""The loss of a language model needs no logits gathered, and only a chunk of them held; nothing else changes."""

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from cases import Bound
from oracle import close, randn
from torch.func import functional_call
from zoo import DECODER, SLIDING, builder, causal, output_loss, sequence_to_sequence

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

from harness import peak_bytes

from megalith.core import chunked_cross_entropy, grad_and_value, shard
from megalith.core.memory import memory
from megalith.models.huggingface import functional
from megalith.models.llama import Llama, LlamaConfig
from megalith.sharding import Mesh
from megalith.sharding.recipes import data_parallel, specs_for, tensor_parallel

BATCH, SEQ, DIM, VOCAB = 4, 24, 8, 40  # no other dim is as large as the vocabulary


@pytest.fixture
def head():
    """A head's inputs and its weight, and labels of which some do not count."""
    params = {"hidden": randn(BATCH, SEQ, DIM), "weight": randn(VOCAB, DIM)}
    labels = torch.randint(VOCAB, (BATCH, SEQ))
    labels[0, :5] = -100
    return params, labels


def whole_logits(params, labels, softcap=None, **kwargs):
    logits = params["hidden"].tanh() @ params["weight"].T
    if softcap is not None:
        logits = (logits / softcap).tanh() * softcap
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), **kwargs)


def chunked(chunks, **kwargs):
    def loss(params, labels):
        return chunked_cross_entropy(params["hidden"].tanh(), params["weight"], labels, chunks=chunks, **kwargs)

    return loss


def gradients(loss, transform=grad_and_value):
    def step(params, labels):
        return transform(loss)(params, labels)

    return step


# --- on one device --------------------------------------------------------------------------------------


@pytest.mark.parametrize("transform", [grad_and_value, torch.func.grad_and_value])
@pytest.mark.parametrize("chunks", [1, 3, 5, 24, 100])
def test_any_number_of_chunks_gives_the_same(chunks, transform, head):
    for options in ({}, {"reduction": "sum"}, {"softcap": 2.0}):
        wanted = grad_and_value(lambda *x, o=options: whole_logits(*x, **o))(*head)
        close(transform(chunked(chunks, **options))(*head), wanted)


def test_another_label_may_be_ignored(head):
    params, labels = head[0], head[1].clamp(min=7)
    close(chunked(3, ignore_index=7)(params, labels), whole_logits(params, labels, ignore_index=7))


def test_a_loss_a_token(head):
    loss = chunked(5, reduction="none")(*head)
    close(loss.flatten(), whole_logits(*head, reduction="none"))
    assert loss.shape == (BATCH, SEQ) and (loss[0, :5] == 0).all()


def test_tokens_may_lie_in_one_dim_or_in_three(head):
    (params, labels), wanted = head, whole_logits(*head)
    for shape in ((-1,), (2, 2, -1)):
        reshaped = {**params, "hidden": params["hidden"].reshape(*shape, DIM)}
        close(chunked(4)(reshaped, labels.reshape(shape)), wanted)


def test_without_a_label_that_counts_it_is_as_torch_has_it(head):
    params, labels = head[0], torch.full((BATCH, SEQ), -100)
    assert chunked(3)(params, labels).isnan() and whole_logits(params, labels).isnan()
    grads, value = grad_and_value(chunked(3, reduction="sum"))(params, labels)
    assert value == 0 and all((g == 0).all() for g in grads.values())


def test_large_logits_do_not_overflow(head):
    params, labels = {name: 100 * x for name, x in head[0].items()}, head[1]
    close(grad_and_value(chunked(3))(params, labels), grad_and_value(whole_logits)(params, labels))


def test_bfloat16_is_reduced_in_float32(head):
    params, labels = {name: x.bfloat16() for name, x in head[0].items()}, head[1]
    grads, value = grad_and_value(chunked(4))(params, labels)
    exact, wanted = grad_and_value(whole_logits)({name: x.double() for name, x in params.items()}, labels)
    assert value.dtype == torch.float32
    assert abs(value - wanted) / wanted < 2**-8
    for name, grad in grads.items():
        assert grad.dtype == torch.bfloat16
        assert (grad.double() - exact[name]).abs().max() / exact[name].abs().max() < 2**-6


def test_it_may_be_differentiated_twice(head):
    params, labels = head
    inputs = [x.requires_grad_() for x in (params["hidden"][:1, :3, :2], params["weight"][:4, :2])]

    def loss(hidden, weight):
        return chunked_cross_entropy(hidden, weight, labels[:1, :3] % 4, chunks=2, softcap=3.0)

    assert torch.autograd.gradgradcheck(loss, inputs)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"weight": torch.zeros(VOCAB, DIM + 1)}, r"write hidden as \[..., e\] and weight as \[v, e\]"),
        ({"labels": torch.zeros(BATCH * SEQ, dtype=torch.int64)}, r"one label a token, so write labels as \[4, 24\]"),
        ({"chunks": 0}, "chunks is 0; write 1 or more"),
        ({"reduction": "average"}, "reduction is 'average'; write 'mean', 'sum' or 'none'"),
    ],
)
def test_what_does_not_fit_is_said(change, said, head):
    params, labels = head
    with pytest.raises(ValueError, match=said):
        chunked_cross_entropy(**{**params, "labels": labels, "chunks": 2, **change})


# --- on a mesh -----------------------------------------------------------------------------------------

MESHES = {
    "vocabulary": ("tp=2", {"weight": "(tp v) e"}),
    "vocabulary that does not divide": ("tp=3", {"weight": "(tp v) e"}),
    "batch": ("dp=2", {"hidden": "(dp b) s e", "labels": "(dp b) s"}),
    "both": ("dp=2 tp=2", {"hidden": "(dp b) s e", "labels": "(dp b) s", "weight": "(tp v) e"}),
    "sequence": ("sp=2", {"hidden": "b (sp s) e", "labels": "b (sp s)"}),
    "sequence, then vocabulary": ("tp=2", {"hidden": "b (tp s) e", "weight": "(tp v) e"}),
    "batch, weight at rest": (
        "dp=2", {"hidden": "(dp b) s e", "labels": "(dp b) s", "weight": "(dp v) e -> v e"}
    ),
    "batch and vocabulary, weight at rest": (
        "dp=2 tp=2", {"hidden": "(dp b) s e", "labels": "(dp b) s", "weight": "(tp dp v) e -> (tp v) e"}
    ),
}  # fmt: skip


def of_logits(program, vocab):
    """The collectives of tensors that have a vocabulary dim, but for the head's weight itself."""
    return [c for c in program.collectives if vocab in c.source.shape and c.source.shape != (vocab, DIM)]


@pytest.mark.parametrize("transform", [grad_and_value, torch.func.grad_and_value])
@pytest.mark.parametrize("case", MESHES)
def test_it_is_exact_on_a_mesh_and_no_logit_travels(case, transform, head):
    mesh, specs = MESHES[case]
    step = shard(gradients(chunked(4), transform), Mesh(mesh), specs, backend="virtual")
    close(step.whole(*head), grad_and_value(whole_logits)(*head))
    program = step.program(*head)
    assert not of_logits(program, VOCAB)
    # Not a byte more than with whole logits.
    at_once = shard(gradients(whole_logits, transform), Mesh(mesh), specs, backend="virtual").program(*head)
    assert program.bytes_received <= at_once.bytes_received
    # Nothing is gathered but what the specs say.
    gathered = [c for c in program.collectives if c.kind in ("all_gather", "all_to_all", "exchange")]
    assert all("->" in c.cause or case == "sequence, then vocabulary" for c in gathered)


@pytest.mark.parametrize("n", [2, 4])
def test_a_split_vocabulary_costs_three_numbers_a_token(n, head):
    """The largest logit, the sum of exponentials and the label's logit; and in the backward the gradient of hidden."""
    step = shard(gradients(chunked(4)), Mesh(f"tp={n}"), {"weight": "(tp v) e"}, backend="virtual")
    rows = step.explain(*head).rows
    assert {row.kind for row in rows} == {"all_reduce"}
    per_token = BATCH * SEQ * 8 * 2 * (n - 1) // n
    assert sum(row.bytes for row in rows if row.phase == "forward") == 3 * per_token
    assert sum(row.bytes for row in rows if row.phase != "forward") == DIM * per_token


def test_a_transform_that_the_backward_lacks_is_exact_too(head):
    params, labels = head

    def per_sample(params, labels):
        def loss(params, hidden, labels):
            return chunked(3)({**params, "hidden": hidden}, labels)

        return torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(params, params["hidden"], labels)

    wanted = torch.stack(
        [
            grad_and_value(whole_logits)({"hidden": h, "weight": params["weight"]}, y)[0]["weight"]
            for h, y in zip(params["hidden"], labels, strict=True)
        ]
    )
    for mesh, specs in (MESHES["both"], MESHES["vocabulary"]):
        close(shard(per_sample, Mesh(mesh), specs, backend="virtual").whole(params, labels)["weight"], wanted)


LLAMA = {
    "*.[qkv]_proj.weight": "(tp o) i",
    "*.o_proj.weight": "o (tp i)",
    "*.{gate,up}_proj.weight": "(tp o) i",
    "*.down_proj.weight": "o (tp i)",
    "*embed_tokens.weight": "(tp v) e",
    "[xy]": "(dp b) s",
}


class Trunk(torch.nn.Module):
    """A Llama but for its head: what the head is given, and its weight."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        hidden = []
        handle = self.model.lm_head.register_forward_pre_hook(lambda _, args: hidden.append(args[0]))
        try:
            self.model(ids)  # its logits are read by nobody, so they are not in the program
        finally:
            handle.remove()
        return hidden[0], self.model.lm_head.weight


@pytest.mark.parametrize("tied", [False, True])
def test_a_llama_is_exact_tied_or_not(tied):
    config = LlamaConfig(vocab=VOCAB, dim=16, hidden=24, n_layers=2, n_heads=4, n_kv_heads=4, tied=tied)
    trunk = Trunk(Llama(config).double())
    params = {name: p.detach() + 0.1 * torch.randn_like(p) for name, p in trunk.named_parameters()}
    x, y = torch.randint(VOCAB, (2, BATCH, SEQ))

    def step(params, x, y):
        def loss(params):
            hidden, weight = functional_call(trunk, params, (x,))
            return chunked_cross_entropy(hidden, weight, y, chunks=4)

        return grad_and_value(loss)(params)

    def plain(params):
        hidden, weight = functional_call(trunk, params, (x,))
        return F.cross_entropy((hidden @ weight.T).flatten(0, 1), y.flatten())

    specs = LLAMA if tied else {**LLAMA, "*lm_head.weight": "(tp v) e"}
    sharded = shard(step, Mesh("dp=2 tp=2"), specs, backend="virtual")
    close(sharded.whole(params, x, y), grad_and_value(plain)(params))
    program = sharded.program(params, x, y)
    weights = {tuple(p.shape) for p in params.values()}
    assert not [c for c in program.collectives if VOCAB in c.source.shape and c.source.shape not in weights]
    assert not [c for c in program.collectives if c.kind == "all_gather"]


# --- memory --------------------------------------------------------------------------------------------


def memory_of(chunks, mesh="", specs=None):
    """Bytes at the peak above the inputs, predicted; and of a run, where the mesh is one device."""
    params = {"hidden": torch.randn(4, 64, 32), "weight": torch.randn(2048, 32)}
    labels = torch.randint(2048, (4, 64))
    loss = chunked(chunks) if chunks else whole_logits
    step = shard(gradients(loss), Mesh(mesh), specs or {}, backend="virtual")
    report = memory(step.program(params, labels), granularity=1)
    predicted = report.peak - report.start
    if mesh:
        return predicted
    placed = step.place(params, labels)
    step(*placed)
    return predicted, peak_bytes(lambda: step(*placed))


def test_memory_falls_with_the_number_of_chunks_as_predicted():
    logits, weight, hidden = 4 * 64 * 2048 * 4, 2048 * 32 * 4, 4 * 64 * 32 * 4
    whole = memory_of(None)[0]
    for chunks in (1, 2, 4, 8, 16):
        predicted, measured = memory_of(chunks)
        assert predicted == pytest.approx(measured, rel=0.01)
        # A chunk's logits, the weight's gradient and its next term, and some tensors as large as hidden.
        assert logits / chunks + weight < predicted < logits / chunks + 2 * weight + 5 * hidden < whole
        if chunks == 16:
            assert predicted < whole / 5


def test_memory_falls_on_a_mesh_too():
    for mesh, specs in (
        ("tp=2", {"weight": "(tp v) e"}),
        ("dp=2 tp=2", {"weight": "(tp v) e", "hidden": "(dp b) s e", "labels": "(dp b) s"}),
    ):
        logits = 4 * 64 * 2048 * 4 // Mesh(mesh).size
        peaks = [memory_of(chunks, mesh, specs) for chunks in (1, 2, 4)]
        for more, less, chunks in zip(peaks, peaks[1:], (1, 2), strict=False):
            assert more - less > 0.9 * (logits / chunks - logits / (2 * chunks)) - 2048 * 32 * 4 / 2


def test_the_terms_of_a_sum_are_not_kept():
    """Gradients of micro-batches are added as they come: the memory is that of two, however many there are."""

    def of(n):
        def step(w, x):
            grads = [grad_and_value(lambda w, part=part: (part @ w).square().sum())(w)[0] for part in x.chunk(n)]
            return sum(grads[1:], grads[0])

        w, x = torch.zeros(64, 256), torch.zeros(16, 64)
        report = shard(step, Mesh(""), {}, backend="virtual").memory(w, x)
        return (report.peak - report.start) / (w.numel() * 4)

    assert of(2) < 2.5 and of(8) < 2.5


# --- the losses of others ------------------------------------------------------------------------------

WORDS = 88  # no other dim of these models is as large
SMALL = {**DECODER, "vocab_size": WORDS}
GPT2 = dict(
    vocab_size=WORDS, n_positions=32, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0,
    attn_pdrop=0.0, bos_token_id=1, eos_token_id=2, use_cache=False,
)  # fmt: skip
T5 = dict(
    vocab_size=WORDS, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, relative_attention_num_buckets=8,
    relative_attention_max_distance=16, dropout_rate=0.0, use_cache=False,
)  # fmt: skip
HUGGING = {
    "llama": (builder(hf.LlamaForCausalLM, hf.LlamaConfig(**SMALL)), causal),
    "tied llama": (builder(hf.LlamaForCausalLM, hf.LlamaConfig(**SMALL, tie_word_embeddings=True)), causal),
    "gpt2": (builder(hf.GPT2LMHeadModel, hf.GPT2Config(**GPT2)), causal),
    "gemma2, soft cap": (builder(hf.Gemma2ForCausalLM, hf.Gemma2Config(**SMALL, **SLIDING), "eager"), causal),
    "t5": (builder(hf.T5ForConditionalGeneration, hf.T5Config(**T5)), sequence_to_sequence),
}


def hugging_program(name, mesh):
    build, make = HUGGING[name]
    model, batch = build(), make()
    fn, params = functional(model)

    def step(params, batch):
        return grad_and_value(lambda p, b: output_loss(Bound(fn, p), b))(params, batch)

    recipes = [*([data_parallel()] if "dp" in mesh else []), tensor_parallel()]
    program = shard(step, Mesh(mesh), specs_for(params, batch, *recipes), backend="virtual").program(params, batch)
    return program, params, batch


@pytest.mark.parametrize("name", HUGGING)
def test_cross_entropy_of_a_split_head_gathers_no_logits(name):
    """Three numbers a token forward, none backward; and one activation for each two matrices of a layer."""
    program, _, batch = hugging_program(name, "tp=2")
    assert {c.kind for c in program.collectives} == {"all_reduce"}
    assert not any(WORDS in c.source.shape for c in program.collectives)
    n_tokens = batch["labels"].numel()
    of_loss = [c for c in program.collectives if c.source.shape == (n_tokens, 1)]
    assert {c.origin.phase for c in of_loss} == {"forward"}
    assert sum(c.bytes_received for c in of_loss) == 3 * n_tokens * 8
    rest = {"forward": 0, "backward": 0}
    for c in program.collectives:
        if c not in of_loss:
            rest[c.origin.phase] += c.bytes_received
    width = 32 * 8
    source, target = batch["input_ids"].numel() * width, n_tokens * width
    if name == "t5":  # two layers of each kind, of two and of three sums, and two embeddings
        # Backward: the same, without the embeddings; the head; and what all cross-attentions read.
        assert rest == {"forward": 5 * source + 7 * target, "backward": 5 * source + 7 * target}
    else:
        assert rest == {"forward": 5 * target, "backward": 5 * target}


def test_a_batch_split_too_changes_the_share_only():
    program, params, batch = hugging_program("llama", "dp=2 tp=2")
    over_tp = [c for c in program.collectives if c.axes == ("tp",)]
    over_dp = [c for c in program.collectives if c.axes == ("dp",)]
    n_tokens = batch["labels"].numel() // 2
    assert sum(c.bytes_received for c in over_tp) == n_tokens * 8 * (3 + 10 * 32)
    assert not any(WORDS in c.source.shape for c in over_tp)
    shares = sum(p.numel() // (2 if p.ndim == 2 else 1) for p in params.values())
    assert sum(c.bytes_received for c in over_dp) - 8 * shares in range(0, 65)  # and the loss, the count of labels


def test_the_derivative_of_a_gradient_through_cross_entropy_is_exact(head):
    """By plain autograd within the program, as in a penalty on gradients."""

    def penalty(params, labels):
        weight = params["weight"].detach().requires_grad_()
        with torch.enable_grad():
            loss = whole_logits({**params, "weight": weight}, labels)
            (grad,) = torch.autograd.grad(loss, weight, create_graph=True)
            return torch.autograd.grad(grad.square().sum(), weight)[0]

    for mesh, specs in (MESHES["both"], MESHES["vocabulary"]):
        close(shard(penalty, Mesh(mesh), specs, backend="virtual").whole(*head), penalty(*head))
