"""On a GPU: a sharded step computes there what it computes on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from megalith.core import AdamW, grad_and_value, shard
from megalith.models.llama import Llama, LlamaConfig
from megalith.models.quickstart import SPECS
from megalith.sharding import Mesh

pytestmark = pytest.mark.gpu

CONFIG = LlamaConfig(vocab=64, dim=32, hidden=48, n_layers=2, n_heads=4, n_kv_heads=2)


def trained(device: str) -> dict[str, torch.Tensor]:
    """Parameters after three steps on `Mesh("dp=2 tp=2")`, all ranks in this process."""
    torch.manual_seed(0)
    model = Llama(CONFIG).double()
    tokens = torch.randint(CONFIG.vocab, (4, 17))
    batch = {"input_ids": tokens[:, :-1].to(device), "labels": tokens[:, 1:].to(device)}
    params = {name: p.detach().to(device) for name, p in model.named_parameters()}
    optimizer = AdamW(lr=1e-2)

    def loss(params, batch):
        logits = torch.func.functional_call(model, params, (batch["input_ids"],))
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def step(params, opt_state, batch):
        grads, value = grad_and_value(loss)(params, batch)
        params, opt_state = optimizer.update(grads, opt_state, params)
        return params, opt_state, value

    state = optimizer.init(params)
    sharded = shard(step, Mesh("dp=2 tp=2"), SPECS, donate=("params", "opt_state"), backend="virtual")
    shards = sharded.place(params, state)
    placed = sharded.place(batch=batch)
    for _ in range(3):
        *shards, _ = sharded(*shards, placed)
    return {name: p.cpu() for name, p in sharded.gather(params=shards[0]).items()}


def test_a_step_on_the_gpu_is_the_step_on_the_cpu():
    on_cpu, on_gpu = trained("cpu"), trained("cuda")
    for name, expected in on_cpu.items():
        torch.testing.assert_close(on_gpu[name], expected, rtol=1e-9, atol=1e-10)
