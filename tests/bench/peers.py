"""What others need for one training step: collectives, bytes, seconds and memory of DDP, FSDP2 and DTensor.

    python tests/bench/peers.py                       # the 17.3 M Llama and the tiny one, on 2 and 4 ranks
    python tests/bench/peers.py --config tiny --worlds 2 --rounds 20

Same model, same global batch, same AdamW, and the same losses as one device before anything is timed. A case is a
function `make_step(rank, world_size, config) -> step`, in CASES: `step()` trains once and returns the global loss;
None on a rank that has no part in it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import (
    Pool,
    Table,
    Timing,
    alternating,
    bytes_sent,
    collectives,
    gloo_header_bytes,
    merge,
    peak_rss,
    tensor_memory,
)
from torch import Tensor, nn

Step = Callable[[], float]


@dataclass(frozen=True)
class Config:
    n_layers: int
    dim: int
    n_heads: int
    hidden: int
    vocab: int
    batch: int
    seq: int
    rounds: int  # timed steps of each case
    lr: float = 1e-3


CONFIGS = {
    "llama17m": Config(n_layers=8, dim=384, n_heads=8, hidden=1024, vocab=4096, batch=8, seq=128, rounds=5),
    "tiny": Config(n_layers=2, dim=64, n_heads=4, hidden=192, vocab=256, batch=4, seq=16, rounds=30),  # launch-bound
}

# The model, as anyone would write it: b batch, s sequence, h heads, d head dim, e embedding.


def rope(x: Tensor) -> Tensor:
    """Rotate b h s d by position."""
    s, d = x.shape[-2:]
    inverse = 10_000.0 ** (-torch.arange(0, d, 2, dtype=torch.float32) / d)
    angle = torch.arange(s, dtype=torch.float32)[:, None] * inverse
    cos, sin = angle.cos(), angle.sin()
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Attention(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.head_dim = config.dim // config.n_heads
        self.q, self.k, self.v, self.o = (nn.Linear(config.dim, config.dim, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:  # b s e
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in (self.q(x), self.k(x), self.v(x)))
        y = F.scaled_dot_product_attention(rope(q), rope(k), v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(-2))


class Mlp(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.gate, self.up = (nn.Linear(config.dim, config.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(config.dim, eps=1e-5), nn.RMSNorm(config.dim, eps=1e-5)
        self.attention, self.mlp = Attention(config), Mlp(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(config.vocab, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:  # b s -> b s vocab
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def global_batch(config: Config) -> tuple[Tensor, Tensor]:
    """Token ids and labels, b s each."""
    tokens = torch.randint(config.vocab, (config.batch, config.seq + 1), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def adamw(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """torch's fastest on a CPU, which wants DTensors and plain parameters in separate groups."""
    groups: dict[type, list[Tensor]] = {}
    for parameter in model.parameters():
        groups.setdefault(type(parameter.data), []).append(parameter)
    return torch.optim.AdamW([{"params": group} for group in groups.values()], lr=config.lr, fused=True)


def loss_of(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())


