"""Which ops change when they run on a shard? Those with sizes among their arguments, and those that look things up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megalith.sharding import markers
from megalith.sharding.aten.index import index_dims
from megalith.sharding.aten.shape import bounds
from megalith.sharding.graph import Graph, Ref, TensorType, refs
from megalith.sharding.layout import Layout
from megalith.sharding.partition import Run

__all__ = ["LOCALIZE", "Emit", "identity"]

aten = torch.ops.aten
Changed = tuple[tuple[Any, ...], dict[str, Any]] | None


class Start(Protocol):
    """Starts a collective on a buffer, over the ranks along `axes`. Gives a function that awaits what arrives.

    `shape` is that of what arrives, `nbytes` what the busiest rank receives, `layout` that of what is moved; the rest
    as `Launch` has it.
    """

    def __call__(
        self,
        kind: str,
        axes: tuple[str, ...],
        buffer: Ref,
        shape: tuple[int, ...],
        nbytes: int,
        layout: Layout,
        why: str,
        *,
        send: tuple[int, ...] = (),
        receive: tuple[int, ...] = (),
        sizes: tuple[int, int] | None = None,
    ) -> Callable[[], Ref]: ...


@dataclass(frozen=True)
class Emit:
    """A run of a graph about to become instructions: its arguments as slots, and what writes them.

    `emit(fn, *args, out=slot)` writes an op and gives what it makes; `start` writes a collective.
    """

    run: Run
    rank: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[int, ...]
    types: dict[int, TensorType]
    graph: Graph
    emit: Callable[..., Any]
    start: Start

    def shape(self, ref: Ref | int) -> tuple[int, ...]:
        return self.types[ref.id if isinstance(ref, Ref) else ref].shape


LOCALIZE: dict[str, Callable[[Emit], Changed]] = {}


def identity(op: Any) -> bool:
    """Whether an op merely returns its first operand."""
    return op is markers.constrain or op is markers.like


def _localizes(*names: str) -> Callable[[Callable[[Emit], Changed]], Callable[[Emit], Changed]]:
    def register(fn: Callable[[Emit], Changed]) -> Callable[[Emit], Changed]:
        for name in names:
            LOCALIZE[name] = fn
        return fn

    return register


# --- ops that take a shape ------------------------------------------------------------------------


@_localizes("aten.reshape.default", "aten.expand.default")
def _shape_second(e: Emit) -> Changed:
    return (e.args[0], list(e.shape(e.outputs[0])), *e.args[2:]), e.kwargs


def _before(e: Emit, layout: Any, dim: int, index: int) -> int:
    """How many of the indices of a dim that lie before this one a rank holds."""
    return sum(min(stop, index) - start for start, stop in layout.ranges(e.rank)[dim] if start < index)


def _local_bounds(e: Emit, layout: Any, dim: int, first: int) -> tuple[int, int]:
    start, stop, _ = bounds(e.run.node, layout.shape[dim], first)
    return _before(e, layout, dim, start), _before(e, layout, dim, max(start, stop))


@_localizes("aten.slice.Tensor")
def _slice(e: Emit) -> Changed:
    layout = e.run.operands[0].layout
    dim = (e.args[1] if len(e.args) > 1 else 0) % len(layout.dims)
    if not layout.dims[dim].axes:
        return e.args, e.kwargs
    return (e.args[0], dim, *_local_bounds(e, layout, dim, 2)), e.kwargs


@_localizes("aten.slice_backward.default")
def _slice_backward(e: Emit) -> Changed:
    layout = e.run.outputs[0].layout  # type: ignore[union-attr]
    shape, dim = list(e.shape(e.outputs[0])), e.args[2] % len(layout.dims)
    if not layout.dims[dim].axes:
        return (e.args[0], shape, *e.args[2:]), e.kwargs
    return (e.args[0], shape, dim, *_local_bounds(e, layout, dim, 3), 1), e.kwargs


@_localizes("aten.full.default")
def _shape_first(e: Emit) -> Changed:
    return (list(e.shape(e.outputs[0])), *e.args[1:]), e.kwargs


# --- sums of many -----------------------------------------------------------------------------------


@_localizes("add_n")
def _add_n(e: Emit) -> Changed:
    total, *rest = e.args[0]
    for term in rest[:-1]:
        total = e.emit(aten.add.Tensor, total, term)
    e.emit(aten.add.Tensor, total, rest[-1], out=e.outputs[0])
    return None


@_localizes("aten.amax.default", "aten.amin.default", "aten.max.default", "aten.min.default")
def _extremum(e: Emit) -> Changed:
    x = e.types[e.args[0].id]
    if 0 not in x.shape:
        return e.args, e.kwargs
    info: Any = torch.finfo(x.dtype) if x.dtype.is_floating_point else torch.iinfo(x.dtype)
    lowest = float("-inf") if x.dtype.is_floating_point else info.min
    highest = float("inf") if x.dtype.is_floating_point else info.max
    value = lowest if "max" in e.run.node.name else highest
    e.emit(aten.full.default, list(e.shape(e.outputs[0])), value, out=e.outputs[0], dtype=x.dtype)
    return None


@_localizes("aten.convolution.default", "aten.convolution_backward.default")
def _convolution(e: Emit) -> Changed:
    """Without any channels of its own a rank's terms are zero; torch's kernels refuse that."""
    if not any(0 in e.shape(ref) for ref in refs(e.args)):
        return e.args, e.kwargs
    for slot in e.outputs:
        if slot >= 0:
            e.emit(aten.full.default, list(e.shape(slot)), 0, out=slot, dtype=e.types[slot].dtype)
    return None


# --- kernels that read memory in order, whatever the strides -------------------------------------------


def dense(x: torch.Tensor) -> torch.Tensor:
    """The same tensor in memory without gaps: shards and arrived buffers may be strided slices."""
    return x.contiguous()


@_localizes("aten.native_layer_norm_backward.default")
def _layer_norm_backward(e: Emit) -> Changed:
    g, x, shape, mean, rstd, *rest = e.args
    return (g, x, shape, e.emit(dense, mean), e.emit(dense, rstd), *rest), e.kwargs


@_localizes("aten.view_as_complex.default")
def _view_as_complex(e: Emit) -> Changed:
    return (e.emit(dense, e.args[0]),), e.kwargs


# --- look-ups in a dim of which each rank holds a block -----------------------------------------------


def _block(e: Emit, operand: int, dim: int) -> tuple[int, int]:
    """First index and number of the indices of a dim that this rank holds."""
    ranges = e.run.operands[operand].layout.ranges(e.rank)[dim]
    return (ranges[0][0], ranges[0][1] - ranges[0][0]) if ranges else (0, 0)


def _own(e: Emit, index: Ref, start: int, n: int) -> tuple[Ref, Ref]:
    """Indices into this rank's block, 0 where they fall outside; and where they do."""
    local = e.emit(aten.sub.Tensor, index, start)
    below, above = e.emit(aten.lt.Scalar, local, 0), e.emit(aten.ge.Scalar, local, n)
    outside = e.emit(aten.logical_or.default, below, above)
    return e.emit(aten.masked_fill.Scalar, local, outside, 0), outside


