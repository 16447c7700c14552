"""What is asked of a backend? To hold shards, and to run the programs of its ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from megalith.core.backends import lockstep
from megalith.core.backends.virtual import run_virtual
from megalith.core.program import Program
from megalith.sharding.layout import Layout
from megalith.sharding.mesh import Mesh, MeshError

__all__ = ["Backend", "Count", "PerRank", "Virtual", "choose_backend"]


@dataclass(frozen=True)
class PerRank:
    """One tensor's shards on all ranks of a mesh, in one process.

    >>> PerRank((torch.ones(2), torch.ones(2)))
    PerRank(2 shards of float32[2])
    """

    shards: tuple[torch.Tensor, ...]

    def item(self) -> Any:
        """The number that every rank holds."""
        return self.shards[0].item()

    def __float__(self) -> float:
        return float(self.shards[0])

    def __repr__(self) -> str:
        first = self.shards[0]
        shape = f"{str(first.dtype).removeprefix('torch.')}[{', '.join(map(str, first.shape))}]"
        return f"PerRank({len(self.shards)} shards of {shape})"


@runtime_checkable
class Backend(Protocol):
    """Where shards live and programs run.

    `ranks` are the ranks of this process. A shard is a tensor on a backend with one rank a process, a `PerRank` on one
    that holds them all.
    """

    mesh: Mesh
    ranks: tuple[int, ...]

    def scatter(self, tensor: torch.Tensor, layout: Layout) -> Any:
        """This process's shards of a tensor that it has whole."""

    def gather(self, shards: Any, layout: Layout) -> torch.Tensor:
        """The whole tensor, on every process."""

    def local_shape(self, shards: Any) -> Any:
        """What tells apart shards of different global shapes."""

    def load(self, programs: Mapping[int, Program]) -> Callable[[Sequence[Any]], list[Any]]:
        """A function from the shards of all inputs to the shards of all outputs."""


class Virtual:
    """All ranks in this process, in lockstep."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.ranks = tuple(range(mesh.size))

    def scatter(self, tensor: torch.Tensor, layout: Layout) -> PerRank:
        return PerRank(tuple(lockstep.scatter(tensor, layout)))

    def gather(self, shards: Any, layout: Layout) -> torch.Tensor:
        return lockstep.gather(list(shards.shards), layout)

    def local_shape(self, shards: Any) -> tuple[tuple[int, ...], ...]:
        if isinstance(shards, torch.Tensor):
            raise TypeError(
                f"a call on the virtual backend takes shards, and got a whole tensor of shape {list(shards.shape)}; "
                "place it first: shards = sharded.place(...), or run sharded.whole(...) on whole tensors"
            )
        return tuple(tuple(s.shape) for s in shards.shards)

    def load(self, programs: Mapping[int, Program]) -> Callable[[Sequence[Any]], list[Any]]:
        ordered = [programs[rank] for rank in self.ranks]

        def run(inputs: Sequence[PerRank]) -> list[Any]:
            outputs = run_virtual(ordered, [[shards.shards[r] for shards in inputs] for r in self.ranks])
            return [
                PerRank(tuple(outputs[r][i] for r in self.ranks)) if isinstance(first, torch.Tensor) else first
                for i, first in enumerate(outputs[0])
            ]

        return run


class Count:
    """Nothing runs and nothing is held: programs are made for rank 0 alone, to be asked. Shards are on `meta`.

    >>> Count(Mesh("dp=1024")).ranks
    (0,)
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.ranks: tuple[int, ...] = (0,)

    def scatter(self, tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
        return torch.empty(layout.local_shape(0), dtype=tensor.dtype, device="meta")

    def gather(self, shards: Any, layout: Layout) -> torch.Tensor:
        return torch.empty(layout.shape, dtype=shards.dtype, device="meta")

    def local_shape(self, shards: Any) -> tuple[int, ...]:
        return tuple(shards.shape)

    def load(self, programs: Mapping[int, Program]) -> Callable[[Sequence[Any]], list[Any]]:
        def run(inputs: Sequence[Any]) -> list[Any]:
            raise RuntimeError(
                "the count backend runs nothing; ask .program(...), .explain(...), .memory(...) or .cost(...), "
                "or shard with backend='virtual'"
            )

        return run


def choose_backend(name: str | None, mesh: Mesh) -> Backend:
    """The backend of this name, or the one that fits where the process runs."""
    if name is None:
        dist = torch.distributed
        name = "distributed" if dist.is_available() and dist.is_initialized() else "virtual"
        started = int(os.environ.get("WORLD_SIZE", "1"))
        if name == "virtual" and started > 1:
            raise MeshError(
                f"{started} processes were started, but torch.distributed is not initialised; call "
                "torch.distributed.init_process_group() before shard(...), or say backend='virtual'"
            )
    if name == "virtual":
        return Virtual(mesh)
    if name == "count":
        return Count(mesh)
    if name == "distributed":
        from megalith.core.backends.process import Process

        return Process(mesh)
    raise ValueError(f"there is no backend {name!r}; write 'virtual', 'distributed' or 'count'")
