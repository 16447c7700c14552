"""Which ATen ops are written as simpler ones before they are recorded?

A small table of our own: what is left afterwards either has a factor rule that shards well, or is a view.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megalith.core import ops as ops  # registers the ops that decompositions write

__all__ = ["DECOMPOSITIONS", "FACTORIES", "IDENTITIES"]

aten = torch.ops.aten
Tensor = torch.Tensor

# In a graph without mutation and strides these return their first argument.
IDENTITIES = {
    aten.detach.default,
    aten.alias.default,
    aten.clone.default,
    aten.lift_fresh.default,
    aten.lift_fresh_copy.default,
    aten.contiguous.default,
}

# Composites by the letter of the dispatcher, but leaves of a graph here.
FACTORIES = {aten.full.default, aten.arange.start_step}

DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {}


def _decomposes(*ops: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        for op in ops:
            DECOMPOSITIONS[op] = fn
        return fn

    return register


# --- copies and views -------------------------------------------------------------------------


@_decomposes(aten._to_copy.default)
def _to_copy(x: Tensor, dtype: torch.dtype | None = None, **_: Any) -> Any:
    if dtype is None or dtype == x.dtype:
        return aten.alias(x)
    return NotImplemented


@_decomposes(aten.copy.default)
def _copy(x: Tensor, source: Tensor, *_: Any) -> Tensor:
    return source.to(x.dtype).expand(x.shape)


@_decomposes(aten.diagonal_scatter.default)
def _diagonal_scatter(x: Tensor, source: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    whole = x.movedim((dim1, dim2), (-2, -1))
    rows, columns = (torch.arange(n, device=x.device) for n in whole.shape[-2:])
    before = max(-offset, 0)
    after = whole.shape[-2] - before - source.shape[-1]
    if before or after:
        source = torch.nn.functional.pad(source, (before, after))
    on_diagonal = columns - rows[:, None] == offset
    return torch.where(on_diagonal, source.unsqueeze(-1), whole).movedim((-2, -1), (dim1, dim2))


@_decomposes(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten._reshape_alias.default)
def _view(x: Tensor, shape: Sequence[int], *_: Any) -> Any:
    if tuple(shape) == tuple(x.shape):
        return aten.alias(x)
    return NotImplemented


@_decomposes(aten.expand.default)
def _expand(x: Tensor, shape: Sequence[int], *, implicit: bool = False) -> Any:
    if tuple(shape) == tuple(x.shape):
        return aten.alias(x)
    return NotImplemented


@_decomposes(aten.permute.default)
def _permute(x: Tensor, dims: Sequence[int]) -> Any:
    if [d % x.ndim for d in dims] == list(range(x.ndim)):
        return aten.alias(x)
    return NotImplemented


@_decomposes(aten.t.default, aten.numpy_T.default)
def _t(x: Tensor) -> Tensor:
    return aten.permute(x, list(reversed(range(x.ndim))))


@_decomposes(aten.transpose.int)
def _transpose(x: Tensor, a: int, b: int) -> Tensor:
    dims = list(range(x.ndim))
    if dims:
        dims[a], dims[b] = dims[b], dims[a]
    return aten.permute(x, dims)


@_decomposes(aten.unsqueeze.default)
def _unsqueeze(x: Tensor, dim: int) -> Tensor:
    dim %= x.ndim + 1
    return aten.view(x, [*x.shape[:dim], 1, *x.shape[dim:]])


@_decomposes(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def _squeeze(x: Tensor, dims: Any = None) -> Tensor:
    chosen = range(x.ndim) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = {d % x.ndim for d in chosen if x.ndim and x.shape[d] == 1}
    return aten.view(x, [n for d, n in enumerate(x.shape) if d not in gone])


@_decomposes(aten.select.int)
def _select(x: Tensor, dim: int, index: int) -> Tensor:
    dim, index = dim % x.ndim, index % x.shape[dim]
    piece = aten.slice(x, dim, index, index + 1)
    return aten.view(piece, [*x.shape[:dim], *x.shape[dim + 1 :]])


@_decomposes(aten.select_backward.default)
def _select_backward(g: Tensor, shape: Sequence[int], dim: int, index: int) -> Tensor:
    dim, index = dim % len(shape), index % shape[dim]
    return aten.slice_backward(aten.unsqueeze(g, dim), shape, dim, index, index + 1, 1)


@_decomposes(aten.slice.Tensor)
def _slice(x: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    n = x.shape[dim]
    if step == 1 and (start or 0) in (0, -n) and (end is None or end >= n):
        return aten.alias(x)
    return NotImplemented


@_decomposes(aten.unbind.int)
def _unbind(x: Tensor, dim: int = 0) -> list[Tensor]:
    return [aten.select(x, dim, i) for i in range(x.shape[dim])]


@_decomposes(aten.split.Tensor)
def _split(x: Tensor, size: int, dim: int = 0) -> list[Tensor]:
    return [aten.slice(x, dim, i, min(i + size, x.shape[dim])) for i in range(0, max(x.shape[dim], 1), max(size, 1))]


@_decomposes(aten.split_with_sizes.default)
def _split_with_sizes(x: Tensor, sizes: Sequence[int], dim: int = 0) -> list[Tensor]:
    pieces, start = [], 0
    for size in sizes:
        pieces.append(aten.slice(x, dim, start, start + size))
        start += size
    return pieces


@_decomposes(aten.cat.default)
def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    kept = [x for x in tensors if tuple(x.shape) != (0,)]
    if len(kept) == 1:
        return aten.alias(kept[0])
    if len(kept) < len(tensors) and kept:
        return aten.cat(kept, dim)
    return NotImplemented


@_decomposes(aten.stack.default)
def _stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    return aten.cat([aten.unsqueeze(x, dim) for x in tensors], dim % (tensors[0].ndim + 1))


# --- factories --------------------------------------------------------------------------------


def _full(like: Tensor, shape: Sequence[int], value: Any, dtype: torch.dtype | None) -> Tensor:
    return aten.full(list(shape), value, dtype=dtype or like.dtype, device=like.device)


@_decomposes(aten.zeros_like.default, aten.empty_like.default)
def _zeros_like(x: Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return _full(x, x.shape, 0, dtype)


@_decomposes(aten.ones_like.default)
def _ones_like(x: Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return _full(x, x.shape, 1, dtype)


@_decomposes(aten.full_like.default)
def _full_like(x: Tensor, value: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return _full(x, x.shape, value, dtype)


@_decomposes(aten.new_zeros.default, aten.new_empty.default)
def _new_zeros(x: Tensor, shape: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return _full(x, shape, 0, dtype)


@_decomposes(aten.new_ones.default)
def _new_ones(x: Tensor, shape: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return _full(x, shape, 1, dtype)


@_decomposes(aten.new_full.default)
def _new_full(
    x: Tensor, shape: Sequence[int], value: Any, *, dtype: torch.dtype | None = None, **_: Any
) -> Tensor:
    return _full(x, shape, value, dtype)


@_decomposes(aten.zeros.default, aten.empty.memory_format)
def _zeros(shape: Sequence[int], *, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> Tensor:
    return aten.full(list(shape), 0, dtype=dtype or torch.get_default_dtype(), device=device)


@_decomposes(aten.ones.default)
def _ones(shape: Sequence[int], *, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> Tensor:
    return aten.full(list(shape), 1, dtype=dtype or torch.get_default_dtype(), device=device)


@_decomposes(aten.scalar_tensor.default)
def _scalar_tensor(value: Any, *, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> Tensor:
    return aten.full([], value, dtype=dtype or torch.get_default_dtype(), device=device)


@_decomposes(aten.arange.default)
def _arange(end: Any, **kwargs: Any) -> Tensor:
    return aten.arange.start_step(0, end, 1, **_arange_dtype((0, end, 1), kwargs))


@_decomposes(aten.arange.start)
def _arange_start(start: Any, end: Any, **kwargs: Any) -> Tensor:
    return aten.arange.start_step(start, end, 1, **_arange_dtype((start, end, 1), kwargs))


def _arange_dtype(numbers: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    if kwargs.get("dtype") is None:
        integral = all(isinstance(n, int) for n in numbers)
        kwargs = {**kwargs, "dtype": torch.int64 if integral else torch.get_default_dtype()}
    return {k: v for k, v in kwargs.items() if k in ("dtype", "device")}


# --- arithmetic that reductions pass through ---------------------------------------------------


@_decomposes(aten.add.Tensor)
def _add(x: Tensor, y: Any, *, alpha: Any = 1) -> Any:
    return NotImplemented if alpha == 1 else aten.add(x, y * alpha)


@_decomposes(aten.sub.Tensor)
def _sub(x: Tensor, y: Any, *, alpha: Any = 1) -> Any:
    return NotImplemented if alpha == 1 else aten.sub(x, y * alpha)


@_decomposes(aten.rsub.Scalar, aten.rsub.Tensor)
def _rsub(x: Tensor, y: Any, alpha: Any = 1) -> Tensor:
    return aten.add(aten.neg(x * alpha if alpha != 1 else x), y)


@_decomposes(aten.addmm.default)
def _addmm(bias: Tensor, x: Tensor, w: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    out = aten.mm(x, w)
    out = out if alpha == 1 else out * alpha
    return out + (bias if beta == 1 else bias * beta)


@_decomposes(aten.baddbmm.default)
def _baddbmm(bias: Tensor, x: Tensor, w: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    out = aten.bmm(x, w)
    out = out if alpha == 1 else out * alpha
    return out if beta == 0 else out + (bias if beta == 1 else bias * beta)


@_decomposes(aten.mean.default)
def _mean(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    return aten.div(aten.sum(x, dtype=dtype), max(x.numel(), 1))


@_decomposes(aten.mean.dim)
def _mean_dim(x: Tensor, dim: Any, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    dims = list(range(x.ndim)) if not dim else [dim] if isinstance(dim, int) else list(dim)
    return aten.div(aten.sum(x, dims, keepdim, dtype=dtype), math.prod(x.shape[d] for d in dims))


@_decomposes(aten.linalg_vector_norm.default)
def _vector_norm(
    x: Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    if ord != 2:
        return NotImplemented
    x = x if dtype is None else x.to(dtype)
    dims = list(range(x.ndim)) if dim is None else [dim] if isinstance(dim, int) else list(dim)
    return aten.sqrt(aten.sum(x * x, dims, keepdim))


@_decomposes(aten.var.correction)
def _var(x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    dims = list(range(x.ndim)) if dim is None else [dim] if isinstance(dim, int) else list(dim)
    n = math.prod(x.shape[d] for d in dims)
    centred = x - aten.mean(x, dims, True)
    return aten.div(aten.sum(centred * centred, dims, keepdim), n - (1 if correction is None else correction))


@_decomposes(aten.logsumexp.default)
def _logsumexp(x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    dims = [dim] if isinstance(dim, int) else list(dim)
    peak = aten.amax(x, dims, True)
    out = peak + aten.log(aten.sum(aten.exp(x - peak), dims, True))
    return out if keepdim else aten.squeeze(out, dims)


@_decomposes(aten.where.ScalarOther)
def _where_scalar_other(condition: Tensor, x: Tensor, y: Any) -> Tensor:
    return aten.where(condition, x, _scalar_like(y, x))


@_decomposes(aten.where.ScalarSelf)
def _where_scalar_self(condition: Tensor, x: Any, y: Tensor) -> Tensor:
    return aten.where(condition, _scalar_like(x, y), y)


def _scalar_like(value: Any, like: Tensor) -> Tensor:
    dtype = torch.result_type(like, value)
    return aten.full([], value, dtype=dtype, device=like.device)


@_decomposes(aten.repeat.default)
def _repeat(x: Tensor, repeats: Sequence[int]) -> Tensor:
    shape = [*[1] * (len(repeats) - x.ndim), *x.shape]
    pairs = list(zip(repeats, shape, strict=True))
    apart = aten.view(x, [n for _, size in pairs for n in (1, size)])
    spread = aten.expand(apart, [n for pair in pairs for n in pair])
    return aten.reshape(spread, [r * size for r, size in pairs])


@_decomposes(aten.any.default, aten.any.dim, aten.any.dims)
def _any(x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    found = aten.amax((x != 0).to(torch.int32), [] if dim is None else [dim] if isinstance(dim, int) else dim, keepdim)
    return found != 0


@_decomposes(aten.all.default, aten.all.dim, aten.all.dims)
def _all(x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    found = aten.amin((x != 0).to(torch.int32), [] if dim is None else [dim] if isinstance(dim, int) else dim, keepdim)
    return found != 0


@_decomposes(aten.max.default)
def _max(x: Tensor) -> Tensor:
    return aten.amax(x)


@_decomposes(aten.min.default)
def _min(x: Tensor) -> Tensor:
    return aten.amin(x)


# --- look-ups ---------------------------------------------------------------------------------


@_decomposes(aten.index.Tensor)
def _index(x: Tensor, indices: Sequence[Tensor | None]) -> Any:
    """Indices without dims, among others with, get some: fake tensors infer a wrong shape for the mixture."""
    ranks = {index.ndim for index in indices if index is not None}
    if 0 not in ranks or len(ranks) == 1:
        return NotImplemented
    shape = [1] * max(ranks)
    return aten.index(x, [i.view(shape) if i is not None and i.ndim == 0 else i for i in indices])


@_decomposes(aten.index_put.default, aten._unsafe_index_put.default)
def _index_put(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Any:
    """Adding up is a sum, which a partial value passes through."""
    if not accumulate or any(i is not None and i.dtype == torch.bool for i in indices):
        return NotImplemented
    dims = [d for d, index in enumerate(indices) if index is not None]
    n_kept = x.ndim - len(dims)
    shapes = [index.shape for index in indices if index is not None]
    broadcast = torch.broadcast_shapes(*shapes)
    if values.ndim < n_kept + len(broadcast) or 1 in values.shape:
        at = dims[0] if dims == list(range(dims[0], dims[-1] + 1)) else 0
        kept = [n for d, n in enumerate(x.shape) if d not in dims]
        values = values.expand([*kept[:at], *broadcast, *kept[at:]])
    return x + torch.ops.megalith.index_sum(values, list(indices), list(x.shape))


@_decomposes(aten.index_add.default)
def _index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: Any = 1) -> Tensor:
    indices = [None] * (dim % max(x.ndim, 1)) + [index]
    source = source if alpha == 1 else source * alpha
    return x + torch.ops.megalith.index_sum(source, indices, list(x.shape))


# --- convolution ------------------------------------------------------------------------------


@_decomposes(aten.convolution.default)
def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Any:
    """The bias is added apart: once, whatever is contracted over several ranks."""
    if bias is None:
        return NotImplemented
    return aten.convolution(x, weight, None, *rest) + bias.view([-1] + [1] * (weight.ndim - 2))


@_decomposes(aten.convolution_backward.default)
def _convolution_backward(
    g: Tensor, x: Tensor, weight: Tensor, bias_sizes: Any, *rest: Any
) -> Any:
    *settings, mask = rest
    if not mask[2]:
        return NotImplemented
    bias = aten.sum(g, [0, *range(2, g.ndim)])
    if not mask[0] and not mask[1]:
        return None, None, bias
    gx, gw, _ = aten.convolution_backward(g, x, weight, None, *settings, [mask[0], mask[1], False])
    return gx, gw, bias


# --- softmax and losses over a vocabulary that may be sharded ----------------------------------


@_decomposes(aten._log_softmax.default)
def _log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    x = x.float() if half_to_float else x
    shifted = x - aten.amax(x, [dim], True)
    return shifted - aten.log(aten.sum(aten.exp(shifted), [dim], True))


@_decomposes(aten._log_softmax_backward_data.default)
def _log_softmax_backward(g: Tensor, out: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    return (g - aten.exp(out) * aten.sum(g, [dim], True)).to(dtype)


def _class_dim(x: Tensor) -> int:
    return 0 if x.ndim == 1 else 1


@_decomposes(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def _nll_loss(
    x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    dim = _class_dim(x)
    valid = target != ignore_index
    safe = torch.where(valid, target, 0)
    picked = -aten.gather(x, dim, safe.unsqueeze(dim)).squeeze(dim)
    w = valid.to(x.dtype) if weight is None else torch.where(valid, weight[safe], 0)
    loss = torch.where(valid, picked * w, 0)
    total = aten.sum(w)
    if reduction == 0:
        return loss, aten.full([], 0, dtype=x.dtype, device=x.device)
    return (aten.sum(loss) / total if reduction == 1 else aten.sum(loss)), total


@_decomposes(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def _nll_loss_backward(
    g: Tensor, x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int, total: Tensor
) -> Tensor:
    dim = _class_dim(x)
    valid = target != ignore_index
    safe = torch.where(valid, target, 0)
    w = valid.to(x.dtype) if weight is None else torch.where(valid, weight[safe], 0)
    scale = -(g / total if reduction == 1 else g) * w
    return aten.scatter_add(aten.zeros_like(x), dim, safe.unsqueeze(dim), scale.unsqueeze(dim))
