"""Sharded gradients are sent while the backward computes, but never too many whole ones at once."""

import importlib

import pytest
import torch
from torch.utils._pytree import tree_leaves

from megalith.core import AdamW, grad_and_value, shard
from megalith.core.memory import memory
from megalith.core.program import Launch, Wait
from megalith.sharding import Mesh

flight = importlib.import_module("megalith.core.passes.flight")
N_LAYERS, WIDTH = 12, 192  # large enough to travel alone
GRADIENT_BYTES = 8 * WIDTH * WIDTH


def trained(monkeypatch, limit):
    """A step of deep ZeRO-3: rank 0's program, and what the step gives."""
    monkeypatch.setattr(flight, "IN_FLIGHT_BYTES", limit)
    torch.manual_seed(0)
    params = {str(i): torch.randn(WIDTH, WIDTH, dtype=torch.float64) / 8 for i in range(N_LAYERS)}
    x = torch.randn(2, WIDTH, dtype=torch.float64)

    def loss(params, x):
        for w in params.values():
            x = (x @ w).tanh()
        return x.square().sum()

    def step(params, state, x):
        grads, value = grad_and_value(loss)(params, x)
        return *AdamW().update(grads, state, params), value

    specs = {"{params,state.mu,state.nu}.*": "(dp i) o -> i o", "x": "(dp b) e"}
    sharded = shard(step, Mesh("dp=2"), specs, donate=("params", "state"), backend="virtual")
    state = AdamW().init(params)
    return sharded.program(params, state, x), sharded.whole(params, state, x)


def most_in_flight(program):
    flying, most = {}, 0
    for instruction in program.instructions:
        if isinstance(instruction, Launch) and instruction.kind == "reduce_scatter":
            flying[instruction.pending] = program.types[instruction.buffer].nbytes
        elif isinstance(instruction, Wait):
            flying.pop(instruction.pending, None)
        most = max(most, sum(flying.values()))
    return most


@pytest.mark.parametrize("n", [1, 3])
def test_whole_gradients_in_flight_are_bounded(monkeypatch, n):
    free, expected = trained(monkeypatch, 1 << 40)
    bounded, found = trained(monkeypatch, n * GRADIENT_BYTES)
    assert most_in_flight(free) == N_LAYERS * GRADIENT_BYTES
    assert most_in_flight(bounded) == n * GRADIENT_BYTES
    # What is not in flight is held as the half that this rank keeps.
    assert memory(free).peak - memory(bounded).peak >= (N_LAYERS - n - 1) * GRADIENT_BYTES // 2
    assert all(torch.equal(a, b) for a, b in zip(tree_leaves(found), tree_leaves(expected), strict=True))


def test_one_gradient_larger_than_the_bound_still_travels(monkeypatch):
    program, _ = trained(monkeypatch, GRADIENT_BYTES // 2)
    assert most_in_flight(program) == GRADIENT_BYTES
