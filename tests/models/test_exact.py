"""Sharding changes nothing: loss and every gradient of each model equal the unsharded ones, on every mesh.

Acceptance point 1: relative error at most 1e-10 in float64. Then: no collective more than the layouts need.
"""

from collections import Counter
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import pytest
import torch
from cases import CASES, LLAMA, PLANS, TINY, Bound, Plan, error, next_token_loss, seeded, tokens
from zoo import ZOO, Case, reference

from megalith.core.program import Launch
from megalith.core.shard import shard
from megalith.core.transforms import grad_and_value
from megalith.models.huggingface import functional, unmatched
from megalith.models.llama import Llama, LlamaConfig
from megalith.sharding import Mesh
from megalith.sharding.recipes import specs_for, tensor_parallel

LIMIT = 1e-10


@dataclass
class Result:
    loss: torch.Tensor
    grads: dict
    program: object = None
    launches: list = field(default_factory=list)


def sharded(case, mesh, specs):
    fn, params = functional(case.build())
    batch = case.batch()

    def step(params, batch):
        return grad_and_value(lambda p, b: case.loss(Bound(fn, p), b))(params, batch)

    run = shard(step, Mesh(mesh), specs(params, batch) if callable(specs) else specs, backend="virtual")
    placed = {"params": run.place(params=params), "batch": run.place(batch=batch)}
    grads, loss = run.gather_output(run(**placed), **placed)
    program = run.compiled(**placed).programs[0]
    return Result(loss, grads, program, [i for i in program.instructions if isinstance(i, Launch)])


def assert_exact(case, result):
    loss, grads = reference(case)
    assert error(result.loss, loss) <= LIMIT
    assert result.grads.keys() == grads.keys()
    largest = max(g.abs().max() for g in grads.values())
    for name, grad in grads.items():
        # A gradient that is rightly zero is rounding of the size of the others.
        least = largest if case.zero_grad and fnmatchcase(name, case.zero_grad) else 0.0
        assert error(result.grads[name], grad, least) <= LIMIT, name


# Every model on every mesh; the heaviest combinations are left to `nox -s slow`.
SLOW = {(m, p) for m in ("t5", "whisper", "gemma2", "gemma3") for p in ("tp4", "dp4")}
PAIRS = [
    pytest.param(model, plan, marks=pytest.mark.slow if (model, plan) in SLOW else (), id=f"{model}-{plan}")
    for model in CASES
    for plan in PLANS
]


@pytest.mark.parametrize(("model", "plan"), PAIRS)
def test_loss_and_gradients_are_those_of_one_device(model, plan):
    case = CASES[model]
    assert_exact(case, sharded(case, PLANS[plan].mesh, PLANS[plan].specs))


# --- spec tables ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", CASES)
def test_the_tables_know_every_parameter(model):
    assert unmatched(CASES[model].build()) == []


@pytest.mark.parametrize("model", CASES)
def test_every_matrix_of_a_layer_is_split(model):
    """Large parameters that stay replicated are a mistake of the tables, not a choice."""
    built = CASES[model].build()
    specs = specs_for(built, None, tensor_parallel())
    layers = [p for p in specs if ".*." in p and not any(n in p for n in ("norm", "ln_", "Norm", "mlp.gate.weight"))]
    assert layers
    for pattern in layers:
        if "bias" not in pattern:
            assert "tp" in specs[pattern], pattern


def test_an_unknown_parameter_is_reported_and_replicated():
    params = {"layers.0.q_proj.weight": torch.empty(4, 4), "layers.0.mystery": torch.empty(4, 4)}
    assert unmatched(params) == ["layers.0.mystery"]
    assert specs_for(params, None, tensor_parallel())["layers.*.mystery"] == "d0 d1"


# --- uneven sizes ---------------------------------------------------------------------------------------------------


def uneven(vocab=64, batch=4, seq=16, **config):
    return Case(
        "uneven",
        seeded(lambda: Llama(LlamaConfig(**{**TINY, "hidden": 64, "n_kv_heads": 4, **config, "vocab": vocab}))),
        lambda: tokens(vocab, batch, seq),
        next_token_loss,
    )


