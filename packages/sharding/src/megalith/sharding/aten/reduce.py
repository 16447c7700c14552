"""Reductions over some dims, and ops that need a dim whole."""

from __future__ import annotations

from typing import Any

from megalith.sharding.graph import Node, TensorType
from megalith.sharding.rule import Rule, register_rule

__all__ = ["reduction", "whole_dim"]


def dims_of(argument: Any, rank: int) -> tuple[int, ...]:
    """The dims that an op's `dim` argument names, non-negative; none or an empty list names all."""
    if argument is None or argument == [] or argument == ():
        return tuple(range(rank))
    chosen = [argument] if isinstance(argument, int) else argument
    return tuple(sorted(d % rank for d in chosen)) if rank else ()


def reduction(op: str, linear: bool = False) -> Any:
    """The rule of a reduction `op(x, dims, keepdim)`: what is sharded leaves a partial sum, maximum or minimum."""

    def rule(node: Node, operands: tuple[TensorType, ...], outputs: tuple[TensorType, ...]) -> Rule:
        rank = len(operands[0].shape)
        argument = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
        gone = dims_of(argument, rank)
        kept = len(outputs[0].shape) == rank
        names = tuple(f"d{d}" for d in range(rank))
        out = tuple(None if d in gone else name for d, name in enumerate(names) if kept or d not in gone)
        return Rule((names,), (out,), reduce=op, linear=(0,) if linear else ())

    return rule


def whole_dim(position: int, keyword: str = "dim", default: Any = -1) -> Any:
    """The rule of an op that works along some dims, such as a softmax: these are whole, the others are batch.

    Outputs may be of another size in those dims, or without them.

    Args:
        position: where in the op's arguments the dims are.
        keyword: their name as a keyword argument.
        default: the dims if none are given; None for all.
    """

    def rule(node: Node, operands: tuple[TensorType, ...], outputs: tuple[TensorType, ...]) -> Rule:
        rank = len(operands[0].shape)
        argument = node.args[position] if len(node.args) > position else node.kwargs.get(keyword, default)
        worked = dims_of(argument, rank)
        names = tuple(None if d in worked else f"d{d}" for d in range(rank))
        kept = tuple(name for name in names if name is not None)
        return Rule((names,) * len(operands), tuple(names if len(t.shape) == rank else kept for t in outputs))

    return rule


for _name, _op, _linear in [
    ("sum.default", "sum", True),
    ("sum.dim_IntList", "sum", True),
    ("amax.default", "max", False),
    ("amin.default", "min", False),
]:
    register_rule(f"aten.{_name}", reduction(_op, _linear))

for _name, _position in [
    ("_softmax.default", 1),
    ("_softmax_backward_data.default", 2),
    ("_safe_softmax.default", 1),
    ("cumsum.default", 1),
    ("cumprod.default", 1),
    ("logcumsumexp.default", 1),
    ("sort.default", 1),
    ("sort.stable", 99),  # its dim is a keyword
    ("topk.default", 2),
    ("kthvalue.default", 2),
    ("max.dim", 1),
    ("min.dim", 1),
    ("median.dim", 1),
    ("prod.dim_int", 1),
    ("flip.default", 1),
]:
    register_rule(f"aten.{_name}", whole_dim(_position))
for _name, _position in [
    ("argmax.default", 1),
    ("argmin.default", 1),
    ("linalg_vector_norm.default", 2),
    ("roll.default", 2),
    ("prod.default", 99),
]:
    register_rule(f"aten.{_name}", whole_dim(_position, default=None))


def _triangle(node: Node, operands: tuple[TensorType, ...], outputs: tuple[TensorType, ...]) -> Rule:
    rank = len(operands[0].shape)
    names = tuple(f"d{d}" if d < rank - 2 else None for d in range(rank))
    return Rule((names,), (names,), linear=(0,))


for _name in ("tril", "triu"):
    register_rule(f"aten.{_name}.default", _triangle)
