"""On grids of two and three axes nothing changes but where things lie, and no byte moves beyond the closed forms.

Loss and every gradient in float64 to a relative 1e-10. Volumes are elements that a rank receives, counted in programs.
"""

from fnmatch import fnmatchcase
from fractions import Fraction
from functools import lru_cache

import pytest
import torch
from cases import CASES, GROUPED, TINY, Bound, error, next_token_loss, seeded, tokens
from torch import nn
from zoo import Case, reference

from megalith.core import grad_and_value, shard
from megalith.models.huggingface import functional
from megalith.models.llama import Llama, LlamaConfig
from megalith.sharding import Mesh
from megalith.sharding.recipes import data_parallel, specs_for, tensor_parallel, zero

LIMIT = 1e-10
GRIDS = {
    "2d": ("row=2 col=2", tensor_parallel("row col", "2d")),
    "2.5d": ("dep=2 row=2 col=2", tensor_parallel("dep row col", "2.5d")),
    "3d": ("i=2 j=2 k=2", tensor_parallel("i j k", "3d")),
}


def step_of(case):
    """A model's gradients and loss as a pure function, and its arguments."""
    fn, params = functional(case.build())

    def step(params, batch):
        return grad_and_value(lambda p, b: case.loss(Bound(fn, p), b))(params, batch)

    return step, params, case.batch()


def assert_exact(case, mesh, *recipes):
    step, params, batch = step_of(case)
    run = shard(step, Mesh(mesh), specs_for(params, batch, *recipes), backend="virtual")
    placed = run.place(params, batch)
    grads, loss = run.gather_output(run(*placed))
    programs = run.compiled(*placed).programs.values()
    assert len({program.digest for program in programs}) == 1  # empty shards too leave collectives in one order
    expected_loss, expected = reference(case)
    assert error(loss, expected_loss) <= LIMIT
    assert grads.keys() == expected.keys()
    largest = max(g.abs().max() for g in expected.values())
    for name, grad in expected.items():  # one that is rightly zero is rounding of the size of the others
        least = largest if case.zero_grad and fnmatchcase(name, case.zero_grad) else 0.0
        assert error(grads[name], grad, least) <= LIMIT, name


# --- exactness ------------------------------------------------------------------------------------------------------

QUICK = {("our_llama_gqa", "2d"), ("llama", "2.5d"), ("our_gpt", "3d"), ("vit", "2d")}
MODELS = ("our_llama", "our_llama_gqa", "our_llama_tied", "our_gpt", "llama", "gpt2", "vit", "bert", "mixtral", "t5")


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        pytest.param(m, k, marks=() if (m, k) in QUICK else pytest.mark.slow, id=f"{m}-{k}")
        for m in MODELS
        for k in GRIDS
    ],
)
def test_loss_and_gradients_are_those_of_one_device(model, kind):
    assert_exact(CASES[model], *GRIDS[kind])


def uneven(vocab=64, batch=4, seq=16, **config):
    return Case(
        "uneven",
        seeded(lambda: Llama(LlamaConfig(**{**TINY, "hidden": 64, "n_kv_heads": 4, **config, "vocab": vocab}))),
        lambda: tokens(vocab, batch, seq),
        next_token_loss,
    )


UNEVEN = {
    "odd vocabulary, hidden size and batch": (uneven(vocab=61, hidden=51, batch=3), "2d"),
    "6 heads, 3 of keys, short sequences": (uneven(dim=24, n_heads=6, n_kv_heads=3, seq=5), "2.5d"),
    "a batch of one": (uneven(batch=1, vocab=61), "3d"),
    "odd hidden size": (uneven(hidden=51, batch=6), "3d"),
}


@pytest.mark.parametrize("name", UNEVEN)
def test_sizes_that_do_not_divide_are_exact(name):
    case, kind = UNEVEN[name]
    assert_exact(case, *GRIDS[kind])


def test_a_grid_that_is_not_square_is_exact():
    assert_exact(GROUPED, "row=4 col=2", tensor_parallel("row col", "2d"))


