"""Whatever recipes are composed, a training step is that of one device; and ZeRO moves no more than it has to.

Loss, every gradient and every parameter after a step of AdamW, in float64, to a relative 1e-10.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from fractions import Fraction
from functools import cache

import pytest
import torch
from cases import CASES, LLAMA, Bound, error, next_token_loss, seeded, tokens
from oracle import close
from unseen import Unseen
from zoo import Case, reference

from megalith.core import AdamW, grad_and_value, shard
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
    "dp": Composed("dp=2", (data_parallel(),), ()),
    "tp": Composed("tp=2", (tensor_parallel(),), ()),
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
    "dp x zero1": Composed("dp=4", (data_parallel(), zero(1)), ("our_llama_tied",), ("our_llama_tied", "vit", "llama")),
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


@cache
def expected(case):
    """Loss, gradients and parameters after a step, on one device."""
    loss, grads = reference(case)
    params = {name: p.detach() for name, p in case.build().named_parameters() if p.requires_grad}
    return loss, grads, OPTIMIZER.update(grads, OPTIMIZER.init(params), params)[0]


def training(case, mesh, *recipes, backend="virtual"):
    """A step of AdamW on a mesh, and what it takes: it gives the loss and the gradients too."""
    fn, params = functional(case.build())
    batch = case.batch()

    def step(params, opt_state, batch):
        grads, loss = grad_and_value(lambda p: case.loss(Bound(fn, p), batch))(params)
        return *OPTIMIZER.update(grads, opt_state, params), loss, grads

    run = shard(step, Mesh(mesh), specs_for(params, batch, *recipes), donate=DONATE, backend=backend)
    return run, (params, OPTIMIZER.init(params), batch)


def errors(case, table, backend):
    """By what, the relative error of the loss, of each gradient and of each parameter after a step."""
    loss, grads, params = expected(case)
    run, given = training(case, table.mesh, *table.recipes, backend=backend)
    found_params, _, found_loss, found_grads = run.whole(*given)
    assert found_grads.keys() == grads.keys()
    largest = max(g.abs().max() for g in grads.values())
    found = {"loss": error(found_loss, loss)}
    for name, grad in grads.items():
        # A gradient that is rightly zero is rounding of the size of the others.
        least = largest if case.zero_grad and fnmatchcase(name, case.zero_grad) else 0.0
        found[f"gradient of {name}"] = error(found_grads[name], grad, least)
        found[name] = error(found_params[name], params[name])
    return found


def assert_exact(found):
    worst = max(found, key=found.get)
    assert found[worst] <= LIMIT, (worst, found[worst])


@pytest.mark.parametrize(("name", "model"), PAIRS)
def test_a_step_is_that_of_one_device(name, model):
    assert_exact(errors(CASES[model], TABLES[name], "virtual"))


@pytest.mark.parametrize(
    "name", ["hybrid zero3, state over all", pytest.param("dp x tp x megatron", marks=pytest.mark.slow)]
)
def test_a_step_on_four_processes_is_that_of_one_device(ranks, name):
    for found in ranks.run(lambda _, table: errors(LLAMA, table, "distributed"), TABLES[name], timeout=300):
        assert_exact(found)


# --- parameters of every kind, and models that no table knows ---------------------------------------------------------

KINDS = {"scale": (), "cls": (1, 1, 5), "up": (7, 5), "frozen": (7, 7), "down": (5, 7), "unused": (6, 3)}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("mesh", ["dp=2", "rep=2 dp=2"])
def test_zero_splits_scalars_frozen_unused_and_uneven_parameters(stage, mesh):
    params = {name: torch.randn(shape, dtype=torch.float64) for name, shape in KINDS.items()}
    trained = [name for name in KINDS if name != "frozen"]
    x = torch.randn(6, 3, 5, dtype=torch.float64)

    def loss(part, params, x):
        hidden = torch.tanh((x + part["cls"]) @ part["up"].T) @ params["frozen"]
        return (hidden @ part["down"].T * part["scale"]).square().mean()

    def step(params, opt_state, x):
        part = {name: params[name] for name in trained}
        grads, value = grad_and_value(loss)(part, params, x)
        part, opt_state = OPTIMIZER.update(grads, opt_state, part)
        return {**params, **part}, opt_state, value

    given = params, OPTIMIZER.init({name: params[name] for name in trained}), x
    table = specs_for(params, {"x": x}, data_parallel("rep dp" if "rep" in mesh else "dp"), zero(stage))
    run = shard(step, Mesh(mesh), table, donate=DONATE, backend="virtual")
    close(run.whole(*given), step(*given))
    placed = run.place(*given)
    numbers = {name: sum(t.numel() for t in placed[1]["mu"][name].shards) for name in trained}
    n_copies = 2 if "rep" in mesh else 1
    assert numbers == {name: params[name].numel() * (n_copies if name != "scale" else 2 * n_copies) for name in trained}


UNSEEN = Case("unseen", seeded(Unseen), lambda: tokens(vocab=48), next_token_loss, zero_grad="*.tell.bias")


@pytest.mark.parametrize("recipes", [(), (sequence_parallel("tp"),), (zero(3),)], ids=["tp", "megatron", "zero3"])
def test_a_model_that_no_table_knows_is_split_as_well_as_one_that_they_know(recipes):
    table = Composed("dp=2 tp=2", (data_parallel(), tensor_parallel(), *recipes))
    assert_exact(errors(UNSEEN, table, "virtual"))
    run, given = training(UNSEEN, "tp=2", tensor_parallel(), backend="count")
    large = [c for c in run.program(*given).collectives if c.bytes_received > 4096]
    assert [c.kind for c in large] == ["all_reduce"] * (2 * 2 * 2 + 2)  # as Megatron's: four a layer, embedding, head


# --- bytes ------------------------------------------------------------------------------------------------------------


def share(n):
    """What a rank of n receives of each byte in an all-gather, or a reduce-scatter."""
    return Fraction(n - 1, n)


# For each byte of parameters; (s, r) ranks in a node, and nodes.
CLOSED_FORMS = {
    "data parallel": (data_parallel("rep dp"), (), lambda s, r: 2 * share(s * r)),
    "zero1": (data_parallel("rep dp"), (zero(1, "rep dp"),), lambda s, r: 2 * share(s * r)),
    "zero2": (data_parallel("rep dp"), (zero(2, "rep dp"),), lambda s, r: 2 * share(s * r)),
    "zero3": (data_parallel("rep dp"), (zero(3, "rep dp"),), lambda s, r: 3 * share(s * r)),
    "hybrid zero1": (data_parallel("rep dp"), (zero(1),), lambda s, r: 2 * share(s) + 2 * share(r) / s),
    "hybrid zero3": (data_parallel("rep dp"), (zero(3),), lambda s, r: 3 * share(s) + 2 * share(r) / s),
    # The gradient is scattered over all; of the parameters a rank gathers its stored part from the other nodes.
    "hybrid zero3, state over all": (
        data_parallel("rep dp"),
        (zero(3), zero(1, "rep")),
        lambda s, r: 2 * share(s) + share(s * r) + share(r) / s,
    ),
}


@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_zero_moves_no_byte_more_than_its_closed_form(name):
    data, stages, per_byte = CLOSED_FORMS[name]
    run, given = training(LLAMA, "rep=2 dp=2", data, *stages, backend="count")
    params = given[0]
    moved = sum(c.bytes_received for c in run.program(*given).collectives)
    nbytes = sum(p.nbytes for p in params.values())
    saved = 0
    if any("->" in pattern for pattern in run.specs.values()):  # the backward does not read the embedding
        axes = 4 if name == "zero3" else 2
        saved = share(axes) * params["model.embed_tokens.weight"].nbytes
    scalars = 2 * 2 * share(4) * 4 * 8  # the loss's sum and count, all-reduced, a float64 padded to a rank's each
    assert moved == per_byte(2, 2) * nbytes - saved + scalars
