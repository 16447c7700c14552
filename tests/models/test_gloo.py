"""Sharding changes nothing on real processes either: four ranks over gloo, in float32.

Acceptance point 1: loss and every gradient within 1e-5 of the unsharded ones, relative to the largest of the gradient.
The whole table is for `nox -s slow`; a part of it runs with the tests.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest
import torch
from cases import CASES, PLANS, Bound, error

from megalith.core import grad_and_value, shard
from megalith.models.huggingface import functional
from megalith.sharding import Mesh

LIMIT = 1e-5
QUICK = {("llama", "dp2_tp2"), ("llama", "stored_dp2_tp2"), ("gpt2", "tp4"), ("mixtral", "dp4")}
PAIRS = [
    pytest.param(model, plan, marks=() if (model, plan) in QUICK else pytest.mark.slow, id=f"{model}-{plan}")
    for model in CASES
    for plan in PLANS
]


def on_a_rank(rank, model, plan):
    """The largest relative error of the loss and of each gradient, as this rank gathers them."""
    case = CASES[model]
    built = case.build().float()
    batch = {name: t.float() if t.dtype == torch.float64 else t for name, t in case.batch().items()}
    fn, params = functional(built)

    def step(params, batch):
        return grad_and_value(lambda p, b: case.loss(Bound(fn, p), b))(params, batch)

    expected, loss = step(params, batch)
    run = shard(step, Mesh(PLANS[plan].mesh), PLANS[plan].specs(params, batch), backend="distributed")
    placed = {"params": run.place(params=params), "batch": run.place(batch=batch)}
    grads, value = run.gather_output(run(**placed))
    largest = max(g.abs().max() for g in expected.values())
    found = {"loss": error(value, loss)}
    for name, grad in expected.items():  # one that is rightly zero is rounding of the size of the others
        rightly_zero = case.zero_grad and fnmatchcase(name, case.zero_grad)
        found[name] = error(grads[name], grad, largest if rightly_zero else 0.0)
    return found


@pytest.mark.parametrize(("model", "plan"), PAIRS)
def test_loss_and_gradients_on_four_processes_are_those_of_one(ranks, model, plan):
    for errors in ranks.run(on_a_rank, model, plan, world_size=4, timeout=300):
        worst = max(errors, key=errors.get)
        assert errors[worst] <= LIMIT, (worst, errors[worst])
