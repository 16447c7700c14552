"""How do experts shard? By rows, by expert, and by the hidden dim; rows and experts over one axis too."""

from __future__ import annotations

from megalith.sharding.graph import Node, TensorType
from megalith.sharding.rule import Factors, Rule, register_rule

__all__: list[str] = []

Types = tuple[TensorType, ...]

# r rows, k choices of a row, e experts, d dim of a row, f hidden dim, o dim of the result
_BLOCKED = frozenset("kdo")


def _weights(number: int) -> tuple[Factors, ...]:
    return (*(("e", "f", "d"),) * (number - 1), ("e", "o", "f"))


def _experts(node: Node, operands: Types, outputs: Types) -> Rule:
    weights = _weights(len(operands) - 2)
    return Rule((("r", "d"), ("r", "k"), *weights), (("r", "k", "o"),), blocked=_BLOCKED, sent=("r", "e"))


def _experts_backward(node: Node, operands: Types, outputs: Types) -> Rule:
    weights = _weights(len(operands) - 3)
    ins = (("r", "k", "o"), ("r", "d"), ("r", "k"), *weights)
    return Rule(ins, (("r", "d"), *weights), blocked=_BLOCKED, sent=("r", "e"))


register_rule("megalith.experts.default", _experts)
register_rule("megalith.experts_backward.default", _experts_backward)
