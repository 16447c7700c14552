"""Faults that other systems had cannot happen here: replicas that drift, sums that count twice, ranks that hang."""

import pytest
import torch
import torch.nn.functional as F
from oracle import close, counts, randn
from torch.func import functional_call

from megalith.core import SGD, AdamW, grad_and_value, shard
from megalith.models.llama import Llama, LlamaConfig
from megalith.sharding import Mesh
from megalith.sharding.recipes import data_parallel, sequence_parallel, specs_for, tensor_parallel, zero

PLANS = {
    "dp": ("dp=4", [data_parallel()]),
    "tp": ("tp=4", [tensor_parallel()]),
    "ZeRO-3": ("dp=4", [data_parallel(), zero(3)]),
    "tp and ZeRO-3": ("dp=2 tp=2", [data_parallel(), tensor_parallel(), zero(3)]),
    "tp and sequence": ("dp=2 tp=2", [data_parallel(), tensor_parallel(), sequence_parallel("tp")]),
}
CONFIG = dict(vocab=64, dim=16, hidden=24, n_layers=2, n_heads=4, n_kv_heads=4)


class Training:
    """A small Llama with its loss, parameters and batches of the sizes asked for, all from one seed."""

    def __init__(self, dtype=torch.float64, sizes=(8, 8, 8), frozen=(), **config):
        torch.manual_seed(0)
        self.model = Llama(LlamaConfig(**{**CONFIG, **config})).to(dtype)
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.add_(torch.randn_like(p), alpha=0.15).requires_grad_(not name.startswith(tuple(frozen)))
        self.params = {name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}
        self.batches = [{name: torch.randint(64, (n, 16)) for name in "xy"} for n in sizes]

    def loss(self, params, batch):
        logits = functional_call(self.model, params, (batch["x"],))
        return F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten())

    def sharded(self, step, plan, backend):
        mesh, recipes = PLANS[plan]
        specs = specs_for(self.params, self.batches[0], *recipes)
        return shard(step, Mesh(mesh), specs, donate=("params", "state"), backend=backend)


def adamw_step(training):
    optimizer = AdamW(lr=1e-2)

    def step(params, state, batch):
        grads, value = grad_and_value(training.loss)(params, batch)
        return *optimizer.update(grads, state, params), value

    return step, optimizer.init(training.params)


def trained(training, plan, backend, step, state):
    """Parameters, state and losses after a step on each batch, on a mesh; and this process's own parameters."""
    run = training.sharded(step, plan, backend)
    params, state = run.place(training.params, state)
    losses = []
    for batch in training.batches:
        params, state, value = run(params, state, run.place(batch=batch))
        losses.append(value)
    whole = run.gather_output((params, state, value))
    return whole[0], whole[1], losses, params


def alone(training, step, state):
    params, losses = training.params, []
    for batch in training.batches:
        params, state, value = step(params, state, batch)
        losses.append(value)
    return params, state, losses


# --- sums --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 4])
def test_the_gradients_of_what_q_k_and_v_read_are_one_sum(n):
    """Not three: each of the three products is a term of a sum over ranks, and they are added before it is made."""
    params = {name: randn(8, 8) for name in ("before", "q", "k", "v")}
    x = randn(4, 6, 8)

    def of(params, x):
        y = (x @ params["before"]).tanh()
        q, k, v = (y @ params[name].T for name in "qkv")
        return (q * k.sigmoid() * v).sum()

    def step(params, x):
        return grad_and_value(lambda params: of(params, x))(params)[0]

    sharded = shard(step, Mesh(f"tp={n}"), {name: "(tp o) i" for name in "qkv"}, backend="virtual")
    close(sharded.whole(params, x), step(params, x))  # the loss is not asked for, and so not summed
    backward = [c for c in sharded.program(params, x).collectives if c.origin.phase == "backward"]
    assert [c.kind for c in backward] == ["all_reduce"]
    assert backward[0].bytes_received == x.numel() * 8 * 2 * (n - 1) // n


@pytest.mark.parametrize("n_layers", [2, 3])
def test_a_layer_sums_twice_in_the_backward(n_layers):
    training = Training(n_layers=n_layers)
    run = training.sharded(adamw_step(training)[0], "tp", "virtual")
    program = run.program(training.params, adamw_step(training)[1], training.batches[0])
    assert counts(program, "backward") == {"all_reduce tp": 2 * n_layers + 1}  # the head's too


# --- replicas --------------------------------------------------------------------------------------------


def own_norms(rank, plan):
    training = Training(torch.float32)
    step, state = adamw_step(training)
    whole, _, losses, mine = trained(training, plan, "distributed", step, state)
    wanted, _, _ = alone(training, step, state)
    furthest = max((whole[name] - wanted[name]).abs().max().item() for name in wanted)
    return {name: p.clone() for name, p in mine.items() if "norm" in name}, losses, furthest


@pytest.mark.parametrize("plan", ["tp", "tp and sequence"])
def test_norms_stay_the_same_on_all_ranks(ranks, plan):
    """With the sequence split each rank sees some tokens only, so a norm's gradient is a sum over the tensor axis."""
    first, *others = ranks.run(own_norms, plan, world_size=4, timeout=120)
    norms = {name: p for name, p in Training(torch.float32).params.items() if "norm" in name}
    assert first[0].keys() == norms.keys() and len(norms) == 5
    assert not any(torch.equal(first[0][name], p) for name, p in norms.items())
    for held, losses, _ in others:
        assert all(torch.equal(held[name], first[0][name]) for name in norms)
        assert all(torch.equal(a, b) for a, b in zip(losses, first[1], strict=True))
    assert first[2] < 1e-4  # of AdamW's steps of 1e-2 in float32


