"""Optimizers step as torch's do, over many steps, wherever their state lives."""

import math

import pytest
import torch
from oracle import close, randn

from megalith.core import SGD, AdamW, grad_and_value, shard
from megalith.sharding import Mesh

STEPS = 20


def loss(params, x):
    return ((x @ params["a"]).tanh() @ params["b"] + params["c"]).pow(2).mean()


def start():
    return {"a": randn(6, 8), "b": randn(8, 6), "c": randn(6)}


def warmup(step):
    return 1e-2 * torch.clamp(step / 5, max=1.0)


def cosine(step):
    return 1e-2 * 0.5 * (1 + torch.cos(step * (math.pi / STEPS)))


def constant(step):
    return 1e-2


OPTIMIZERS = {
    "adamw": (AdamW(lr=1e-2), lambda p: torch.optim.AdamW(p, lr=1e-2)),
    "adamw without decay": (
        AdamW(lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.0),
        lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.0),
    ),
    "adamw with much decay": (
        AdamW(lr=1e-2, weight_decay=0.5),
        lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.5),
    ),
    "sgd": (SGD(lr=1e-2), lambda p: torch.optim.SGD(p, lr=1e-2)),
    "sgd with momentum": (SGD(lr=1e-2, momentum=0.9), lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9)),
    "sgd with decay": (
        SGD(lr=1e-2, momentum=0.9, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=0.1),
    ),
}
SCHEDULES = {"warmup": warmup, "cosine": cosine}


def torchs(make, params, batches, schedule=None):
    """The parameters after torch's optimizer."""
    mine = {k: p.clone().requires_grad_() for k, p in params.items()}
    optimizer = make(list(mine.values()))
    for i, x in enumerate(batches):
        if schedule is not None:
            for group in optimizer.param_groups:
                group["lr"] = float(schedule(torch.tensor(i + 1.0, dtype=torch.float64)))
        optimizer.zero_grad()
        loss(mine, x).backward()
        optimizer.step()
    return {k: p.detach() for k, p in mine.items()}


def stepper(optimizer):
    def step(params, opt_state, x):
        grads, value = grad_and_value(loss)(params, x)
        params, opt_state = optimizer.update(grads, opt_state, params)
        return params, opt_state, value

    return step


def with_rate(name, schedule):
    cls = AdamW if name.startswith("adamw") else SGD
    make = torch.optim.AdamW if cls is AdamW else torch.optim.SGD
    return cls(lr=schedule), lambda p: make(p, lr=1.0)


def batches():
    return [randn(8, 6) for _ in range(STEPS)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_steps_as_torchs(name):
    optimizer, make = OPTIMIZERS[name]
    params, xs = start(), batches()
    wanted = torchs(make, params, xs)
    state, step = optimizer.init(params), stepper(optimizer)
    for x in xs:
        params, state, _ = step(params, state, x)
    close(params, wanted)
    assert int(state["step"]) == STEPS


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_schedule_is_a_function_of_the_step(name, schedule):
    rate = SCHEDULES[schedule]
    optimizer, make = with_rate(name, lambda step: rate(step.double()))
    params, xs = start(), batches()
    wanted = torchs(make, params, xs, rate)
    state, step = optimizer.init(params), stepper(optimizer)
    for x in xs:
        params, state, _ = step(params, state, x)
    close(params, wanted)


MESHES = {
    "replicated": ("dp=2", {"x": "(dp b) e"}),
    "tensor parallel": ("tp=2", {"a": "i (tp o)", "b": "(tp i) o"}),
    "both": ("dp=2 tp=2", {"a": "i (tp o)", "b": "(tp i) o", "x": "(dp b) e"}),
    "zero 1": ("dp=4", {"{a,b,c}": "...", "{a,b,c}:state": "(dp o) ...", "x": "(dp b) e"}),
    "zero 3": ("dp=4", {"{a,b,c}": "(dp o) ... -> o ...", "x": "(dp b) e"}),
}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", ["adamw", "sgd with decay", "scheduled"])
def test_it_steps_as_torchs_on_a_mesh(name, mesh):
    rate = None if name != "scheduled" else (lambda step: cosine(step.double()))
    optimizer, make = OPTIMIZERS[name] if rate is None else with_rate("adamw", rate)
    pattern, specs = MESHES[mesh]
    params, xs = start(), batches()
    wanted = torchs(make, params, xs, rate)
    step = shard(stepper(optimizer), Mesh(pattern), specs, donate=("params", "opt_state"), backend="virtual")
    p, s = step.place(params, optimizer.init(params))
    for x in xs:
        p, s, _ = step(p, s, step.place(x=x))
    close(step.gather(params=p), wanted)


@pytest.mark.parametrize("mesh", ["zero 1", "zero 3"])
def test_sharded_state_takes_its_share_of_memory(mesh):
    pattern, specs = MESHES[mesh]
    params = {"a": randn(8, 4), "b": randn(8, 4), "c": randn(8)}
    optimizer = AdamW()
    step = shard(stepper(optimizer), Mesh(pattern), specs, backend="virtual")
    state = step.place(opt_state=optimizer.init(params))
    assert state["mu"]["a"].shards[0].shape == state["nu"]["a"].shards[3].shape == (2, 4)


def test_update_is_pure():
    params = start()
    for optimizer in (AdamW(), SGD(momentum=0.9)):
        state = optimizer.init(params)
        before = torch.utils._pytree.tree_map(torch.clone, (params, state))
        optimizer.update({k: torch.ones_like(p) for k, p in params.items()}, state, params)
        torch.testing.assert_close((params, state), before, rtol=0, atol=0)


def test_parameters_of_two_dtypes_step_together():
    params = {"a": randn(4).float(), "b": randn(4)}
    for optimizer, make in (OPTIMIZERS["adamw"], OPTIMIZERS["sgd with momentum"]):
        mine = {k: p.clone().requires_grad_() for k, p in params.items()}
        theirs = make(list(mine.values()))
        sum(p.double().pow(2).sum() for p in mine.values()).backward()
        theirs.step()
        new, _ = optimizer.update({k: p.grad for k, p in mine.items()}, optimizer.init(params), params)
        assert {k: p.dtype for k, p in new.items()} == {k: p.dtype for k, p in params.items()}
        close(new["b"], mine["b"].detach())
        torch.testing.assert_close(new["a"], mine["a"].detach())
