"""Whatever recipes are composed, a training step is that of one device; and ZeRO moves no more than it has to.

Loss, every gradient and every parameter after a step of AdamW, in float64, to a relative 1e-10.
"""

from collections import Counter
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache

import pytest
import torch
from cases import CASES, Bound, error
from zoo import reference

from megalith.core import AdamW, grad_and_value, shard
from megalith.core.program import Launch
from megalith.models.huggingface import functional
from megalith.sharding import Mesh
from megalith.sharding.recipes import (
    data_parallel,
    expert_parallel,
    sequence_parallel,
    specs_for,
    tensor_parallel,
    zero,
)

LIMIT = 1e-10
OPTIMIZER = AdamW(lr=1e-2, eps=1e-6)
DONATE = ("params", "opt_state")


@dataclass(frozen=True)
class Composed:
    """Recipes on a mesh, and the models on which they run with every test; on the others in `nox -s slow`."""

    mesh: str
    recipes: tuple
    quick: tuple = ("our_llama",)
    models: tuple = ("our_llama", "our_gpt", "llama", "vit")


TEXTS = ("our_llama", "our_gpt", "llama")
TABLES = {
    "dp": Composed("dp=2", (data_parallel(),), ("vit",)),
    "tp": Composed("tp=2", (tensor_parallel(),), ("our_gpt",)),
    "tp with heads": Composed("tp=4", (tensor_parallel(heads=4, kv_heads=2),), ("our_llama_gqa",), ("our_llama_gqa",)),
    "tp with fewer heads of keys": Composed(
        "tp=(kv=2 rep=2)",
        (tensor_parallel(heads=4, kv_heads=2, kv_axis="kv"),),
        ("our_llama_gqa",),
        ("our_llama_gqa",),
    ),
    "zero1": Composed("dp=2", (zero(1),), ()),
    "zero2": Composed("dp=2", (zero(2),), ()),
    "zero3": Composed("dp=2", (zero(3),), ()),
    "ulysses": Composed("sp=2", (sequence_parallel("sp", "ulysses"),), ("our_llama",), TEXTS),
    "ring": Composed("sp=2", (sequence_parallel("sp", "ring"),), ("our_gpt",), TEXTS),
    "ep": Composed("ep=2", (expert_parallel(),), (), ("mixtral", "qwen3_moe")),
    "dp x tp": Composed("dp=2 tp=2", (data_parallel(), tensor_parallel()), ("vit",)),
    "dp x zero1": Composed("dp=4", (data_parallel(), zero(1)), ("our_llama_tied",), ("our_llama_tied", "vit")),
    "dp x zero2": Composed("dp=2", (data_parallel(), zero(2)), ("our_gpt",)),
    "dp x zero3": Composed("dp=4", (data_parallel(), zero(3)), ("vit",)),
    "tp x zero3": Composed("dp=2 tp=2", (tensor_parallel(), zero(3)), ()),
    "tp x megatron": Composed("tp=2", (tensor_parallel(), sequence_parallel("tp")), ("llama",), TEXTS),
    "dp x tp x megatron": Composed(
        "dp=2 tp=2", (data_parallel(), tensor_parallel(), sequence_parallel("tp")), (), TEXTS
    ),
    "dp x tp x zero3": Composed("dp=2 tp=2", (data_parallel(), tensor_parallel(), zero(3)), ("llama",)),
    "hybrid zero3": Composed("rep=2 dp=2", (data_parallel("rep dp"), zero(3))),
    "hybrid zero3, state over all": Composed("rep=2 dp=2", (data_parallel("rep dp"), zero(3), zero(1, "rep")), ()),
    "ulysses x dp": Composed("dp=2 sp=2", (data_parallel(), sequence_parallel("sp", "ulysses")), (), TEXTS),
    "ulysses x tp": Composed("sp=2 tp=2", (tensor_parallel(), sequence_parallel("sp", "ulysses")), (), TEXTS),
    "ring x dp": Composed("dp=2 sp=2", (data_parallel(), sequence_parallel("sp", "ring")), (), TEXTS),
    "ring x ulysses": Composed(
        "cp=2 sp=2", (sequence_parallel("cp", "ring"), sequence_parallel("sp", "ulysses")), (), TEXTS
    ),
    "zero3 x tp x ring": Composed(
        "dp=2 sp=2 tp=2",
        (data_parallel(), sequence_parallel("sp", "ring"), tensor_parallel(), zero(3)),
        ("llama",),
        TEXTS,
    ),
    "ep x dp": Composed("dp=2 ep=2", (data_parallel(), expert_parallel()), ("mixtral",), ("mixtral", "qwen3_moe")),
    "ep x tp x zero3": Composed(
        "dp=2 ep=2 tp=2",
        (data_parallel(), expert_parallel(), tensor_parallel(), zero(3)),
        (),
        ("mixtral", "qwen3_moe"),
    ),
}
PAIRS = [
    pytest.param(name, model, marks=() if model in table.quick else pytest.mark.slow, id=f"{name}-{model}")
    for name, table in TABLES.items()
    for model in table.models
]


@lru_cache(maxsize=None)
def expected(model):
    """Loss, gradients and parameters after a step, on one device."""
    case = CASES[model]
    loss, grads = reference(case)
    params = {name: p.detach() for name, p in case.build().named_parameters() if p.requires_grad}
    return loss, grads, OPTIMIZER.update(grads, OPTIMIZER.init(params), params)[0]


def stepped(case, mesh, *recipes):
    """The same on a mesh, and the step."""
    fn, params = functional(case.build())
    batch = case.batch()

    def step(params, opt_state, batch):
        grads, loss = grad_and_value(lambda p: case.loss(Bound(fn, p), batch))(params)
        return *OPTIMIZER.update(grads, opt_state, params), loss, grads

    run = shard(step, Mesh(mesh), specs_for(params, batch, *recipes), donate=DONATE, backend="virtual")
    new, _, loss, grads = run.whole(params, OPTIMIZER.init(params), batch)
    return loss, grads, new


@pytest.mark.parametrize(("name", "model"), PAIRS)
def test_a_step_is_that_of_one_device(name, model):
    case = CASES[model]
    loss, grads, params = expected(model)
    found_loss, found_grads, found_params = stepped(case, TABLES[name].mesh, *TABLES[name].recipes)
    assert error(found_loss, loss) <= LIMIT
    assert found_grads.keys() == grads.keys()
    largest = max(g.abs().max() for g in grads.values())
    for key, grad in grads.items():
        # A gradient that is rightly zero is rounding of the size of the others.
        least = largest if case.zero_grad and fnmatchcase(key, case.zero_grad) else 0.0
        assert error(found_grads[key], grad, least) <= LIMIT, key
        assert error(found_params[key], params[key]) <= LIMIT, key
