"""What does a graph compute on one device? The oracle's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from megalith.core import _compat
from megalith.sharding.graph import Call, Graph, Local, Node, Ref, map_refs

__all__ = ["run_graph"]


def run_graph(
    graph: Graph, inputs: Sequence[torch.Tensor], special: Callable[[Node, tuple[Any, ...]], Any] | None = None
) -> list[Any]:
    """Runs every node of a graph on whole tensors.

    Args:
        graph: the graph.
        inputs: a tensor for each of its inputs.
        special: shown each node with its arguments; runs it and returns its outputs, or returns `NotImplemented`.

    Returns:
        Its outputs, in order.
    """
    values: dict[int, Any] = dict(zip(graph.inputs, inputs, strict=True))
    values.update(graph.constants)

    def read(ref: Ref) -> Any:
        return values[ref.id]

    for node in graph.nodes:
        args, kwargs = map_refs(node.args, read), map_refs(node.kwargs, read)
        outs: Any = NotImplemented if special is None else special(node, args)
        if outs is not NotImplemented:
            pass
        elif isinstance(node.op, Call):
            outs = [o for o in run_graph(node.op.block.graph, args) if o is not None]  # a gradient may be None
        elif isinstance(node.op, Local):
            raise TypeError(f"{node.name} runs on shards: whole tensors do not do")
        else:
            outs = node.op(*args, **kwargs)
            if _compat.returns_one_tensor(node.op):
                outs = (outs,)
        values.update(zip(node.outputs, outs, strict=True))
    return [map_refs(output, read) for output in graph.outputs]
