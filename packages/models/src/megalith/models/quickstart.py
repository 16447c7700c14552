"""What does megalith do? Trains a small Llama on real text over a mesh, and shows that the mesh changed nothing.

    python -m megalith.models.quickstart --mesh "dp=2 tp=2" --steps 60

It starts a process for each rank of the mesh on this machine, over gloo.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch.nn import functional as F

from megalith.core import AdamW, grad_and_value, shard
from megalith.core.explain import explain
from megalith.core.measure import allocation_peak
from megalith.core.memory import memory
from megalith.models.llama import Llama, LlamaConfig
from megalith.models.text import batch_at, decode, documentation, encode, generate, train_tokenizer
from megalith.sharding import Mesh

SPECS = {
    "*.{q,k,v}_proj.weight": "(tp heads) embed",  # column parallel
    "*.o_proj.weight": "embed (tp heads)",  # row parallel
    "*.{gate,up}_proj.weight": "(tp hidden) embed",
    "*.down_proj.weight": "embed (tp hidden)",
    "*embed_tokens.weight": "(tp vocab) embed",  # vocabulary parallel
    "*lm_head.weight": "(tp vocab) embed",
    "{input_ids,labels}": "(dp batch) seq",  # data parallel
}


@dataclass(frozen=True)
class Settings:
    """What the command line says."""

    mesh: str = "dp=2 tp=2"
    steps: int = 60
    batch: int = 8
    seq: int = 128
    vocab: int = 2048
    lr: float = 1e-3
    seed: int = 0
    out: str = "out/quickstart"


CONFIG = LlamaConfig(vocab=2048, dim=256, hidden=704, n_layers=5, n_heads=8, n_kv_heads=4)


def make_step(model: torch.nn.Module, optimizer: AdamW) -> Callable[..., Any]:
    """A training step: a pure function that knows nothing of devices."""

    def loss(params: Any, batch: Any) -> torch.Tensor:
        logits = torch.func.functional_call(model, params, (batch["input_ids"],))
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        grads, value = grad_and_value(loss)(params, batch)
        params, opt_state = optimizer.update(grads, opt_state, params)
        return params, opt_state, value

    return step


def build(settings: Settings) -> tuple[Llama, dict[str, torch.Tensor], AdamW]:
    """The model, its parameters and the optimizer; the same on every process."""
    torch.manual_seed(settings.seed)
    model = Llama(CONFIG)
    params = {name: p.detach().clone() for name, p in model.named_parameters()}
    return model, params, AdamW(lr=settings.lr)


def train(settings: Settings, tokens: torch.Tensor, rank: int) -> dict[str, Any]:
    """What each process of the mesh does."""
    mesh = Mesh(settings.mesh)
    model, params, optimizer = build(settings)
    step = shard(make_step(model, optimizer), mesh, on_axes(SPECS, mesh), donate=("params", "opt_state"))
    params, opt_state = step.place(params, optimizer.init(params))
    losses, seconds = [], []
    program, measured = None, 0
    progress = _progress(settings.steps, f"training on {mesh.pattern}", enabled=rank == 0)
    with progress:
        task = progress.add_task("train", total=settings.steps, loss="")
        for number in range(settings.steps):
            batch = step.place(batch=batch_at(tokens, settings.batch, settings.seq, settings.seed, number))
            start = time.perf_counter()
            if number == 1:
                program = step.compiled(params, opt_state, batch).programs[rank]
                (params, opt_state, value), measured = allocation_peak(lambda: step(params, opt_state, batch))  # noqa: B023
            else:
                params, opt_state, value = step(params, opt_state, batch)
            losses.append(value.item())
            seconds.append(time.perf_counter() - start)
            progress.update(task, advance=1, loss=f"loss {losses[-1]:.3f}")
    whole = step.gather(params=params)
    assert program is not None
    held = sum(t.numel() * t.element_size() for t in [*params.values(), *opt_state["mu"].values()])
    held += sum(t.numel() * t.element_size() for t in opt_state["nu"].values())
    return {
        "losses": losses,
        "seconds": sorted(seconds)[len(seconds) // 2],
        "explanation": str(explain(program)) if rank == 0 else "",
        "predicted": memory(program).peak,
        "measured": measured + held,
        "params": whole if rank == 0 else None,
    }


def on_axes(specs: dict[str, str], mesh: Mesh) -> dict[str, str]:
    """The specs with the axes that a mesh does not have left out."""
    found = {}
    for key, pattern in specs.items():
        for axis in ("dp", "tp"):
            if axis not in mesh:
                pattern = pattern.replace(f"({axis} ", "(")
        found[key] = pattern
    return found


def train_alone(settings: Settings, tokens: torch.Tensor) -> tuple[list[float], float]:
    """The same steps on one device, by the same function, without a mesh."""
    model, params, optimizer = build(settings)
    step = make_step(model, optimizer)
    opt_state = optimizer.init(params)
    losses, seconds = [], []
    progress = _progress(settings.steps, "the same, unsharded", enabled=True)
    with progress:
        task = progress.add_task("train", total=settings.steps, loss="")
        for number in range(settings.steps):
            batch = batch_at(tokens, settings.batch, settings.seq, settings.seed, number)
            start = time.perf_counter()
            params, opt_state, value = step(params, opt_state, batch)
            losses.append(value.item())
            seconds.append(time.perf_counter() - start)
            progress.update(task, advance=1, loss=f"loss {losses[-1]:.3f}")
    return losses, sorted(seconds)[len(seconds) // 2]


def _progress(total: int, text: str, enabled: bool) -> Progress:
    loss = TextColumn("{task.fields[loss]}")
    columns = (TextColumn(f"{text:<28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), loss)
    return Progress(*columns, disable=not enabled, console=Console(stderr=False))


def _rank(rank: int, settings: Settings, tokens: torch.Tensor, address: str, results: Any) -> None:
    torch.set_num_threads(1)
    size = Mesh(settings.mesh).size
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
    try:
        results[rank] = train(settings, tokens, rank)
    finally:
        dist.destroy_process_group()


def launch(settings: Settings, tokens: torch.Tensor) -> list[dict[str, Any]]:
    """Runs `train` in a process for each rank; gives what each returned."""
    size = Mesh(settings.mesh).size
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    with mp.get_context("spawn").Manager() as manager:
        results = manager.dict()
        mp.spawn(_rank, (settings, tokens, address, results), nprocs=size)
        return [results[rank] for rank in range(size)]


def plot(path: Path, sharded: list[float], alone: list[float], mesh: str) -> None:
    """The two loss curves, and below them their difference."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (top, bottom) = plt.subplots(2, 1, sharex=True, height_ratios=(3, 1), figsize=(7, 5), layout="constrained")
    top.plot(alone, label="one device", linewidth=4, alpha=0.35)
    top.plot(sharded, label=f'Mesh("{mesh}")', linewidth=1.2, color="black")
    top.set_ylabel("loss")
    top.legend(frameon=False)
    bottom.semilogy([max(abs(a - b), 1e-9) for a, b in zip(sharded, alone, strict=True)], color="tab:red", linewidth=1)
    bottom.set_ylabel("|difference|")
    bottom.set_xlabel("step")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> int:
    """Runs the quickstart; the exit code says whether the sharded losses are the unsharded ones."""
    parser = argparse.ArgumentParser(prog="megalith.models.quickstart", description=__doc__.split("\n")[0])
    for name, default in vars(Settings()).items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"default: {default}")
    settings = Settings(**vars(parser.parse_args(arguments)))
    console = Console()
    out = Path(settings.out)
    out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a rank that waits for another is no news
    torch.set_num_threads(1)

    text = documentation()
    tokenizer = train_tokenizer(text, settings.vocab)
    tokens = encode(text, tokenizer)
    n_params = sum(p.numel() for p in Llama(CONFIG).parameters())
    console.print(
        f"A Llama of {n_params / 1e6:.1f} M parameters on {len(tokens):,} tokens of Python's documentation, "
        f'Mesh("{settings.mesh}"), batch {settings.batch} x {settings.seq}.'
    )
    ranks = launch(settings, tokens)
    console.print("\nWhat it communicates in a step, and why (explain):\n")
    console.print(ranks[0]["explanation"], highlight=False, soft_wrap=True)
    console.print("\nPeak memory per rank, predicted and measured, MB:")
    for number, rank in enumerate(ranks):
        console.print(f"  rank {number}: {rank['predicted'] / 1e6:7.2f} {rank['measured'] / 1e6:7.2f}", highlight=False)
    alone, alone_seconds = train_alone(settings, tokens)
    sharded = ranks[0]["losses"]
    plot(out / "loss.png", sharded, alone, settings.mesh)
    model = Llama(CONFIG)
    params = ranks[0]["params"]
    sample = generate(
        lambda ids: torch.func.functional_call(model, params, (ids,)),
        encode("The statement", tokenizer),
        40,
        temperature=0.7,
        seed=settings.seed,
        window=64,
    )
    console.print(f"\nA sample after {settings.steps} steps: {decode(sample, tokenizer)!r}", highlight=False)
    worst = max(abs(a - b) for a, b in zip(sharded, alone, strict=True))
    console.print(
        f"\nLoss {sharded[0]:.3f} -> {sharded[-1]:.3f}; a step takes {ranks[0]['seconds'] * 1e3:.0f} ms on the mesh, "
        f"{alone_seconds * 1e3:.0f} ms alone.\nLargest difference in loss, sharded against unsharded: {worst:.1e}\n"
        f"The loss curve is in {out / 'loss.png'}"
    )
    return 0 if worst < 1e-2 else 1


if __name__ == "__main__":
    sys.exit(main())