def test_a_grid_composes_with_data_parallelism_and_zero():
    assert_exact(GROUPED, "dp=2 row=2 col=2", data_parallel(), tensor_parallel("row col", "2d"), zero(3))


def test_whole_heads_on_a_grid_are_exact():
    assert_exact(GROUPED, "row=2 col=2", tensor_parallel("row col", "2d", heads=4, kv_heads=2))


# --- volumes --------------------------------------------------------------------------------------------------------

Q, D, ITEM = 2, 2, 4  # ranks along an axis, depth, bytes of an element
BATCH, SEQ, EMBED, HIDDEN, VOCAB, HEADS, KV_HEADS = 8, 16, 32, 48, 64, 8, 4
TOKENS, KV = BATCH * SEQ, EMBED * KV_HEADS // HEADS


def summed(n, elements):
    """What a rank receives in an all-reduce over n ranks, which pad to a multiple of n."""
    return 2 * (n - 1) * -(-Fraction(elements) // n)


def product(kind, x, w, y):
    """A product of x by w that gives y (all in elements) and its two in the backward; x, y may be sums of several."""
    if kind == "2d":
        return Fraction(3 * (Q - 1), Q**2) * (x + w)
    if kind == "2.5d":
        return Fraction(3 * (Q - 1), Q**2) * (Fraction(x, D) + w) + summed(D, Fraction(w, Q**2))
    return Fraction(Q - 1, Q**3) * (3 * x + 3 * w + 2 * y)


def norm(kind, tokens=TOKENS, embed=EMBED):
    """A sum of squares forward, one of products backward, and the gradient of the weight over the batch's axes."""
    rows, batch = {"2d": (Q, Q), "2.5d": (Q * D, Q * D), "3d": (Q**2, Q**2)}[kind]
    return 2 * summed(Q, Fraction(tokens, rows)) + summed(batch, Fraction(embed, Q))


def layer(kind):
    """q, k and v read one x, and so do gate and up: it is gathered, and its gradient scattered, once."""
    t, e, f = TOKENS, EMBED, HIDDEN
    products = [
        (t * e, e * (e + 2 * KV), t * (e + 2 * KV)),
        (t * e, e * e, t * e),
        (t * e, 2 * e * f, 2 * t * f),
        (t * f, f * e, t * e),
    ]
    return sum(product(kind, *sizes) for sizes in products) + 2 * norm(kind)


@lru_cache
def llama(kind, n_layers):
    case = Case(
        "llama",
        lambda: Llama(LlamaConfig(VOCAB, EMBED, HIDDEN, n_layers, HEADS, KV_HEADS)),
        lambda: tokens(VOCAB, BATCH, SEQ),
        next_token_loss,
    )
    step, params, batch = step_of(case)
    mesh, recipe = GRIDS[kind]
    return shard(step, Mesh(mesh), specs_for(params, batch, recipe), backend="count").program(params, batch)


@pytest.mark.parametrize("kind", GRIDS)
def test_a_llama_layer_moves_the_closed_form(kind):
    """By the difference of models of two and of four layers."""
    two, four = llama(kind, 2), llama(kind, 4)
    assert four.bytes_received - two.bytes_received == 2 * layer(kind) * ITEM


@pytest.mark.parametrize("kind", ["2d", "2.5d"])
def test_embedding_head_and_loss_move_the_closed_form(kind):
    """A vocabulary that is split like a matrix: both tables travel, logits never do."""
    t, table, batch = TOKENS, VOCAB * EMBED, Q * D if kind == "2.5d" else Q
    depth = batch // Q
    grads = 2 * summed(depth, Fraction(table, Q**2))
    looked_up = Fraction(Q - 1, Q**2) * (2 * table + 2 * t * EMBED // depth)  # read in the forward only
    head = Fraction(Q - 1, Q**2) * (3 * table + 2 * t * EMBED // depth)  # x, no block's, is kept gathered
    softmax = 3 * summed(Q, Fraction(t, batch))  # maximum, sum, and the label's logit
    counted = 3 * summed(batch, 1)  # the loss, and how many labels count, in eight bytes
    outside = looked_up + head + grads + norm(kind) + softmax + counted
    assert llama(kind, 2).bytes_received == (2 * layer(kind) + outside) * ITEM


class Pair(nn.Module):
    """Two products, out of the residual stream and back."""

    def __init__(self):
        super().__init__()
        self.up_proj = nn.Linear(EMBED, HIDDEN, bias=False)
        self.down_proj = nn.Linear(HIDDEN, EMBED, bias=False)

    def forward(self, x):
        return self.down_proj(self.up_proj(x))


class Chain(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.layers = nn.ModuleList(Pair() for _ in range(n))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def chain(kind, n):
    fn, params = functional(Chain(n))
    x = torch.zeros(BATCH, EMBED)
    mesh, recipe = GRIDS[kind]

    def step(params, x):
        return grad_and_value(lambda p: fn(p, x).square().sum())(params)

    return shard(step, Mesh(mesh), specs_for(params, {"x": x}, recipe), backend="count").program(params, x)


@pytest.mark.parametrize("kind", GRIDS)
def test_linear_layers_move_the_closed_form(kind):
    x, w, y = BATCH * EMBED, EMBED * HIDDEN, BATCH * HIDDEN
    two, four = chain(kind, 2), chain(kind, 4)
    assert four.bytes_received - two.bytes_received == 2 * (product(kind, x, w, y) + product(kind, y, w, x)) * ITEM


ALONE = {
    "2d": ("(row b) (col e)", lambda x, w, y: Fraction(Q - 1, Q**2) * (2 * x + 3 * w) + summed(Q**2, 1)),
    "2.5d": (
        "(dep row b) (col e)",
        lambda x, w, y: (
            Fraction(Q - 1, Q**2) * (Fraction(2 * x, D) + 3 * w) + summed(D, Fraction(w, Q**2)) + summed(D * Q**2, 1)
        ),
    ),
    "3d": ("(i j b) (k e)", lambda x, w, y: Fraction(Q - 1, Q**3) * (2 * x + 3 * w + 2 * y) + summed(Q**3, 1)),
}


@pytest.mark.parametrize("kind", ALONE)
def test_a_linear_layer_that_is_no_block_keeps_what_it_gathered(kind):
    """The gathered x waits for the backward, which saves one gather; the weight is gathered again, as with ZeRO."""
    layout, moved = ALONE[kind]
    mesh, recipe = GRIDS[kind]
    layer = nn.Module()
    layer.up_proj = nn.Linear(EMBED, HIDDEN, bias=False)
    layer.forward = lambda x: layer.up_proj(x)
    fn, params = functional(layer)

    def step(params, x):
        return grad_and_value(lambda p, x: fn(p, x).square().sum(), argnums=(0, 1))(params, x)

    x = torch.zeros(BATCH, EMBED)
    specs = {**specs_for(params, {"x": x}, recipe), "x": layout}
    program = shard(step, Mesh(mesh), specs, backend="count").program(params, x)
    assert program.bytes_received == moved(BATCH * EMBED, EMBED * HIDDEN, BATCH * HIDDEN) * ITEM


# --- processes ------------------------------------------------------------------------------------------------------


def on_a_rank(rank, kind):
    """The largest relative error of the loss and the gradients, as this rank gathers them."""
    step, params, batch = step_of(GROUPED)
    mesh, recipe = GRIDS[kind]
    expected, loss = step(params, batch)
    run = shard(step, Mesh(mesh), specs_for(params, batch, recipe), backend="distributed")
    grads, value = run.whole(params, batch)
    return max([error(value, loss), *(error(grads[name], expected[name]) for name in expected)])


def test_four_processes_agree_with_one(ranks):
    assert max(ranks.run(on_a_rank, "2d", world_size=4, timeout=300)) <= LIMIT
