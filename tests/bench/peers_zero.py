"""What ZeRO costs a training step: megalith beside FSDP2, DDP with a sharded optimizer, DeepSpeed and ColossalAI.

    python tests/bench/peers_zero.py                  # the 17.3 M Llama and the tiny one, on 2 and 4 ranks
    python tests/bench/peers_zero.py --config tiny --worlds 2 --dtypes float32 --rounds 20

Models, measures and columns are those of peers.py. In bfloat16 everything is, but for DeepSpeed, which keeps float32
masters and optimizer state: what it sends is bfloat16 too. `nox -s bench -- peers-zero` makes the environment with the
peers in it; one that is not there, or does not run, is a row with its error.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from harness import Table
from peers import (
    CASES,
    Case,
    Config,
    Llama,
    Result,
    Step,
    benchmark,
    loss_of,
    megalith,
    part,
    part_of_batch,
    promises,
    train_step,
)
from torch import Tensor, nn

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # the ranks inherit it
BUCKET = 5_000_000  # elements; DeepSpeed allocates what its option says, and the default is 500 million


def ddp_zero(rank: int, world_size: int, config: Config) -> Step:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(Llama(config), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, lr=config.lr, fused=True
    )
    return train_step(model, *part_of_batch(rank, world_size, config), config, average=True, optimizer=optimizer)


def deepspeed_zero(stage: int) -> Case:
    def make(rank: int, world_size: int, config: Config) -> Step:
        os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(world_size))
        warnings.simplefilter("ignore")
        import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        model = Llama(config)
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters(), lr=config.lr, fused=True),
            config={
                "train_batch_size": config.batch,
                "train_micro_batch_size_per_gpu": config.batch // world_size,
                "bf16": {"enabled": config.dtype == torch.bfloat16},
                "zero_optimization": {"stage": stage, "reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET},
            },
        )
        ids, labels = part_of_batch(rank, world_size, config)

        def step() -> float:
            loss = loss_of(engine, ids, labels)
            engine.backward(loss)
            engine.step()
            return mean_over_ranks(loss)

        return step

    return Case(make, "deepspeed", mixed=True)


def colossal_low_level(stage: int) -> Case:
    def make(rank: int, world_size: int, config: Config) -> Step:
        from colossalai.booster.plugin import LowLevelZeroPlugin

        precision = "bf16" if config.dtype == torch.bfloat16 else "fp32"
        return colossal(LowLevelZeroPlugin(stage=stage, precision=precision), rank, world_size, config)

    return Case(make, "colossalai.booster", mixed=True)


def gemini(rank: int, world_size: int, config: Config) -> Step:
    from colossalai.booster.plugin import GeminiPlugin

    return colossal(GeminiPlugin(precision="bf16", placement_policy="static"), rank, world_size, config)


def colossal(plugin: Any, rank: int, world_size: int, config: Config) -> Step:
    from colossalai.booster import Booster

    booster, model = Booster(plugin=plugin), Llama(config)
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=config.lr))
    ids, labels = part_of_batch(rank, world_size, config)

    def step() -> float:
        loss = loss_of(model, ids, labels)
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        return mean_over_ranks(loss)

    return step


def mean_over_ranks(loss: Tensor) -> float:
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def megalith_zero(stage: int) -> Case:
    return megalith("dp", ("data_parallel", ("dp",)), ("zero", (stage, "dp")))


ZERO_CASES = {
    "unsharded": CASES["unsharded"],
    "DDP + ZeRO optimizer": Case(ddp_zero, "torch.distributed.optim"),
    "FSDP2": CASES["FSDP2"],
    **{f"DeepSpeed ZeRO-{stage}": deepspeed_zero(stage) for stage in (1, 2, 3)},
    **{f"ColossalAI ZeRO-{stage}": colossal_low_level(stage) for stage in (1, 2)},
    "ColossalAI Gemini": Case(gemini, "colossalai.booster", mixed=True),
    **{f"megalith ZeRO-{stage}": megalith_zero(stage) for stage in (1, 2, 3)},
}
PEERS = {
    1: ("DDP + ZeRO optimizer", "DeepSpeed ZeRO-1", "ColossalAI ZeRO-1"),
    2: ("DeepSpeed ZeRO-2", "ColossalAI ZeRO-2"),
    3: ("FSDP2", "DeepSpeed ZeRO-3", "ColossalAI Gemini"),
}


def judge(what: str, world_size: int, config: Config, results: Mapping[str, Result], table: Table) -> None:
    promises(what, world_size, config, results, table)
    for stage, peers in PEERS.items():
        ours = f"megalith ZeRO-{stage}"
        for peer in peers:
            if ours in results and peer in results:
                table.target(f"{what}: bytes, {ours} and {peer}", results[ours].sent, results[peer].sent, "<=")
        part(what, ours, f"DeepSpeed ZeRO-{stage}", 0.7, results, table)
    if "megalith ZeRO-3" in results and "FSDP2" in results:
        part(what, "megalith ZeRO-3", "FSDP2", 0.8, results, table)
        peaks = (results[name].peak for name in ("megalith ZeRO-3", "FSDP2"))
        table.target(f"{what}: peak bytes of tensors, megalith ZeRO-3 and FSDP2", *peaks, "<=")


if __name__ == "__main__":
    sys.exit(benchmark("peers-zero", __doc__, ZERO_CASES, judge))
