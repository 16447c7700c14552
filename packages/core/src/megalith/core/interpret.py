"""What does a graph compute on one device? The oracle's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megalith.core import _compat
from megalith.sharding.graph import Call, Graph, Ref, map_refs

__all__ = ["run_graph"]


def run_graph(graph: Graph, inputs: Sequence[torch.Tensor]) -> list[Any]:
    """Runs every node of a graph on whole tensors.

    Args:
        graph: the graph.
        inputs: a tensor for each of its inputs.

    Returns:
        Its outputs, in order.
    """
    values: dict[int, Any] = dict(zip(graph.inputs, inputs, strict=True))
    values.update(graph.constants)

    def read(ref: Ref) -> Any:
        return values[ref.id]

    for node in graph.nodes:
        args, kwargs = map_refs(node.args, read), map_refs(node.kwargs, read)
        if isinstance(node.op, Call):
            outs: Any = run_graph(node.op.block.graph, args)
        else:
            outs = node.op(*args, **kwargs)
            if _compat.returns_one_tensor(node.op):
                outs = (outs,)
        values.update(zip(node.outputs, outs, strict=True))
    return [map_refs(output, read) for output in graph.outputs]