def train_step(model: nn.Module, ids: Tensor, labels: Tensor, config: Config, average: bool = False) -> Step:
    """The loop everybody has; `average` the loss over the ranks, where each has a share of the batch."""
    optimizer = adamw(model, config)

    def step() -> float:
        loss = loss_of(model, ids, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        if average:
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        return loss.item()

    return step


# The cases.


def unsharded(rank: int, world_size: int, config: Config) -> Step | None:
    return train_step(Llama(config), *global_batch(config), config) if rank == 0 else None


def ddp(rank: int, world_size: int, config: Config) -> Step:
    model = nn.parallel.DistributedDataParallel(Llama(config), gradient_as_bucket_view=True)
    return train_step(model, *(t.chunk(world_size)[rank] for t in global_batch(config)), config, average=True)


def fsdp2(rank: int, world_size: int, config: Config) -> Step:
    from torch.distributed.fsdp import fully_shard

    model = Llama(config)
    mesh = dist.init_device_mesh("cpu", (world_size,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return train_step(model, *(t.chunk(world_size)[rank] for t in global_batch(config)), config, average=True)


def dtensor_tp(rank: int, world_size: int, config: Config) -> Step:
    """Megatron's tensor parallelism, with vocabulary-parallel embedding, head and loss."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

    column, row = ColwiseParallel, RowwiseParallel
    plan = {"embed": row(input_layouts=Replicate()), "head": column(output_layouts=Shard(-1), use_local_output=False)}
    for name in ("q", "k", "v"):
        plan[f"layers.*.attention.{name}"] = column()
    plan |= {"layers.*.attention.o": row(), "layers.*.mlp.down": row()}
    plan |= {"layers.*.mlp.gate": column(), "layers.*.mlp.up": column()}
    model = parallelize_module(Llama(config), dist.init_device_mesh("cpu", (world_size,)), plan)
    ids, labels = global_batch(config)
    optimizer = adamw(model, config)

    def step() -> float:
        with loss_parallel():
            loss = loss_of(model, ids, labels)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.full_tensor().item()

    return step


def megalith(rank: int, world_size: int, config: Config, axis: str, specs: dict[str, str]) -> Step:
    """A pure step over plain tensors, on a mesh of one axis."""
    from megalith.core import AdamW, grad_and_value, shard
    from megalith.sharding import Mesh

    with torch.device("cpu"):
        model = Llama(config)
    optimizer = AdamW(lr=config.lr)

    def loss(params: Any, batch: Any) -> Tensor:
        logits = torch.func.functional_call(model, params, (batch["ids"],))
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def pure_step(params: Any, opt_state: Any, batch: Any) -> Any:
        grads, value = grad_and_value(loss)(params, batch)
        params, opt_state = optimizer.update(grads, opt_state, params)
        return params, opt_state, value

    sharded = shard(pure_step, Mesh(f"{axis}={world_size}"), specs, donate=("params", "opt_state"))
    whole = {name: p.detach() for name, p in model.named_parameters()}
    state = list(sharded.place(whole, optimizer.init(whole)))
    batch = sharded.place(batch=dict(zip(("ids", "labels"), global_batch(config), strict=True)))
    model.to("meta")
    del whole

    def step() -> float:
        *state[:], value = sharded(*state, batch)
        return value.item()

    program = sharded.compiled(*state, batch).programs[rank]
    step.promised = program.bytes_received, len(program.collectives)  # type: ignore[attr-defined]
    return step


def megalith_dp(rank: int, world_size: int, config: Config) -> Step:
    return megalith(rank, world_size, config, "dp", {"batch.*": "(dp b) s"})


def megalith_tp(rank: int, world_size: int, config: Config) -> Step:
    specs = {
        "*.{q,k,v,gate,up}.weight": "(tp o) i",
        "*.{o,down}.weight": "o (tp i)",
        "*{embed,head}.weight": "(tp v) e",
    }
    return megalith(rank, world_size, config, "tp", specs)


CASES: dict[str, Callable[[int, int, Config], Step | None]] = {
    "unsharded": unsharded,
    "DDP": ddp,
    "FSDP2": fsdp2,
    "DTensor TP": dtensor_tp,
    "megalith DP": megalith_dp,
    "megalith TP": megalith_tp,
}


# On the ranks.


def measure_alone(rank: int, name: str, config: Config) -> dict[str, Any]:
    """What one case costs apart from time; the process runs nothing else, so its memory is that case's."""
    make, world_size, state = CASES[name], dist.get_world_size(), {}
    run = lambda: state["step"]() if state["step"] else None  # noqa: E731

    def build() -> None:
        state["step"] = make(rank, world_size, config)

    def train() -> None:
        build()
        state["losses"] = [run() for _ in range(3)]

    rss = peak_rss(train)
    dist.barrier()
    with bytes_sent() as wire:
        run()
    dist.barrier()
    counts = collectives(run)
    promised = getattr(state["step"], "promised", None)
    state.update(step=None)
    memory = tensor_memory(build, run, run)[-1]
    return {
        "losses": state["losses"],
        "rss": rss,
        "sent": wire.sent,
        "collectives": counts,
        "promised": promised,
        "held": memory.start,
        "peak": memory.peak,
    }


def measure_seconds(rank: int, names: list[str], config: Config) -> dict[str, Timing]:
    """All the cases in turn in one process; a rank without a part in a case waits."""
    steps = {name: CASES[name](rank, dist.get_world_size(), config) for name in names}
    return alternating({name: step or (lambda: None) for name, step in steps.items()}, config.rounds)


def check_losses(name: str, losses: list[list[float]], expected: list[float]) -> None:
    for rank, values in enumerate(losses):
        error = max(abs(a - b) / abs(b) for a, b in zip(values, expected, strict=True))
        if error > 1e-4:
            raise AssertionError(f"{name}, rank {rank}: losses {values} are not those of one device, {expected}")


def measure(config_name: str, world_size: int, names: list[str], rounds: int | None, table: Table) -> None:
    config = CONFIGS[config_name]
    if rounds:
        config = Config(**{**vars(config), "rounds": rounds})
    alone = {}
    for name in dict.fromkeys(["unsharded", *names]):
        with Pool() as pool:
            alone[name] = pool.run(measure_alone, name, config, world_size=world_size, timeout=600)
        losses = [rank["losses"] for rank in alone[name] if rank["losses"][0] is not None]
        check_losses(name, losses, alone["unsharded"][0]["losses"])
    with Pool() as pool:
        seconds = merge(pool.run(measure_seconds, names, config, world_size=world_size, timeout=1200))
    compare(config_name, world_size, {name: timing.wall for name, timing in seconds.items()}, table)
    for name in names:
        ranks = alone[name]
        n_active = sum(rank["losses"][0] is not None for rank in ranks)
        most = {key: max(rank[key] for rank in ranks) for key in ("sent", "held", "peak", "rss")}
        counts = ranks[0]["collectives"]
        table.row(
            config_name,
            world_size,
            name,
            sum(counts.values()),
            " ".join(f"{count} {op}" for op, count in sorted(counts.items())) or "none",
            most["sent"] / 1e6,
            seconds[name].wall * 1e3,
            seconds[name].cpu / n_active * 1e3,
            most["held"] / 1e6,
            most["peak"] / 1e6,
            most["rss"] / 1e6,
        )
        if ranks[0]["promised"] is not None:  # what the program says is what goes over the wire, and gloo's headers
            payload, n_collectives = ranks[0]["promised"]
            headers = gloo_header_bytes(payload, n_collectives, world_size)
            what = f"{config_name}, {name} on {world_size}: bytes sent, promised {payload}"
            table.target(what, most["sent"], payload + headers, "<=")
            table.target(what, most["sent"], payload, ">=")
        if name == "DDP":  # one all-reduce of every gradient: the closed form and gloo's headers
            with torch.device("meta"):
                gradients = sum(4 * parameter.numel() for parameter in Llama(config).parameters())
            payload = 2 * gradients * (world_size - 1) // world_size
            headers = gloo_header_bytes(payload, sum(counts.values()), world_size)
            table.target(f"{config_name}, DDP on {world_size}: bytes sent", most["sent"], payload + headers, "<=")
            table.target(f"{config_name}, DDP on {world_size}: bytes sent", most["sent"], payload, ">=")


def compare(config_name: str, world_size: int, wall: dict[str, float], table: Table) -> None:
    """The targets on seconds, each against a peer of the same run."""
    limits = [("megalith DP", "DDP", 1.0), ("megalith TP", "DTensor TP", 0.3 if config_name == "tiny" else 0.75)]
    for ours, theirs, limit in limits:
        if world_size == 2 and ours in wall and theirs in wall:
            what = f"{config_name} on {world_size}: {ours}'s step as a part of {theirs}'s"
            table.target(what, round(wall[ours] / wall[theirs], 3), limit, "<=")


COLUMNS = {
    "model": "",
    "ranks": "d",
    "case": "",
    "collectives": "d",
    "which": "",
    "MB sent": ".3f",
    "ms": ".1f",
    "CPU ms": ".1f",
    "MB held": ".1f",
    "MB peak": ".1f",
    "MB resident": ".0f",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", nargs="+", choices=CONFIGS, default=list(CONFIGS))
    parser.add_argument("--worlds", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, help="timed steps of each case")
    arguments = parser.parse_args()
    table = Table("peers", COLUMNS)
    begin = time.monotonic()
    for config_name in arguments.config:
        for world_size in arguments.worlds:
            measure(config_name, world_size, arguments.cases, arguments.rounds, table)
    code = table.finish()
    print("per rank and step, of the worst rank (CPU ms: mean); 'held' between steps, 'peak' within a step, of tensor")
    print(f"memory; 'resident' while building and training. {time.monotonic() - begin:.0f} s in all")
    return code


if __name__ == "__main__":
    sys.exit(main())