def _zeros(e: Emit) -> Changed:
    out = e.types[e.outputs[0]]
    e.emit(aten.full.default, list(out.shape), 0, out=e.outputs[0], dtype=out.dtype)
    return None


@_localizes("aten.embedding.default")
def _embedding(e: Emit) -> Changed:
    weight, ids = e.args[0], e.args[1]
    if not e.run.indexed_axes:
        return e.args, e.kwargs
    start, n = _block(e, 0, 0)
    if n == 0:
        return _zeros(e)
    local, outside = _own(e, ids, start, n)
    rows = e.emit(aten.embedding.default, weight, local)
    mask = e.emit(aten.reshape.default, outside, [*e.shape(outside), 1])
    e.emit(aten.masked_fill.Scalar, rows, mask, 0, out=e.outputs[0])
    return None


@_localizes("aten.embedding_dense_backward.default")
def _embedding_backward(e: Emit) -> Changed:
    g, ids, _, padding, scale = e.args
    n = e.shape(e.outputs[0])[0]
    layout = e.run.outputs[0].layout  # type: ignore[union-attr]
    if not layout.dims[0].axes:
        return e.args, e.kwargs
    ranges = layout.ranges(e.rank)[0]
    start = ranges[0][0] if ranges else 0
    local, outside = _own(e, ids, start, n)
    mask = e.emit(aten.reshape.default, outside, [*e.shape(outside), 1])
    masked = e.emit(aten.masked_fill.Scalar, g, mask, 0)
    padding = padding - start if padding >= 0 and 0 <= padding - start < n else -1
    e.emit(aten.embedding_dense_backward.default, masked, local, n, padding, scale, out=e.outputs[0])
    return None


