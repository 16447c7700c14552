"""Mixtures of experts: exact on every mesh, and their tokens travel in as many bytes as the closed form says."""

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from cases import Bound, error, seeded, tokens
from zoo import DECODER, ZOO, Case, builder, causal, output_loss, reference

from megalith.core import grad_and_value, shard
from megalith.models.huggingface import functional
from megalith.models.moe import (
    MoEConfig,
    MoETransformer,
    balance_loss,
    capacity_anchors,
    choose,
    dropless,
    with_capacity,
    z_loss,
)
from megalith.sharding import Mesh
from megalith.sharding.recipes import data_parallel, expert_parallel, specs_for, tensor_parallel, zero

LIMIT = 1e-10
TINY = dict(vocab=64, dim=32, hidden=16, n_layers=2, n_heads=4, n_kv_heads=4, n_experts=4)


def loss_of(model, batch):
    logits, routing = model(batch["input_ids"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()) + routing


def ours(factor, n_layers=2, batch=4, seq=16, **config):
    def make():
        return MoETransformer(MoEConfig(**{**TINY, "n_layers": n_layers, **config}, capacity_factor=factor))

    return Case("moe", seeded(make), lambda: tokens(batch=batch, seq=seq), loss_of)


def without_capacity(model_class, config):
    """A Hugging Face model as it is, but for the implementation of its experts."""
    return Case("dropless", lambda: dropless(builder(model_class, config())()), causal, output_loss)


MIXTRAL = without_capacity(hf.MixtralForCausalLM, lambda: hf.MixtralConfig(**DECODER, num_local_experts=4))
QWEN = without_capacity(
    hf.Qwen3MoeForCausalLM,
    lambda: hf.Qwen3MoeConfig(
        **DECODER,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=True,
    ),
)


def sharded(case, mesh, *recipes, anchors=None, backend="virtual", strict=False):
    """A step of a case on a mesh, with the parameters and the batch to call it with."""
    fn, params = functional(case.build())
    batch = case.batch()

    def step(params, batch):
        return grad_and_value(lambda p, b: case.loss(Bound(fn, p), b))(params, batch)

    specs = {**specs_for(params, batch, *recipes), **(anchors or {})}
    return shard(step, Mesh(mesh), specs, backend=backend, strict=strict), params, batch


def assert_exact(case, run, params, batch):
    grads, value = run.whole(params, batch)
    loss, expected = reference(case)
    assert error(value, loss) <= LIMIT
    for name, grad in expected.items():
        assert error(grads[name], grad) <= LIMIT, name


# --- routing --------------------------------------------------------------------------------------------------------


def test_a_place_is_taken_once_and_by_the_one_who_came_first():
    torch.manual_seed(0)
    logits = torch.randn(3, 12, 4, dtype=torch.float64)
    weights, ids = choose(logits, 2)
    dispatch, combine = with_capacity(weights, ids, n_experts=4, capacity=5)
    taken = {}
    expected = torch.zeros_like(dispatch)
    for g in range(3):
        for choice in range(2):  # all first choices before any second one
            for s in range(12):
                e = int(ids[g, s, choice])
                place = taken[g, e] = taken.get((g, e), -1) + 1
                if place < 5:
                    expected[g, s, e, place] = weights[g, s, choice]
    torch.testing.assert_close(combine, expected, rtol=0, atol=0)
    torch.testing.assert_close(dispatch, (expected > 0).double(), rtol=0, atol=0)


def test_with_room_for_all_a_capacity_drops_nothing():
    roomy, dropped_nothing = ours(factor=4.0), ours(factor=None)
    (loss, grads), (other, others) = reference(roomy), reference(dropped_nothing)
    assert error(loss, other) <= LIMIT
    assert all(error(grads[name], others[name]) <= LIMIT for name in grads)


def test_a_tight_capacity_drops_tokens():
    assert error(reference(ours(factor=0.5))[0], reference(ours(factor=None))[0]) > 1e-6


def test_the_balance_loss_is_one_for_an_even_load_and_the_number_of_experts_for_one_favourite():
    even = torch.zeros(2, 8, 4)
    ids = torch.arange(8).remainder(4).view(1, 8, 1).expand(2, 8, 1)
    assert balance_loss(even, ids).item() == pytest.approx(1)
    favourite = even.clone()
    favourite[..., 2] = 50.0
    assert balance_loss(favourite, torch.full_like(ids, 2)).item() == pytest.approx(4)


def test_the_z_loss_is_the_mean_square_of_the_log_sum():
    logits = torch.tensor([[[0.0, 0.0], [3.0, 3.0]]])
    low, high = torch.tensor(2.0).log(), torch.tensor(2.0).log() + 3
    assert z_loss(logits).item() == pytest.approx(((low**2 + high**2) / 2).item())


def test_more_choices_than_experts_are_an_error():
    with pytest.raises(ValueError, match="top_k is 5; a token goes to 1 of the 4 experts at least"):
        MoEConfig(**TINY, top_k=5)


# --- exactness ------------------------------------------------------------------------------------------------------

MESHES = {"ep=2": ("ep", ""), "ep=4": ("ep", ""), "dp=2 ep=2": ("dp ep", "dp")}


def each(cases, quick):
    """Every case on every mesh; those that are not quick are left to `nox -s slow`."""
    return [
        pytest.param(case, mesh, marks=() if (name, mesh) in quick else pytest.mark.slow, id=f"{name}-{mesh}")
        for name, case in cases.items()
        for mesh in MESHES
    ]


OURS = {"dropless": None, "capacity": 1.25}
HUGGING_FACE = {"mixtral": MIXTRAL, "qwen3_moe": QWEN}


@pytest.mark.parametrize(("factor", "mesh"), each(OURS, {("dropless", "ep=4"), ("capacity", "dp=2 ep=2")}))
def test_our_model_is_exact(factor, mesh):
    case, (batch_axes, data) = ours(factor), MESHES[mesh]
    anchors = capacity_anchors("ep", data) if factor else {}
    recipes = data_parallel(batch_axes), expert_parallel("ep")
    assert_exact(case, *sharded(case, mesh, *recipes, anchors=anchors))


@pytest.mark.parametrize("factor", [None, 1.25], ids=["dropless", "with a capacity"])
def test_a_batch_that_does_not_divide_is_exact(factor):
    case = ours(factor, batch=3, seq=7)
    anchors = capacity_anchors() if factor else {}
    assert_exact(case, *sharded(case, "ep=2", data_parallel("ep"), expert_parallel("ep"), anchors=anchors))


@pytest.mark.parametrize(("case", "mesh"), each(HUGGING_FACE, {("mixtral", "ep=4"), ("qwen3_moe", "dp=2 ep=2")}))
def test_hugging_face_models_are_exact(case, mesh):
    assert_exact(case, *sharded(case, mesh, data_parallel(MESHES[mesh][0]), expert_parallel("ep")))


def test_experts_over_one_axis_and_tensors_over_another_are_exact():
    assert_exact(
        MIXTRAL, *sharded(MIXTRAL, "ep=2 tp=2", data_parallel("ep"), tensor_parallel("tp"), expert_parallel("ep"))
    )


def test_parameters_at_rest_split_further_are_exact():
    recipes = data_parallel("dp ep"), expert_parallel("ep"), zero(3, "dp")
    assert_exact(MIXTRAL, *sharded(MIXTRAL, "dp=2 ep=2", *recipes))


def test_our_experts_are_those_of_hugging_face():
    (loss, grads), (other, others) = reference(MIXTRAL), reference(ZOO["mixtral"])
    assert error(loss, other) <= LIMIT
    assert all(error(grads[name], others[name]) <= LIMIT for name in others)


def test_a_model_without_experts_is_an_error():
    with pytest.raises(TypeError, match="LlamaForCausalLM has no experts that go through transformers' registry"):
        dropless(ZOO["llama"].build())


# --- bytes ------------------------------------------------------------------------------------------------------------


def sent(case, mesh, kind, *recipes, anchors=None):
    """Count and bytes of the collectives of a kind over ep, by phase."""
    run, params, batch = sharded(case, mesh, *recipes, anchors=anchors, backend="count")
    found = {}
    for c in run.program(params, batch).collectives:
        if c.kind == kind and c.axes == ("ep",):
            n, nbytes = found.get(c.origin.phase, (0, 0))
            found[c.origin.phase] = n + 1, nbytes + c.bytes_received
    return found


@pytest.mark.parametrize("mesh", MESHES)
def test_a_layer_with_a_capacity_is_two_all_to_alls_a_pass(mesh):
    """`g E c e` to experts and back: each time a rank's part, but for what stays where it is."""
    (batch_axes, data), layers, g, s, e = MESHES[mesh], 2, 4, 16, TINY["dim"]
    recipes = data_parallel(batch_axes), expert_parallel("ep")
    found = sent(ours(1.25, layers), mesh, "all_to_all", *recipes, anchors=capacity_anchors("ep", data))
    ep = Mesh(mesh).sizes["ep"]
    capacity = 10  # 1.25 x 16 x 2 / 4
    once = g // Mesh(mesh).size * TINY["n_experts"] * capacity * e * 8 * (ep - 1) // ep
    assert capacity == MoEConfig(**TINY, capacity_factor=1.25).capacity(s)
    assert found == {"forward": (2 * layers, 2 * layers * once), "backward": (2 * layers, 2 * layers * once)}


@pytest.mark.parametrize("case", [ours(None), MIXTRAL, QWEN], ids=["ours", "mixtral", "qwen3_moe"])
def test_a_dropless_layer_is_two_exchanges_a_pass(case):
    """An even share of 64 tokens with 2 choices each: of a rank's 32 rows 24 go to other ranks."""
    found = sent(case, "ep=4", "exchange", data_parallel("ep"), expert_parallel("ep"))
    layers, once = 2, 24 * 32 * 8
    assert found == {"forward": (2 * layers, 2 * layers * once), "backward": (2 * layers, 2 * layers * once)}


@pytest.mark.parametrize("factor", [None, 1.25], ids=["dropless", "with a capacity"])
def test_beside_its_tokens_a_layer_sends_only_gradients_counts_and_the_loss(factor):
    anchors, recipes = capacity_anchors() if factor else {}, (data_parallel("ep"), expert_parallel("ep"))
    run, params, batch = sharded(ours(factor), "ep=2", *recipes, anchors=anchors, backend="count")
    rest = [c for c in run.program(params, batch).collectives if c.kind != ("all_to_all" if factor else "exchange")]
    replicated = sum(p.numel() for name, p in params.items() if ".experts." not in name)
    counts = 0 if factor else 2 * 4 // 2
    assert sum(c.bytes_received for c in rest) <= 8 * (replicated + counts + 4)


@pytest.mark.parametrize("factor", [None, 1.25], ids=["dropless", "with a capacity"])
def test_every_byte_has_been_asked_for(factor):
    anchors, recipes = capacity_anchors() if factor else {}, (data_parallel("ep"), expert_parallel("ep"))
    run, params, batch = sharded(ours(factor), "ep=2", *recipes, anchors=anchors, backend="count", strict=True)
    assert run.program(params, batch).collectives  # else an error names what nobody asked for


# --- real processes --------------------------------------------------------------------------------------------------


def on_a_rank(rank, factor):
    case = ours(factor)
    fn, params = functional(case.build())
    batch = case.batch()

    def step(params, batch):
        return grad_and_value(lambda p, b: case.loss(Bound(fn, p), b))(params, batch)

    table = specs_for(params, batch, data_parallel("dp ep"), expert_parallel("ep"))
    specs = {**table, **(capacity_anchors("ep", "dp") if factor else {})}
    grads, value = shard(step, Mesh("dp=2 ep=2"), specs, backend="distributed").whole(params, batch)
    expected, loss = step(params, batch)
    return max(error(value, loss), *(error(grads[name], grad) for name, grad in expected.items()))


@pytest.mark.parametrize("factor", [None, 1.25], ids=["dropless", "with a capacity"])
def test_four_processes_give_what_one_gives(ranks, factor):
    assert max(ranks.run(on_a_rank, factor, world_size=4, timeout=200)) <= LIMIT
