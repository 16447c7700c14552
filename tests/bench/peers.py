"""What others need for one training step: collectives, bytes, seconds and memory of DDP, FSDP2 and DTensor.

    python tests/bench/peers.py                       # the 17.3 M Llama and the tiny one, on 2 and 4 ranks
    python tests/bench/peers.py --config tiny --worlds 2 --dtypes float32 --rounds 20

Same model, same global batch, same AdamW, and the same losses as one device before anything is timed. In bfloat16
everything is: parameters, gradients, their sums and the optimizer's state. Other benchmarks measure other cases with
`benchmark`.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
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
    resident,
    tensor_memory,
)
from ranks import RankError
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
    dtype: torch.dtype = torch.float32


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
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Attention(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.head_dim = config.dim // config.n_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(config.dim, config.dim, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:  # b s e
        qkv = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in qkv)
        y = F.scaled_dot_product_attention(rope(q), rope(k), v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(-2))


class Mlp(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(config.dim, config.hidden, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


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
        self.to(config.dtype)

    def forward(self, ids: Tensor) -> Tensor:  # b s -> b s vocab
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def global_batch(config: Config) -> tuple[Tensor, Tensor]:
    """Token ids and labels, b s each."""
    tokens = torch.randint(config.vocab, (config.batch, config.seq + 1), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def part_of_batch(rank: int, world_size: int, config: Config) -> tuple[Tensor, Tensor]:
    """One rank's rows of it."""
    ids, labels = (t.chunk(world_size)[rank] for t in global_batch(config))
    return ids, labels


