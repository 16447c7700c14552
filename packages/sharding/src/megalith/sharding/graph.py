"""What was traced? A pure graph of ATen ops on global tensors, and the blocks that repeat in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from megalith.sharding.layout import Layout

__all__ = ["NOWHERE", "Block", "Call", "Graph", "Local", "Node", "Origin", "Ref", "TensorType", "map_refs", "refs"]


@dataclass(frozen=True, slots=True)
class Ref:
    """A value of a graph, by its number."""

    id: int

    def __repr__(self) -> str:
        return f"%{self.id}"


@dataclass(frozen=True, slots=True)
class TensorType:
    """Global shape and dtype of a value."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        n = self.dtype.itemsize
        for size in self.shape:
            n *= size
        return n

    def __repr__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a node comes from: module path, source line, and phase of the step.

    `phase` is `"forward"`, `"backward"` or `"update"` (what follows the gradients).
    """

    module: str = ""
    source: str = ""
    phase: str = "forward"


NOWHERE = Origin()


@dataclass(frozen=True)
class Block:
    """A piece of program that occurs more than once, as a graph of its own."""

    name: str
    graph: Graph

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


@dataclass(frozen=True, slots=True)
class Call:
    """The op of a node that runs a block. Its node's tensor operands are the block's inputs, in order.

    `prefix` is the module path that stands for the block's own at this call. `primal_of` says, for a backward block,
    which operand is the cotangent of which output of which node: pairs `(operand, value of the forward call)`.
    """

    block: Block
    primal_of: tuple[tuple[int, Ref], ...] = ()
    prefix: str = ""


@dataclass(frozen=True, eq=False)
class Local:
    """The op of a node that runs a graph on each rank's own shards.

    Args:
        name: what it is called.
        graph: on local shapes, which are the same on all ranks.
        operands: for each input of the graph, the layout of the node's operand.
        outputs: for each output of the graph, the layout of the node's output.
    """

    name: str
    graph: Graph
    operands: tuple[Layout, ...]
    outputs: tuple[Layout, ...]


@dataclass(frozen=True, slots=True)
class Node:
    """One op: `op(*args, **kwargs) -> outputs`, with a `Ref` wherever a tensor goes in."""

    op: Callable[..., Any] | Call | Local
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[int, ...]
    origin: Origin = NOWHERE

    @property
    def name(self) -> str:
        """The op's short name, such as `aten.mm.default`."""
        return self.op.block.name if isinstance(self.op, Call) else op_name(self.op)

    @property
    def operands(self) -> tuple[Ref, ...]:
        """The tensor operands in order of appearance, lists flattened."""
        return tuple(refs(self.args) + refs(self.kwargs)) if self.kwargs else tuple(refs(self.args))


def op_name(op: Callable[..., Any] | Local) -> str:
    """`aten.mm.default` for `torch.ops.aten.mm.default`."""
    if isinstance(op, Local):
        return op.name
    return str(op) if hasattr(op, "overloadpacket") else getattr(op, "__name__", str(op))


@dataclass(frozen=True)
class Graph:
    """Nodes in order of execution; each value is written once.

    Args:
        inputs: the values fed in, in order.
        names: a name for each input, such as `params.layers.0.q_proj.weight`.
        nodes: the ops.
        outputs: what comes out: `Ref`s and plain constants.
        types: shape and dtype of every value.
        constants: values that are tensors captured by the program.
    """

    inputs: tuple[int, ...]
    names: tuple[str, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Any, ...]
    types: Mapping[int, TensorType]
    constants: Mapping[int, torch.Tensor] = field(default_factory=dict)

    @cached_property
    def users(self) -> Mapping[int, tuple[int, ...]]:
        """For each value the positions of the nodes that read it."""
        found: dict[int, list[int]] = {}
        for position, node in enumerate(self.nodes):
            for ref in dict.fromkeys(node.operands):
                found.setdefault(ref.id, []).append(position)
        return {value: tuple(positions) for value, positions in found.items()}

    @cached_property
    def producers(self) -> Mapping[int, int]:
        """For each value that a node writes, the position of that node."""
        return {value: position for position, node in enumerate(self.nodes) for value in node.outputs}

    def __str__(self) -> str:
        lines = [f"%{i}: {self.types[i]} = input {name}" for i, name in zip(self.inputs, self.names, strict=True)]
        lines += [f"%{i}: {self.types[i]} = constant" for i in self.constants]
        for node in self.nodes:
            written = ", ".join(f"%{o}: {self.types[o]}" for o in node.outputs)
            read = [repr(a) for a in node.args] + [f"{k}={v!r}" for k, v in node.kwargs.items()]
            lines.append(f"{written} = {node.name}({', '.join(read)})  # {node.origin.phase} {node.origin.module}")
        lines.append(f"return {', '.join(map(repr, self.outputs))}")
        return "\n".join(lines)


def refs(tree: Any) -> list[Ref]:
    """Each `Ref` in nested tuples, lists and dicts, in order."""
    found: list[Ref] = []
    _collect(tree, found)
    return found


def _collect(tree: Any, found: list[Ref]) -> None:
    kind = type(tree)
    if kind is Ref:
        found.append(tree)
    elif kind is tuple or kind is list:
        for item in tree:
            _collect(item, found)
    elif kind is dict:
        for item in tree.values():
            _collect(item, found)


def map_refs(tree: Any, fn: Callable[[Ref], Any]) -> Any:
    """The same nesting with each `Ref` replaced by `fn(ref)`."""
    kind = type(tree)
    if kind is Ref:
        return fn(tree)
    if kind is tuple or kind is list:
        return kind([map_refs(item, fn) for item in tree])
    if kind is dict:
        return {key: map_refs(item, fn) for key, item in tree.items()}
    return tree
