"""What is a partition made of? Values in layouts, runs of nodes on shards, and moves between layouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from megalith.sharding.graph import Graph, Node, Origin, TensorType
from megalith.sharding.layout import Layout
from megalith.sharding.mesh import Mesh
from megalith.sharding.overlap import is_even

__all__ = ["Input", "Move", "Partition", "Run", "Version"]


@dataclass(frozen=True)
class Input:
    """How an input of a graph lives.

    Args:
        stored: its layout at rest.
        used: for a parameter, its layout while it computes; gathered at use, once a phase.
        grad: the layout of its gradient.
        is_parameter: parameters are stationary: where layouts conflict, the others move.
        cause: the spec that decided, for explanations; not part of equality, so that blocks are shared.
    """

    stored: Layout
    used: Layout | None = None
    grad: Layout | None = None
    is_parameter: bool = False
    cause: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Version:
    """A value in one layout. `epoch` tells gathers of the same parameter in different phases apart."""

    value: int
    layout: Layout
    epoch: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """One node on local shards; for the call of a block, the block laid out for these operands.

    `ring_axes` are those around which the ranks pass blocks while the node runs.
    """

    node: Node
    operands: tuple[Version, ...]
    outputs: tuple[Version | None, ...]
    indexed_axes: tuple[str, ...] = ()
    block: Partition | None = None
    ring_axes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Move:
    """A value brought from one layout to another.

    `cause` says in words why: the spec or rule that asks for it. `asked` is whether a spec, a marker or the sum that a
    spec implies asks for it; otherwise layouts merely disagree.
    """

    source: Version
    target: Version
    dtype_size: int
    origin: Origin
    cause: str
    asked: bool = True


@dataclass(frozen=True)
class Partition:
    """A graph with a layout for every value.

    Args:
        graph: what was partitioned.
        mesh: over which mesh.
        inputs: the inputs as they are fed.
        steps: runs and moves in order.
        outputs: for each output of the graph a version, or a constant.
        types: types of all values, those that partitioning made included.
    """

    graph: Graph
    mesh: Mesh
    inputs: tuple[Version, ...]
    constants: tuple[Version, ...]
    steps: tuple[Run | Move, ...]
    outputs: tuple[Any, ...]
    types: Mapping[int, TensorType]

    @cached_property
    def is_even(self) -> bool:
        """Whether every shard is as large on all ranks."""
        layouts = {version.layout for version in (*self.inputs, *self.constants)}
        for step in self.steps:
            if isinstance(step, Move):
                layouts |= {step.source.layout, step.target.layout}
            else:
                layouts |= {version.layout for version in step.outputs if version is not None}
        blocks = {id(step.block): step.block for step in self.steps if isinstance(step, Run) and step.block is not None}
        evenly = all(is_even(dim) for layout in layouts for dim in layout.dims)
        return evenly and all(block.is_even for block in blocks.values())
