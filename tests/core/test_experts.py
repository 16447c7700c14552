"""Dropless experts: what each row gets does not depend on the mesh, and only rows that change ranks are sent."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from oracle import close, counts, randn

from megalith.core import grad_and_value, shard
from megalith.core._compat import pytree
from megalith.core.backends.count import count
from megalith.core.backends.lockstep import Traffic
from megalith.core.backends.virtual import run_virtual
from megalith.core.experts import ACTIVATIONS, experts
from megalith.core.price import DEVICES
from megalith.core.program import Compute
from megalith.sharding import Mesh
from megalith.sharding.graph import op_name

FUNCTIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}
D, HIDDEN = 6, 8


def some(rows=12, k=2, n=4, chosen=None, gated=True, out=D):
    """Rows, ids, weights and the factors of a loss; `chosen` are the experts that rows go to."""
    torch.manual_seed(0)
    chosen = list(range(n)) if chosen is None else chosen
    ids = torch.tensor(chosen)[torch.randint(len(chosen), (rows, k))]
    ins = ["gate", "up"] if gated else ["up"]
    weights = {**{name: randn(n, HIDDEN, D) for name in ins}, "down": randn(n, out, HIDDEN)}
    return {"x": randn(rows, D), "weights": weights, "ids": ids, "factors": randn(rows, k, out)}


def step(x, weights, ids, factors, activation="silu"):
    """The gradients of rows and weights, and the loss."""

    def loss(params, ids, factors):
        x, weights = params
        *ins, down = weights.values()
        return (experts(x, ids, ins, down, activation) * factors).sum()

    return grad_and_value(loss)((x, weights), ids, factors)


def row_by_row(x, weights, ids, factors, activation="silu"):
    """The same, written as the formula is."""
    x = x.clone().requires_grad_()
    weights = {name: w.clone().requires_grad_() for name, w in weights.items()}
    *ins, down = weights.values()
    total = 0
    for r in range(len(x)):
        for choice, e in enumerate(ids[r].tolist()):
            hidden = FUNCTIONS[activation](ins[0][e] @ x[r])
            for more in ins[1:]:
                hidden = hidden * (more[e] @ x[r])
            total = total + (down[e] @ hidden * factors[r, choice]).sum()
    total.backward()
    zero = torch.zeros_like
    return (x.grad, {n: zero(w) if w.grad is None else w.grad for n, w in weights.items()}), total.detach()


ROWS = {"x": "(ep r) d", "ids": "(ep r) k", "factors": "(ep r) k o"}
BOTH = {name: pattern.replace("ep", "dp ep") for name, pattern in ROWS.items()}
EXPERTS = {"weights.*": "(ep E) f d"}
HIDDEN_OVER_TP = {"weights.gate": "(ep E) (tp f) d", "weights.up": "(ep E) (tp f) d", "weights.down": "(ep E) o (tp f)"}
PLANS = {
    "two ranks": ("ep=2", {**ROWS, **EXPERTS}),
    "four ranks": ("ep=4", {**ROWS, **EXPERTS}),
    "with data parallelism": ("dp=2 ep=2", {**BOTH, **EXPERTS}),
    "with tensor parallelism": ("ep=2 tp=2", {**ROWS, **HIDDEN_OVER_TP}),
    "with replicas": ("ep=2 tp=2", {**ROWS, **EXPERTS}),
    "parameters at rest split further": ("dp=2 ep=2", {**BOTH, "weights.*": "(ep dp E) f d -> (ep E) f d"}),
    "rows over fewer axes than experts": ("dp=2 ep=2", {**ROWS, "weights.*": "(dp ep E) f d"}),
    "experts in turn": ("ep=2", {**ROWS, "weights.*": "(E ep) f d"}),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gated", [True, False])
def test_one_device_computes_the_formula(activation, gated):
    given = some(gated=gated, out=5)
    close(step(**given, activation=activation), row_by_row(**given, activation=activation), 1e-12)


def test_derivatives_of_any_order_are_plain_ops():
    given = some(rows=3)
    weights = list(given["weights"].values())

    def loss(x):
        return (experts(x, given["ids"], weights[:2], weights[2]) * given["factors"]).sum()

    twice = torch.func.hessian(loss)(given["x"])
    gradient = torch.func.grad(loss)
    tiny = 1e-6 * randn(*given["x"].shape)
    change = (gradient(given["x"] + tiny) - gradient(given["x"] - tiny)) / 2
    close(torch.einsum("abcd,cd->ab", twice, tiny), change, 1e-9)


@pytest.mark.parametrize("plan", PLANS)
def test_loss_and_gradients_are_those_of_one_device(plan):
    mesh, specs = PLANS[plan]
    given = some()
    close(shard(step, Mesh(mesh), specs, backend="virtual").whole(**given), row_by_row(**given))


LOADS = {
    "an expert that gets nothing": dict(chosen=[0, 2, 3]),
    "a rank that gets nothing": dict(chosen=[0, 1]),
    "all to one": dict(chosen=[3]),
    "rows that do not divide": dict(rows=11),
    "a rank without rows": dict(rows=3),
    "one row": dict(rows=1),
    "experts that do not divide": dict(n=5),
    "ranks without experts": dict(n=3),
}


@pytest.mark.parametrize("mesh", ["ep=2", "ep=4"])
@pytest.mark.parametrize("load", LOADS)
def test_any_load_is_exact(load, mesh):
    given = some(**LOADS[load])
    close(shard(step, Mesh(mesh), {**ROWS, **EXPERTS}, backend="virtual").whole(**given), row_by_row(**given))


# --- what is sent ---------------------------------------------------------------------------------------------------


def test_rows_travel_twice_a_pass_and_counts_once():
    sharded = shard(step, Mesh("ep=4"), {**ROWS, **EXPERTS}, backend="virtual")
    program = sharded.program(**some())
    assert counts(program, "forward") == {"all_to_all ep": 1, "exchange ep": 2}
    assert counts(program, "backward") == {"exchange ep": 2}


def test_the_backward_computes_nothing_again_that_the_forward_has():
    """Three products forward; of the backward's, two for each matrix."""
    program = shard(step, Mesh("ep=2"), {**ROWS, **EXPERTS}, backend="virtual").program(**some())
    ops = Counter(op_name(i.fn) for i in program.instructions if isinstance(i, Compute))
    assert ops["megalith.expert_mm.default"] == 3 + 3
    assert ops["megalith.expert_outer.default"] == 3
    assert ops["megalith.expert_order.default"] == 1