def adamw(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """torch's fastest on a CPU, which wants DTensors and plain parameters in separate groups."""
    groups: dict[type, list[Tensor]] = {}
    for parameter in model.parameters():
        groups.setdefault(type(parameter.data), []).append(parameter)
    return torch.optim.AdamW([{"params": group} for group in groups.values()], lr=config.lr, fused=True)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Of logits b s v and labels b s, in float32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def loss_of(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(model(ids), labels)


def train_step(
    model: nn.Module,
    ids: Tensor,
    labels: Tensor,
    config: Config,
    average: bool = False,
    optimizer: torch.optim.Optimizer | None = None,
) -> Step:
    """The loop everybody has; `average` the loss over the ranks, where each has a share of the batch."""
    optimizer = optimizer or adamw(model, config)

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


@dataclass(frozen=True)
class Case:
    """One way to train.

    Args:
        make: `make(rank, world_size, config)` gives a step, which trains once and returns the global loss; None on a
            rank that has no part in it.
        library: the module that is imported first, so that its own memory is not counted.
        mixed: whether parameters and optimizer state are float32 where gradients are less.
    """

    make: Callable[[int, int, Config], Step | None]
    library: str = "torch.distributed"
    mixed: bool = False


def unsharded(rank: int, world_size: int, config: Config) -> Step | None:
    return train_step(Llama(config), *global_batch(config), config) if rank == 0 else None


def ddp(rank: int, world_size: int, config: Config) -> Step:
    model = nn.parallel.DistributedDataParallel(Llama(config), gradient_as_bucket_view=True)
    return train_step(model, *part_of_batch(rank, world_size, config), config, average=True)


def fsdp2(rank: int, world_size: int, config: Config) -> Step:
    from torch.distributed.fsdp import fully_shard

    model = Llama(config)
    mesh = dist.init_device_mesh("cpu", (world_size,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)  # by default it keeps the embedding and the head from the forward to the backward
    return train_step(model, *part_of_batch(rank, world_size, config), config, average=True)


def dtensor_tp(rank: int, world_size: int, config: Config) -> Step:
    """Megatron's tensor parallelism, with vocabulary-parallel embedding, head and loss."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    column, row = ColwiseParallel, RowwiseParallel
    plan = {"embed": row(input_layouts=Replicate()), "head": column(output_layouts=Shard(-1), use_local_output=False)}
    plan |= {f"layers.*.{name}": column() for name in COLUMN}
    plan |= {f"layers.*.{name}": row() for name in ROW}
    return dtensor(plan, world_size, config)


def dtensor_tp_sp(rank: int, world_size: int, config: Config) -> Step:
    """The same, with norms and residuals split along the sequence."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

    seq, whole = Shard(1), Replicate()
    plan = {
        "embed": RowwiseParallel(input_layouts=whole, output_layouts=seq),
        "norm": SequenceParallel(use_local_output=True),
        "head": ColwiseParallel(input_layouts=seq, output_layouts=Shard(-1), use_local_output=False),
    }
    for name in ("attention", "mlp"):
        plan[f"layers.*.{name}_norm"] = SequenceParallel(use_local_output=True)
        plan[f"layers.*.{name}"] = PrepareModuleInput(input_layouts=seq, desired_input_layouts=whole)
    plan |= {f"layers.*.{name}": ColwiseParallel() for name in COLUMN}
    plan |= {f"layers.*.{name}": RowwiseParallel(output_layouts=seq) for name in ROW}
    return dtensor(plan, world_size, config)


COLUMN = ("attention.q_proj", "attention.k_proj", "attention.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROW = ("attention.o_proj", "mlp.down_proj")


def dtensor(plan: dict[str, Any], world_size: int, config: Config) -> Step:
    from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

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


def megalith(axis: str, *recipes: tuple[str, tuple[Any, ...]]) -> Case:
    """A pure step over plain tensors, on a mesh of one axis, under recipes of megalith.sharding.recipes."""

    def make(rank: int, world_size: int, config: Config) -> Step:
        from megalith.core import AdamW, grad_and_value, shard
        from megalith.sharding import Mesh
        from megalith.sharding import recipes as library

        model, optimizer = Llama(config), AdamW(lr=config.lr)

        def loss(params: Any, batch: Any) -> Tensor:
            return cross_entropy(torch.func.functional_call(model, params, (batch["ids"],)), batch["labels"])

        def pure_step(params: Any, opt_state: Any, batch: Any) -> Any:
            grads, value = grad_and_value(loss)(params, batch)
            params, opt_state = optimizer.update(grads, opt_state, params)
            return params, opt_state, value

        whole = {name: p.detach() for name, p in model.named_parameters()}
        batch = dict(zip(("ids", "labels"), global_batch(config), strict=True))
        specs = library.specs_for(whole, batch, *(getattr(library, name)(*args) for name, args in recipes))
        sharded = shard(pure_step, Mesh(f"{axis}={world_size}"), specs, donate=("params", "opt_state"))
        state = list(sharded.place(whole, optimizer.init(whole)))
        batch = sharded.place(batch=batch)
        model.to("meta")
        del whole

        def step() -> float:
            *state[:], value = sharded(*state, batch)
            return value.item()

        program = sharded.compiled(*state, batch).programs[rank]
        step.promised = program.bytes_received, len(program.collectives)  # type: ignore[attr-defined]
        return step

    return Case(make, "megalith.core")


CASES = {
    "unsharded": Case(unsharded),
    "DDP": Case(ddp),
    "FSDP2": Case(fsdp2, "torch.distributed.fsdp"),
    "DTensor TP": Case(dtensor_tp, "torch.distributed.tensor.parallel"),
    "DTensor TP+SP": Case(dtensor_tp_sp, "torch.distributed.tensor.parallel"),
    "megalith DP": megalith("dp", ("data_parallel", ("dp",))),
    "megalith TP": megalith("tp", ("tensor_parallel", ("tp",))),
    "megalith TP+SP": megalith("tp", ("tensor_parallel", ("tp",)), ("sequence_parallel", ("tp",))),
}


# On the ranks.


def measure_alone(rank: int, case: Case, config: Config) -> dict[str, Any]:
    """What one case costs apart from time; the process runs nothing else, so its memory is that case's."""
    importlib.import_module(case.library)
    baseline = resident()["RssAnon"]
    state: dict[str, Any] = {}
    losses: list[float | None] = []

    def build() -> None:
        state["step"] = case.make(rank, dist.get_world_size(), config)

    def run() -> None:
        losses.append(state["step"]() if state["step"] else None)

    def train() -> None:
        build()
        run()
        run()

    rss = peak_rss(train, baseline)
    dist.barrier()
    with bytes_sent() as wire:
        counts = collectives(run)
    dist.barrier()
    promised = getattr(state["step"], "promised", None)
    state.update(step=None)
    memory = tensor_memory(build, run, run)[-1]
    return {
        "losses": losses[:3],
        "rss": rss,
        "sent": wire.sent,
        "collectives": counts,
        "promised": promised,
        "held": memory.start,
        "peak": memory.peak,
    }


def measure_seconds(rank: int, cases: dict[str, Case], config: Config) -> dict[str, Timing]:
    """All the cases in turn in one process; a rank without a part in a case waits."""
    steps = {name: case.make(rank, dist.get_world_size(), config) for name, case in cases.items()}
    return alternating({name: step or (lambda: None) for name, step in steps.items()}, config.rounds)


# Around them.


@dataclass
class Result:
    """What one case costs a step, on the rank where it costs most; bytes."""

    losses: list[list[float]]  # of each rank that has a part in it
    collectives: Counter[str]
    promised: tuple[int, int] | None  # bytes and number of collectives
    sent: int
    held: int
    peak: int
    rss: int
    timing: Timing = field(default_factory=Timing)

    @classmethod
    def of(cls, ranks: list[dict[str, Any]]) -> Result:
        most = {key: max(rank[key] for rank in ranks) for key in ("sent", "held", "peak", "rss")}
        losses = [rank["losses"] for rank in ranks if rank["losses"][0] is not None]
        return cls(losses, ranks[0]["collectives"], ranks[0]["promised"], **most)


TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-3}  # of the losses


def check_losses(name: str, losses: list[list[float]], expected: list[float], tolerance: float) -> None:
    for rank, values in enumerate(losses):
        error = max(abs(a - b) / abs(b) for a, b in zip(values, expected, strict=True))
        if not error <= tolerance:
            raise AssertionError(f"{name}, rank {rank}: losses {values} are not those of one device, {expected}")


def measure(cases: Mapping[str, Case], world_size: int, config: Config, broken: dict[str, str]) -> dict[str, Result]:
    """Each case's cost. Those that fail are left out, and join `broken` with the first line of their error."""
    results: dict[str, Result] = {}
    for name, case in {"unsharded": CASES["unsharded"], **cases}.items():
        if name in broken:
            continue
        try:
            with Pool() as pool:
                ranks = pool.run(measure_alone, case, config, world_size=world_size, timeout=600)
        except RankError as error:
            if case.library.startswith(("torch", "megalith")):
                raise
            broken[name] = re.sub(r"^.*?: rank \d+ raised ", "", str(error).splitlines()[0])
            continue
        results[name] = Result.of(ranks)
        expected = results["unsharded"].losses[0]
        check_losses(name, results[name].losses, expected, TOLERANCE[config.dtype])
    timed = {name: case for name, case in cases.items() if name in results}
    with Pool() as pool:
        seconds = merge(pool.run(measure_seconds, timed, config, world_size=world_size, timeout=1200))
    for name, timing in seconds.items():
        results[name].timing = timing
    return {name: results[name] for name in timed}


def promises(what: str, world_size: int, config: Config, results: Mapping[str, Result], table: Table) -> None:
    """What goes over the wire is what the program says, or the closed form, and gloo's headers."""
    for name, result in results.items():
        promised = result.promised
        if name == "DDP":  # one all-reduce of every gradient
            with torch.device("meta"):
                gradients = sum(p.numel() * config.dtype.itemsize for p in Llama(config).parameters())
            promised = 2 * gradients * (world_size - 1) // world_size, sum(result.collectives.values())
        if promised is not None:
            payload, n_collectives = promised
            headers = gloo_header_bytes(payload, n_collectives, world_size)
            table.target(f"{what}, {name}: bytes sent, promised {payload}", result.sent, payload + headers, "<=")
            table.target(f"{what}, {name}: bytes sent, promised {payload}", result.sent, payload, ">=")


def part(what: str, ours: str, theirs: str, limit: float, results: Mapping[str, Result], table: Table) -> None:
    """The target that our step takes at most `limit` of a peer's, where both ran."""
    if ours in results and theirs in results:
        ratio = results[ours].timing.wall / results[theirs].timing.wall
        table.target(f"{what}: {ours}'s step as a part of {theirs}'s", round(ratio, 3), limit, "<=")


def judge(what: str, world_size: int, config: Config, results: Mapping[str, Result], table: Table) -> None:
    """The targets of this benchmark, each against a peer of the same run."""
    promises(what, world_size, config, results, table)
    if world_size == 2:
        part(what, "megalith DP", "DDP", 1.0, results, table)
        part(what, "megalith TP", "DTensor TP", 0.3 if what.startswith("tiny") else 0.75, results, table)
        part(what, "megalith TP+SP", "DTensor TP+SP", 0.7, results, table)


COLUMNS = {
    "model": "",
    "dtype": "",
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
LEGEND = """per rank and step, of the worst rank (CPU ms: mean); 'held' between steps, 'peak' within a step, of tensor
memory; 'resident' while building and training, above what the library's import takes."""


def add_rows(
    label: tuple[str, str, int],
    cases: Mapping[str, Case],
    results: Mapping[str, Result],
    broken: Mapping[str, str],
    table: Table,
) -> None:
    for name, case in cases.items():
        if name in broken:
            table.row(*label, name, None, broken[name], *[None] * 6)
            continue
        result = results[name]
        model, dtype, world_size = label
        table.row(
            model,
            f"{dtype}, master float32" if case.mixed and dtype != "float32" else dtype,
            world_size,
            name,
            sum(result.collectives.values()),
            " ".join(f"{count} {op}" for op, count in sorted(result.collectives.items())) or "none",
            result.sent / 1e6,
            result.timing.wall * 1e3,
            result.timing.cpu / len(result.losses) * 1e3,
            result.held / 1e6,
            result.peak / 1e6,
            result.rss / 1e6,
        )


Judge = Callable[[str, int, Config, Mapping[str, Result], Table], None]


def benchmark(name: str, doc: str | None, cases: Mapping[str, Case], judge: Judge) -> int:
    """The program of a benchmark: the cases on each model, dtype and number of ranks; 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", nargs="+", choices=CONFIGS, default=list(CONFIGS))
    parser.add_argument("--worlds", nargs="+", type=int, default=[2, 4], help="bfloat16 runs on the fewest only")
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--cases", nargs="+", choices=cases, default=list(cases))
    parser.add_argument("--rounds", type=int, help="timed steps of each case")
    arguments = parser.parse_args()
    chosen = {case: cases[case] for case in arguments.cases}
    table, broken, begin = Table(name, COLUMNS), dict[str, str](), time.monotonic()
    runs = itertools.product(arguments.config, arguments.dtypes, arguments.worlds)
    for model, dtype, world_size in runs:
        if dtype == "bfloat16" and world_size > min(arguments.worlds):
            continue
        if dtype == "bfloat16" and model != "tiny" and not torch.cpu._is_avx512_bf16_supported():
            why = "not run: this processor has no bfloat16 products, and a step takes minutes"
            table.row(model, dtype, world_size, "all", None, why, *[None] * 6)
            continue
        rounds = arguments.rounds or CONFIGS[model].rounds
        config = replace(CONFIGS[model], dtype=getattr(torch, dtype), rounds=rounds)
        results = measure(chosen, world_size, config, broken)
        add_rows((model, dtype, world_size), chosen, results, broken, table)
        judge(f"{model}, {dtype} on {world_size}", world_size, config, results, table)
    code = table.finish()
    print(f"{LEGEND} {time.monotonic() - begin:.0f} s in all")
    return code


if __name__ == "__main__":
    sys.exit(benchmark("peers", __doc__, CASES, judge))
