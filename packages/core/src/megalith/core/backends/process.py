"""How does a process hold the shards of its rank? The distributed backend: plain tensors, gathered by collectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from megalith.core.backends import lockstep
from megalith.core.backends.distributed import Distributed
from megalith.core.lower import lower
from megalith.core.program import Program
from megalith.sharding.graph import Graph, Ref, TensorType
from megalith.sharding.layout import Layout, replicated
from megalith.sharding.mesh import Mesh
from megalith.sharding.partition import Input, partition

__all__ = ["Process"]


class Process:
    """A process a rank; see `Distributed` for what it needs.

    Args:
        mesh: the mesh.
        timeout: seconds until a rank that waits for others gives up, with an error that names the collective.
    """

    def __init__(self, mesh: Mesh, timeout: float = 300.0) -> None:
        self.mesh = mesh
        self.runtime = Distributed(mesh, timeout)
        self.ranks: tuple[int, ...] = (self.runtime.rank,)
        self._gathers: dict[tuple[Layout, torch.dtype], Program] = {}

    def scatter(self, tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
        return lockstep.shard_of(tensor, layout, self.runtime.rank)

    def gather(self, shards: Any, layout: Layout) -> torch.Tensor:
        key = (layout, shards.dtype)
        program = self._gathers.get(key)
        if program is None:
            program = self._gathers[key] = gather_program(layout, shards.dtype, self.runtime.rank)
        return self.runtime.run(program, [shards])[0]

    def local_shape(self, shards: Any) -> tuple[int, ...]:
        return tuple(shards.shape)

    def load(self, programs: Mapping[int, Program]) -> Callable[[Sequence[Any]], list[Any]]:
        return self.runtime.compile(programs[self.runtime.rank])


def gather_program(layout: Layout, dtype: torch.dtype, rank: int) -> Program:
    """The program that brings one tensor to every rank."""
    graph = Graph((0,), ("shard",), (), (Ref(0),), {0: TensorType(layout.shape, dtype)})
    whole = replicated(layout.shape, layout.mesh)
    return lower(partition(graph, layout.mesh, [Input(layout)], [whole]), rank)