def test_a_checkpointed_layer_computes_and_sends_again():
    def checkpointed(x, weights, ids, factors):
        def loss(params, ids, factors):
            x, weights = params

            def layer(x, gate, up, down):
                return experts(x.sin(), ids, [gate, up], down)

            out = torch.utils.checkpoint.checkpoint(layer, x, *weights.values(), use_reentrant=False)
            return (out * factors).sum()

        return grad_and_value(loss)((x, weights), ids, factors)

    program = shard(checkpointed, Mesh("ep=2"), {**ROWS, **EXPERTS}, backend="virtual").program(**some())
    assert counts(program, "backward")["exchange ep"] > 2


def test_only_experts_over_an_axis_add_up_their_terms():
    """Rows on every rank: each computes those of its experts, and one sum puts them together."""
    program = shard(step, Mesh("ep=2"), EXPERTS, backend="virtual").program(**some())
    assert counts(program, "forward") == {"all_reduce ep": 1}


def test_only_rows_over_an_axis_send_nothing_forward():
    specs = {name: pattern.replace("ep", "dp") for name, pattern in ROWS.items()}
    program = shard(step, Mesh("dp=4"), specs, backend="virtual").program(**some())
    assert set(counts(program)) == {"all_reduce dp"}


@pytest.mark.parametrize("load", ["all experts", "all to one", "a rank that gets nothing"])
def test_bytes_sent_are_those_of_the_rows_that_change_ranks(load):
    given = some(rows=16, **LOADS.get(load, {}))
    ranks, width = 4, 8 * D
    sharded = shard(step, Mesh(f"ep={ranks}"), {**ROWS, **EXPERTS}, backend="virtual")
    placed = dict(zip(given, sharded.place(**given), strict=True))
    programs = sharded.compiled(**placed).programs
    shards = pytree.tree_leaves(placed)
    traffic: dict[str, Traffic] = {}
    run_virtual([programs[r] for r in range(ranks)], [[s.shards[r] for s in shards] for r in range(ranks)], traffic)
    home = torch.arange(16).div(16 // ranks, rounding_mode="floor").unsqueeze(1).expand_as(given["ids"])
    for rank in range(ranks):
        away = (home == rank) & (given["ids"] != rank)  # one expert a rank
        here = (home != rank) & (given["ids"] == rank)
        assert traffic["exchange"].sent[rank] == 2 * width * (away.sum() + here.sum())
        assert traffic["exchange"].received[rank] == 2 * width * (away.sum() + here.sum())


# --- what is predicted ----------------------------------------------------------------------------------------------


def test_an_even_share_is_predicted():
    """16 rows, 2 choices each, over 4 ranks: 8 pairs a rank, of which 6 come from others; four times."""
    given = some(rows=16)
    sharded = shard(step, Mesh("ep=4"), {**ROWS, **EXPERTS}, backend="count")
    program = sharded.program(**given)
    counted = count(program)
    rank = counted.ranks[0]
    assert rank.bytes_received["exchange", ("ep",)] == 4 * 6 * D * 8
    assert rank.flops == 2 * 8 * D * HIDDEN * 9
    assert "even share" in str(sharded.explain(**given))
    assert sharded.memory(**given).peak > 0
    assert sharded.cost(**given, device=DEVICES["cpu core"]).bytes_received["ep"] >= 4 * 6 * D * 8


# --- errors -----------------------------------------------------------------------------------------------------------


def test_errors_say_what_was_given_and_what_to_write():
    x, ids, w, out = torch.ones(2, 3), torch.zeros(2, 1, dtype=torch.long), torch.ones(4, 5, 3), torch.ones(4, 3, 5)
    with pytest.raises(ValueError, match="no activation 'tanh'; write one of silu, gelu"):
        experts(x, ids, [w], out, "tanh")
    with pytest.raises(ValueError, match=r"`E f d` and one `E o f`; got .*\(4, 3, 5\), \(4, 3, 5\)"):
        experts(x, ids, [out], out)


# --- real processes --------------------------------------------------------------------------------------------------


def on_a_rank(rank, mesh, specs, load):
    given = some(**load)
    sharded = shard(step, Mesh(mesh), specs, backend="distributed")
    found = sharded.whole(**given)
    expected = step(**given)
    pairs = zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


@pytest.mark.parametrize("load", ["all experts", "a rank that gets nothing", "a rank without rows"])
def test_four_processes_give_what_one_gives(ranks, load):
    errors = ranks.run(on_a_rank, "ep=4", {**ROWS, **EXPERTS}, LOADS.get(load, {}), world_size=4, timeout=120)
    assert max(errors) <= 1e-10


def test_four_processes_with_two_axes_give_what_one_gives(ranks):
    errors = ranks.run(on_a_rank, "dp=2 ep=2", {**BOTH, **EXPERTS}, {}, world_size=4, timeout=120)
    assert max(errors) <= 1e-10
