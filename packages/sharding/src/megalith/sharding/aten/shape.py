"""Ops that move or make elements without computing: permute, expand, slice, cat, factories."""

from __future__ import annotations

from functools import partial
from typing import Any

from megalith.sharding.graph import Node, TensorType
from megalith.sharding.rule import Rule, register_rule
from megalith.sharding.views import cut, join, pad

__all__: list[str] = []


def _permute(node: Node, operands: tuple[TensorType, ...], outputs: tuple[TensorType, ...]) -> Rule:
    rank = len(operands[0].shape)
    names = tuple(f"d{d}" for d in range(rank))
    return Rule((names,), (tuple(names[d % rank] for d in node.args[1]),), linear=(0,))


def _expand(node: Node, operands: tuple[TensorType, ...], outputs: tuple[TensorType, ...]) -> Rule:
    shape, old = outputs[0].shape, operands[0].shape
    offset = len(shape) - len(old)
    names = tuple(f"d{d}" for d in range(len(shape)))
    source = tuple(names[offset + d] if n == shape[offset + d] else None for d, n in enumerate(old))
    return Rule((source,), (tuple(n if n in source else None for n in names),), linear=(0,))


def _along(
    operands: tuple[TensorType, ...], outputs: tuple[TensorType, ...], dim: int, recut: Any = None
) -> Rule:
    """All dims are batch but one, which is whole in every operand and output, or cut and joined where it lies."""
    rank = len(outputs[0].shape)
    dim %= max(rank, 1)
    names = tuple(None if d == dim else f"d{d}" for d in range(rank))
    linear = tuple(range(len(operands)))
    return Rule((names,) * len(operands), (names,) * len(outputs), linear=linear, at=dim, recut=recut)


def bounds(node: Node, size: int, first: int) -> tuple[int, int, int]:
    """Start, stop and step of a slice of a dim of this size, whose arguments begin at `first`."""
    start, stop, step = (*node.args[first:], None, None, None)[:3]
    return *slice(start, stop).indices(size)[:2], 1 if step is None else step


def _slice(node: Node, operands: tuple[TensorType, ...], outputs: tuple[TensorType, ...]) -> Rule:
    dim = node.args[1] if len(node.args) > 1 else 0
    start, stop, step = bounds(node, operands[0].shape[dim], 2)
    return _along(operands, outputs, dim, partial(cut, start, stop) if step == 1 else None)


def _slice_backward(node: Node, operands: tuple[TensorType, ...], outputs: tuple[TensorType, ...]) -> Rule:
    dim = node.args[2]
    size = outputs[0].shape[dim]
    start, stop, step = bounds(node, size, 3)
    return _along(operands, outputs, dim, partial(pad, start, size - stop) if step == 1 else None)


def _cat(node: Node, operands: tuple[TensorType, ...], outputs: tuple[TensorType, ...]) -> Rule:
    return _along(operands, outputs, node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0), join)


def _view_as_real(node: Node, operands: tuple[TensorType, ...], outputs: tuple[TensorType, ...]) -> Rule:
    names = tuple(f"d{d}" for d in range(len(operands[0].shape)))
    return Rule((names,), ((*names, None),), linear=(0,))


def _view_as_complex(node: Node, operands: tuple[TensorType, ...], outputs: tuple[TensorType, ...]) -> Rule:
    names = tuple(f"d{d}" for d in range(len(outputs[0].shape)))
    return Rule(((*names, None),), (names,), linear=(0,))


def _diagonal(node: Node, operands: tuple[TensorType, ...], outputs: tuple[TensorType, ...]) -> Rule:
    """Two dims are whole; their diagonal comes last."""
    rank = len(operands[0].shape)
    first = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim1", 0)
    second = node.args[3] if len(node.args) > 3 else node.kwargs.get("dim2", 1)
    names = tuple(None if d in (first % rank, second % rank) else f"d{d}" for d in range(rank))
    diagonal = (*(name for name in names if name is not None), None)
    return Rule((names,), (diagonal,), linear=(0,))


def _factory(node: Node, operands: tuple[TensorType, ...], outputs: tuple[TensorType, ...]) -> Rule:
    return Rule((), tuple((None,) * len(t.shape) for t in outputs))


def _pad(node: Node, operands: tuple[TensorType, ...], outputs: tuple[TensorType, ...]) -> Rule:
    padded = len(node.args[1]) // 2
    rank = len(outputs[0].shape)
    names = tuple(f"d{d}" if d < rank - padded else None for d in range(rank))
    return Rule((names,), (names,), linear=(0,) if not (len(node.args) > 2 and node.args[2]) else ())


register_rule("aten.permute.default", _permute)
register_rule("aten.expand.default", _expand)
register_rule("aten.slice.Tensor", _slice)
register_rule("aten.slice_backward.default", _slice_backward)
register_rule("aten.cat.default", _cat)
register_rule("aten.constant_pad_nd.default", _pad)
register_rule("aten.view_as_real.default", _view_as_real)
register_rule("aten.view_as_complex.default", _view_as_complex)
register_rule("aten.diagonal.default", _diagonal)
register_rule("aten.full.default", _factory)
register_rule("aten.arange.start_step", _factory)