@pytest.mark.parametrize("plan", PLANS)
def test_a_global_norm_counts_each_element_once(plan):
    """Written in plain torch: neither replicas twice, nor this rank's shards only."""
    training = Training()

    def step(params, state, batch):
        grads, _ = grad_and_value(training.loss)(params, batch)
        norm = torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt()
        clipped = {name: g * (0.1 / norm).clamp(max=1) for name, g in grads.items()}
        params, state = SGD(lr=1.0).update(clipped, state, params)
        return params, state, norm

    state = SGD(lr=1.0).init(training.params)
    params, _, norms, _ = trained(training, plan, "virtual", step, state)
    wanted, _, wanted_norms = alone(training, step, state)
    assert all(norm > 0.1 for norm in wanted_norms)  # or nothing is clipped
    close(params, wanted)
    for norm, alike in zip(norms, wanted_norms, strict=True):
        close(list(norm.shards), [alike] * 4)


@pytest.mark.parametrize("plan", PLANS)
def test_tied_embeddings_stay_one_parameter(plan):
    training = Training(tied=True)
    step, state = adamw_step(training)
    params, _, losses, _ = trained(training, plan, "virtual", step, state)
    wanted, _, wanted_losses = alone(training, step, state)
    assert "lm_head.weight" not in params and params.keys() == wanted.keys()
    close(params, wanted, 1e-9)
    assert wanted_losses[-1] < wanted_losses[0]
    close([value.shards[0] for value in losses], wanted_losses)


# --- ranks that would wait for ever ------------------------------------------------------------------------


def furthest_from_alone(rank, plan, options, unused=False):
    """How far parameters and state are from those of one device after some steps, relative to AdamW's steps."""
    training = Training(**options)
    if unused:
        training.params["unused"] = torch.ones(6, 3, dtype=torch.float64)
        whole = training.loss
        training.loss = lambda params, batch: whole({n: p for n, p in params.items() if n != "unused"}, batch)
    step, state = adamw_step(training)
    params, mine, _, _ = trained(training, plan, "distributed", step, state)
    wanted, theirs, _ = alone(training, step, state)
    assert params.keys() == wanted.keys()
    pairs = [(params, wanted), (mine["mu"], theirs["mu"]), (mine["nu"], theirs["nu"])]
    return max((a[name] - b[name]).abs().max().item() for a, b in pairs for name in b)


@pytest.mark.parametrize("plan", ["dp", "ZeRO-3"])
def test_frozen_layers_hang_nobody(ranks, plan):
    """The first layer and the embedding want no gradients, so that nothing is reduced for them."""
    options = {"frozen": ("model.layers.0.", "model.embed_tokens"), "sizes": (8, 8)}
    assert max(ranks.run(furthest_from_alone, plan, options, world_size=4, timeout=90)) < 1e-9


@pytest.mark.parametrize("plan", ["dp", "ZeRO-3", "tp and ZeRO-3"])
def test_a_last_batch_of_another_size_hangs_nobody(ranks, plan):
    """Eight rows, then five and then three, which some ranks have none of, and eight again."""
    options = {"sizes": (8, 5, 3, 8)}
    assert max(ranks.run(furthest_from_alone, plan, options, world_size=4, timeout=90)) < 1e-9


def ahead(rank):
    """Losses of batches that were all placed before the first was used."""
    training = Training(sizes=(8, 5, 8))
    run = shard(training.loss, Mesh("dp=4"), {"batch.*": "(dp b) s"}, backend="distributed")
    params = run.place(params=training.params)
    placed = [run.place(batch=batch) for batch in training.batches]
    found = [run(params, batch) for batch in placed]
    return [(a - training.loss(training.params, b)).abs().item() for a, b in zip(found, training.batches, strict=True)]


def test_batches_may_be_placed_ahead(ranks):
    for errors in ranks.run(ahead, world_size=4, timeout=90):
        assert max(errors) < 1e-10


@pytest.mark.parametrize("plan", ["dp", "ZeRO-3"])
def test_a_parameter_that_nobody_uses_keeps_its_state(ranks, plan):
    """Its gradient is zero: AdamW decays it and its moments stay, as on one device."""
    options = {"sizes": (8, 8)}
    assert max(ranks.run(furthest_from_alone, plan, options, True, world_size=4, timeout=90)) < 1e-9


@pytest.mark.parametrize("plan", PLANS)
def test_an_unused_parameters_gradient_is_zeros(plan):
    training = Training()
    training.params["unused"] = torch.ones(6, 3, dtype=torch.float64)

    def step(params, batch):
        used = {name: p for name, p in params.items() if name != "unused"}
        return grad_and_value(lambda p, b: training.loss({**used, **{n: p[n] for n in used}}, b))(params, batch)

    mesh, recipes = PLANS[plan]
    run = shard(step, Mesh(mesh), specs_for(training.params, training.batches[0], *recipes), backend="virtual")
    grads, _ = run.whole(training.params, training.batches[0])
    assert torch.equal(grads["unused"], torch.zeros(6, 3, dtype=torch.float64))
    close(grads, step(training.params, training.batches[0])[0])