@_localizes("aten.gather.default")
def _gather(e: Emit) -> Changed:
    x, dim, index = e.args[:3]
    if not e.run.indexed_axes:
        return e.args, e.kwargs
    start, n = _block(e, 0, dim % len(e.shape(x)))
    if n == 0:
        return _zeros(e)
    local, outside = _own(e, index, start, n)
    picked = e.emit(aten.gather.default, x, dim, local)
    e.emit(aten.masked_fill.Scalar, picked, outside, 0, out=e.outputs[0])
    return None


@_localizes("aten.index_select.default")
def _index_select(e: Emit) -> Changed:
    x, dim, index = e.args
    if not e.run.indexed_axes:
        return e.args, e.kwargs
    dim %= len(e.shape(x))
    start, n = _block(e, 0, dim)
    if n == 0:
        return _zeros(e)
    local, outside = _own(e, index, start, n)
    rows = e.emit(aten.index_select.default, x, dim, local)
    shape = [-1 if d == dim else 1 for d in range(len(e.shape(x)))] if e.shape(index) else [1] * len(e.shape(x))
    mask = e.emit(aten.reshape.default, outside, shape)
    e.emit(aten.masked_fill.Scalar, rows, mask, 0, out=e.outputs[0])
    return None


def _own_of_each(e: Emit, indices: Any, layout: Any) -> tuple[list[Ref | None], Ref | None]:
    """For indices into several dims: into this rank's blocks, and where any of them falls outside."""
    local: list[Ref | None] = []
    outside = None
    for d, index in enumerate(indices):
        if index is None or not layout.dims[d].axes:
            local.append(index)
            continue
        ranges = layout.ranges(e.rank)[d]
        start, n = (ranges[0][0], ranges[0][1] - ranges[0][0]) if ranges else (0, 0)
        total = e.emit(aten.where.self, *_wrapped(e, index, layout.shape[d]))
        mine, apart = _own(e, total, start, n)
        local.append(mine)
        outside = apart if outside is None else e.emit(aten.logical_or.default, outside, apart)
    return local, outside


def _wrapped(e: Emit, index: Ref, size: int) -> tuple[Ref, Ref, Ref]:
    """Condition and choices by which a negative index counts from the end."""
    return e.emit(aten.lt.Scalar, index, 0), e.emit(aten.add.Tensor, index, size), index


def _mask_shape(e: Emit, indices: Any, outside: Ref, result_rank: int) -> list[int]:
    """The shape in which a mask over the indices is broadcast over a result."""
    shapes = [e.shape(i) for i in indices if i is not None]
    _, at, n = index_dims(indices, shapes, 0)
    mine = [1] * (n - len(e.shape(outside))) + list(e.shape(outside))
    return [1] * at + mine + [1] * (result_rank - at - n)


@_localizes("aten.index.Tensor")
def _index(e: Emit) -> Changed:
    x, indices = e.args
    if not e.run.indexed_axes:
        return e.args, e.kwargs
    layout = e.run.operands[0].layout
    local, outside = _own_of_each(e, indices, layout)
    if 0 in e.shape(x):
        return _zeros(e)
    assert outside is not None
    rows = e.emit(aten.index.Tensor, x, local)
    mask = e.emit(aten.reshape.default, outside, _mask_shape(e, indices, outside, len(e.shape(rows))))
    e.emit(aten.masked_fill.Scalar, rows, mask, 0, out=e.outputs[0])
    return None


@_localizes("megalith.index_sum.default")
def _index_sum(e: Emit) -> Changed:
    values, indices, _ = e.args
    layout = e.run.outputs[0].layout  # type: ignore[union-attr]
    local, outside = _own_of_each(e, indices, layout)
    if outside is not None:
        mask = e.emit(aten.reshape.default, outside, _mask_shape(e, indices, outside, len(e.shape(values))))
        values = e.emit(aten.masked_fill.Scalar, values, mask, 0)
    return (values, local, list(e.shape(e.outputs[0]))), e.kwargs


@_localizes("aten.scatter_add.default")
def _scatter_add(e: Emit) -> Changed:
    x, dim, index, src = e.args
    if not e.run.indexed_axes:
        return e.args, e.kwargs
    start, n = _block(e, 0, dim % len(e.shape(x)))
    local, outside = _own(e, index, start, n)
    for d, length in enumerate(e.shape(index)):
        if e.shape(src)[d] > length:
            src = e.emit(aten.slice.Tensor, src, d, 0, length)
    kept = e.emit(aten.masked_fill.Scalar, src, outside, 0)
    e.emit(aten.scatter_add.default, x, dim, local, kept, out=e.outputs[0])
    return None