UNEVEN = {
    "a vocabulary of 50257": (uneven(vocab=50257, dim=8, hidden=8, n_heads=2, n_kv_heads=2, n_layers=1), "tp=4"),
    "a batch of 6 over 4": (uneven(batch=6), "dp=4"),
    "a batch of 3 over 4": (uneven(batch=3), "dp=4"),
    "a batch of 5 over 2 with tensors over 2": (uneven(batch=5), "dp=2 tp=2"),
    "6 heads over 4": (uneven(dim=24, n_heads=6, n_kv_heads=6), "tp=4"),
    "6 heads, 3 of keys, over 4": (uneven(dim=24, n_heads=6, n_kv_heads=3), "tp=4"),
    "a hidden size of 5 over 4": (uneven(hidden=5), "tp=4"),
    "a vocabulary of 5 over 4": (uneven(vocab=5), "tp=4"),
    "3 ranks": (uneven(hidden=50), "tp=3"),
    "sequences of 5": (uneven(seq=5), "dp=2 tp=2"),
}


@pytest.mark.parametrize("name", UNEVEN)
def test_sizes_that_do_not_divide_are_exact(name):
    case, mesh = UNEVEN[name]
    assert_exact(case, sharded(case, mesh, Plan(mesh).specs))


def test_uneven_parameters_at_rest_are_exact():
    case = uneven(vocab=61, hidden=50)
    assert_exact(case, sharded(case, "dp=2 tp=2", Plan("dp=2 tp=2", stored=True).specs))


# --- counts -----------------------------------------------------------------------------------------------------------


def counts(result, phase=None, module=""):
    found = [i for i in result.launches if phase in (None, i.origin.phase) and module in i.origin.module]
    return Counter(i.kind for i in found)


def test_fused_qkv_needs_no_gather():
    """GPT-2's `(3 tp o)`: cut in three and joined again in the backward where it lies."""
    result = sharded(ZOO["gpt2"], "tp=2", Plan("tp=2").specs)
    assert set(counts(result)) == {"all_reduce"}
    assert len(result.launches) <= 13  # 4 a layer, and those of embedding and loss


def test_a_llama_layer_has_two_all_reduces_forward_and_two_backward():
    """By the difference of models of two and of four layers: what embedding and loss need drops out."""

    def layers(n):
        case = Case(
            "llama",
            seeded(lambda: Llama(LlamaConfig(**{**TINY, "n_layers": n}, hidden=64, n_kv_heads=4))),
            tokens,
            next_token_loss,
        )
        return sharded(case, "tp=2", Plan("tp=2").specs)

    two, four = layers(2), layers(4)
    for phase in ("forward", "backward"):
        assert counts(four, phase) - counts(two, phase) == Counter({"all_reduce": 4}), phase


def test_data_parallel_communicates_gradients_and_the_loss_only():
    """Sums of everything, in buckets: no gather, and not a byte more than gradients and two scalars."""
    result = sharded(LLAMA, "dp=4", Plan("dp=4").specs)
    assert set(counts(result)) == {"all_reduce"}
    nbytes = sum(g.numel() * g.element_size() for g in result.grads.values())
    moved = sum(i.bytes_received for i in result.launches)
    assert moved <= 2 * (nbytes + 64) * 3 / 4


def test_parameters_at_rest_are_gathered_for_each_phase_and_gradients_scattered():
    result = sharded(LLAMA, "dp=2 tp=2", Plan("dp=2 tp=2", stored=True).specs)
    over_dp = [i for i in result.launches if i.axes == ("dp",)]
    gathers = [i for i in over_dp if i.kind == "all_gather"]
    scattered = sum(i.bytes_received for i in over_dp if i.kind == "reduce_scatter")
    assert {i.origin.phase for i in gathers} == {"forward", "backward"}
    assert 0 < scattered <= sum(i.bytes_received for i in gathers) <= 2 * scattered
    assert all(i.bytes_received <= 64 for i in over_dp if i.kind == "all_reduce")
