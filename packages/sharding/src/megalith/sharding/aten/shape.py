"""Ops that move or make elements without computing: permute, expand, slice, cat, factories."""

from __future__ import annotations

from megalith.sharding.graph import Node, TensorType
from megalith.sharding.rule import Rule, register_rule

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


def _along(node: Node, operands: tuple[TensorType, ...], outputs: tuple[TensorType, ...], dim: int) -> Rule:
    """All dims are batch but one, which is whole in every operand and output."""
    rank = len(outputs[0].shape)
    dim %= max(rank, 1)
    names = tuple(None if d == dim else f"d{d}" for d in range(rank))
    return Rule((names,) * len(operands), (names,) * len(outputs), linear=tuple(range(len(operands))))


def _slice(node: Node, operands: tuple[TensorType, ...], outputs: tuple[TensorType, ...]) -> Rule:
    return _along(node, operands, outputs, node.args[1] if len(node.args) > 1 else 0)


def _slice_backward(node: Node, operands: tuple[TensorType, ...], outputs: tuple[TensorType, ...]) -> Rule:
    return _along(node, operands, outputs, node.args[2])


def _cat(node: Node, operands: tuple[TensorType, ...], outputs: tuple[TensorType, ...]) -> Rule:
    return _along(node, operands, outputs, node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0))


def _factory(node: Node, operands: tuple[TensorType, ...], outputs: tuple[TensorType, ...]) -> Rule:
    return Rule((), tuple((None,) * len(t.shape) for t in outputs))


def _pad(node: Node, operands: tuple[TensorType, ...], outputs: tuple[TensorType, ...]) -> Rule:
    old, new = operands[0].shape, outputs[0].shape
    names = tuple(f"d{d}" if a == b else None for d, (a, b) in enumerate(zip(old, new, strict=True)))
    return Rule((names,), (names,), linear=(0,) if not (len(node.args) > 2 and node.args[2]) else ())


register_rule("aten.permute.default", _permute)
register_rule("aten.expand.default", _expand)
register_rule("aten.slice.Tensor", _slice)
register_rule("aten.slice_backward.default", _slice_backward)
register_rule("aten.cat.default", _cat)
register_rule("aten.constant_pad_nd.default", _pad)
register_rule("aten.full.default", _factory)
register_rule("aten.arange.start_step", _factory)
