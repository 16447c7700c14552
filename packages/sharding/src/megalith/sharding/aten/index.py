"""Ops in which one operand holds indices into a dim of another.

The indexed dim may be sharded in contiguous blocks: each rank looks up what it holds, the rest counts as zero,
and the result is a partial sum.
"""

from __future__ import annotations

from dataclasses import replace

from megalith.sharding.graph import Node, TensorType
from megalith.sharding.rule import Rule, register_rule

__all__: list[str] = []


def _names(prefix: str, rank: int) -> tuple[str, ...]:
    return tuple(f"{prefix}{d}" for d in range(rank))


def _embedding(node: Node, operands: tuple[TensorType, ...], outputs: tuple[TensorType, ...]) -> Rule:
    ids = _names("i", len(operands[1].shape))
    return Rule((("v", "e"), ids), ((*ids, "e"),), indexed=frozenset("v"))


def _embedding_backward(node: Node, operands: tuple[TensorType, ...], outputs: tuple[TensorType, ...]) -> Rule:
    ids = _names("i", len(operands[1].shape))
    return Rule(((*ids, "e"), ids), (("v", "e"),), indexed=frozenset("v"))


def _gather(node: Node, operands: tuple[TensorType, ...], outputs: tuple[TensorType, ...]) -> Rule:
    dim = node.args[1] % max(len(operands[0].shape), 1)
    x, index = (
        tuple("v" if d == dim else f"d{d}" for d in range(len(operands[0].shape))),
        tuple("k" if d == dim else f"d{d}" for d in range(len(operands[1].shape))),
    )
    rule = Rule((x, index), (index,), indexed=frozenset("v"))
    return replace(rule, blocked=_unequal(operands[0], operands[1], dim))


def _scatter(node: Node, operands: tuple[TensorType, ...], outputs: tuple[TensorType, ...]) -> Rule:
    dim = node.args[1] % max(len(operands[0].shape), 1)
    x = tuple("v" if d == dim else f"d{d}" for d in range(len(operands[0].shape)))
    index = tuple("k" if d == dim else f"d{d}" for d in range(len(operands[1].shape)))
    blocked = _unequal(operands[0], operands[1], dim) | {"k"}
    return Rule((x, *(index,) * (len(operands) - 1)), (x,), indexed=frozenset("v"), blocked=blocked)


def _unequal(x: TensorType, index: TensorType, dim: int) -> frozenset[str]:
    pairs = enumerate(zip(x.shape, index.shape, strict=True))
    return frozenset(f"d{d}" for d, (a, b) in pairs if d != dim and a != b)


register_rule("aten.embedding.default", _embedding)
register_rule("aten.embedding_dense_backward.default", _embedding_backward)
register_rule("aten.gather.default", _gather)
register_rule("aten.scatter_add.default", _scatter)
