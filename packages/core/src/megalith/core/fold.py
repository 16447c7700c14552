"""Which look-ups need no indices? Those that read a dim in order: they are views, and views shard without a collective.

Takes a graph, gives an equal one. After this: a look-up whose indices are known when it is traced and count upwards
(positions, the batch and key numbers of masks) is a slice, a permutation, a reshape; what adds zero is gone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from megalith.sharding.graph import Call, Graph, Node, Ref, TensorType, map_refs, op_name

__all__ = ["fold_lookups"]

aten = torch.ops.aten
_MOST_ELEMENTS = 1 << 16  # of what is computed to know it
_COUNTING = {  # ops that make positions of positions
    aten.arange.start_step,
    aten.full.default,
    aten.reshape.default,
    aten.permute.default,
    aten.expand.default,
    aten.slice.Tensor,
    aten.cat.default,
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.mul.Tensor,
    aten._to_copy.default,
}


def fold_lookups(graph: Graph) -> Graph:
    """The same function with look-ups in order as views."""
    if not any(_is_lookup(node) for node in graph.nodes):
        return graph
    folder = _Folder(graph)
    for node in graph.nodes:
        folder.visit(node)
    return replace(
        graph,
        nodes=tuple(folder.nodes),
        types=folder.types,
        outputs=tuple(map_refs(graph.outputs, folder.now)),
    )


def _is_lookup(node: Node) -> bool:
    return not isinstance(node.op, Call) and op_name(node.op) in _FOLDS


class _Folder:
    """The nodes so far, and the values of those that are known."""

    def __init__(self, graph: Graph) -> None:
        self.types = dict(graph.types)
        self.nodes: list[Node] = []
        self.renamed: dict[int, Ref] = {}
        self.zeros: set[int] = set()
        self.known: dict[int, torch.Tensor] = {
            v: t for v, t in graph.constants.items() if not t.dtype.is_floating_point and t.numel() <= _MOST_ELEMENTS
        }
        self.next_value = max(self.types, default=-1) + 1

    def now(self, ref: Ref) -> Ref:
        return self.renamed.get(ref.id, ref)

    def visit(self, node: Node) -> None:
        node = replace(node, args=map_refs(node.args, self.now), kwargs=map_refs(node.kwargs, self.now))
        fold = None if isinstance(node.op, Call) else _FOLDS.get(op_name(node.op))
        folded = fold(self, node) if fold is not None else None
        if folded is not None:
            self.renamed[node.outputs[0]] = folded
            return
        if node.op is aten.add.Tensor and not node.kwargs:
            kept = self._without_zero(node)
            if kept is not None:
                self.renamed[node.outputs[0]] = kept
                return
        if node.op is aten.full.default and node.args[1] == 0:
            self.zeros.add(node.outputs[0])
        self._learn(node)
        self.nodes.append(node)

    def _learn(self, node: Node) -> None:
        """Computes positions."""
        if node.op not in _COUNTING:
            return
        kind = self.types[node.outputs[0]]
        if kind.dtype.is_floating_point or kind.nbytes // kind.dtype.itemsize > _MOST_ELEMENTS:
            return
        if all(ref.id in self.known for ref in node.operands):
            args, kwargs = map_refs((node.args, node.kwargs), lambda ref: self.known[ref.id])
            self.known[node.outputs[0]] = node.op(*args, **kwargs)

    def _without_zero(self, node: Node) -> Ref | None:
        out = self.types[node.outputs[0]]
        for kept, other in (node.args, node.args[::-1]):
            is_zero = other.id in self.zeros if isinstance(other, Ref) else other == 0
            if is_zero and isinstance(kept, Ref) and self.types[kept.id] == out:
                return kept
        return None

    def emit(self, like: Node, op: Any, *args: Any, shape: Sequence[int]) -> Ref:
        """A new node in the place of `like`; its first argument gives the dtype."""
        value = self.next_value
        self.next_value += 1
        self.types[value] = TensorType(tuple(shape), self.types[args[0].id].dtype)
        self.nodes.append(Node(op, args, {}, (value,), like.origin))
        return Ref(value)

    def reshape(self, like: Node, x: Ref, shape: Sequence[int]) -> Ref:
        return self.emit(like, aten.reshape.default, x, list(shape), shape=shape)


def _run_of(index: torch.Tensor) -> tuple[int, int] | None:
    """First and last + 1 of indices that count upwards by one."""
    flat = index.reshape(-1)
    if not flat.numel() or flat[0] < 0:
        return None
    first, stop = int(flat[0]), int(flat[0]) + flat.numel()
    return (first, stop) if torch.equal(flat, torch.arange(first, stop, dtype=flat.dtype)) else None


def _embedding(folder: _Folder, node: Node) -> Ref | None:
    weight, ids = node.args[:2]
    run = _run_of(folder.known[ids.id]) if ids.id in folder.known else None
    if run is None:
        return None
    rows = folder.emit(node, aten.slice.Tensor, weight, 0, *run, shape=(run[1] - run[0], *_shape(folder, weight)[1:]))
    return folder.reshape(node, rows, _shape(folder, node.outputs[0]))


def _embedding_backward(folder: _Folder, node: Node) -> Ref | None:
    g, ids, n, padding, _ = node.args
    run = _run_of(folder.known[ids.id]) if ids.id in folder.known else None
    if run is None or run[0] <= padding < run[1]:
        return None
    width = _shape(folder, g)[-1]
    rows = folder.reshape(node, g, (run[1] - run[0], width))
    if run == (0, n):
        return rows
    return folder.emit(node, aten.slice_backward.default, rows, [n, width], 0, *run, 1, shape=(n, width))


def _index(folder: _Folder, node: Node) -> Ref | None:
    """`x[i, j]` with `i` and `j` counting along dims of their own through whole dims of `x`."""
    x, indices = node.args
    shape, out = _shape(folder, x), _shape(folder, node.outputs[0])
    moved: list[tuple[int, int]] = []  # dim of the result, dim of x
    refs = [index for index in indices if index is not None]
    if any(ref.id not in folder.known for ref in refs):
        return None
    n = max(folder.known[ref.id].ndim for ref in refs)
    for d, index in enumerate(indices):
        if index is None:
            continue
        known = folder.known[index.id]
        along = [i for i, size in enumerate(known.shape) if size > 1]
        if known.dtype == torch.bool or len(along) > 1 or _run_of(known) != (0, shape[d]):
            return None
        moved.append((n - known.ndim + along[0] if along else -1, d))
    if len({i for i, _ in moved if i >= 0}) < sum(i >= 0 for i, _ in moved):
        return None
    dims = [d for d, index in enumerate(indices) if index is not None]
    together = dims == list(range(dims[0], dims[-1] + 1))
    before = list(range(dims[0])) if together else []
    after = [d for d in range(len(shape)) if d not in dims and d not in before]
    order = [*before, *(d for _, d in sorted(moved)), *after]
    turned = folder.emit(node, aten.permute.default, x, order, shape=[shape[d] for d in order])
    return folder.reshape(node, turned, out)


def _shape(folder: _Folder, value: Ref | int) -> tuple[int, ...]:
    return folder.types[value.id if isinstance(value, Ref) else value].shape


_FOLDS: Mapping[str, Any] = {
    "aten.embedding.default": _embedding,
    "aten.embedding_dense_backward.default": _embedding_backward,
    "aten.index.Tensor": _index,
}
