"""Normalisations that stay one op."""

from __future__ import annotations

from megalith.sharding.graph import Node, TensorType
from megalith.sharding.rule import Rule, register_rule

__all__: list[str] = []


def _split(rank: int, n_normalized: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    batch = tuple(f"d{d}" for d in range(rank - n_normalized))
    return batch, tuple(f"e{d}" for d in range(n_normalized))


def _layer_norm(node: Node, operands: tuple[TensorType, ...], outputs: tuple[TensorType, ...]) -> Rule:
    batch, inner = _split(len(operands[0].shape), len(node.args[1]))
    stats = batch + (None,) * len(inner)
    return Rule(
        (batch + inner, *(inner,) * (len(operands) - 1)), (batch + inner, stats, stats), blocked=frozenset(inner)
    )


def _layer_norm_backward(node: Node, operands: tuple[TensorType, ...], outputs: tuple[TensorType, ...]) -> Rule:
    batch, inner = _split(len(operands[0].shape), len(node.args[2]))
    stats = batch + (None,) * len(inner)
    ins = (batch + inner, batch + inner, stats, stats, *(inner,) * (len(operands) - 4))
    mask = node.args[7]
    outs = (batch + inner,) * mask[0] + (inner,) * (mask[1] + mask[2])
    return Rule(ins, outs, blocked=frozenset(inner))


register_rule("aten.native_layer_norm.default", _layer_norm)
register_rule("aten.native_layer_norm_backward.default", _layer_norm_backward)
