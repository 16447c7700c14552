"""Which dims of an op's operands belong together? Its rule: a string of factors, looked up in tables by op name.

    "m k, k n -> m n"          a matrix product: `k` is in no output, so what is sharded over it leaves a partial sum
    "b s e!, e! -> b s e!"     `e!` must be whole on every rank
    "max: b v -> b"            a contracted factor leaves a partial maximum
    "b s _ -> b s e"           `_` is a dim of size one that is broadcast, or one that no other dim belongs to
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from megalith.sharding.graph import Node, TensorType
from megalith.sharding.layout import Dim

__all__ = ["MissingRule", "Rule", "RuleMaker", "has_rule", "known_rules", "parse_rule", "register_rule", "rule_of"]

Factors = tuple[str | None, ...]


@dataclass(frozen=True)
class Rule:
    """How an op's dims hang together.

    Args:
        operands: per tensor operand, per dim, its factor; None for a dim that is whole or broadcast.
        outputs: likewise.
        blocked: factors that must not be sharded.
        reduce: what a sharded factor leaves in an output that lacks it: "sum", "max" or "min".
        linear: operands through which partial sums pass. If more than one, all of them have to be partial alike.
        indexed: factors into which another operand holds indices; they are sharded only in contiguous blocks.
        at: the dim, named by no factor, that `recut` is about.
        recut: of an op that cuts or joins a dim: this dim of the output from this dim of the operands, where each rank
            can make its shard alone; else None, and the dim is whole.
        sent: two factors, of what travels and of the places it goes to (rows and experts): they may be cut over the
            same axes, and each piece travels to the rank that holds its place.
        ring: pairs `(operand, dim)`: where these dims are sharded alike they stay so, blocked or not, and the ranks
            pass their blocks around a ring until each has met all; no partial sum is left.
    """

    operands: tuple[Factors, ...]
    outputs: tuple[Factors, ...]
    blocked: frozenset[str] = frozenset()
    reduce: str = "sum"
    linear: tuple[int, ...] = ()
    indexed: frozenset[str] = frozenset()
    at: int = 0
    recut: Callable[[tuple[Dim, ...]], Dim | None] | None = None
    sent: tuple[str, str] | None = None
    ring: tuple[tuple[int, int], ...] = ()


RuleMaker = Callable[[Node, tuple[TensorType, ...], tuple[TensorType, ...]], "Rule | str"]

_rules: dict[str, RuleMaker | str] = {}


class MissingRule(NotImplementedError):
    """An op that no table knows."""


def register_rule(op: str, rule: RuleMaker | str) -> None:
    """Adds the rule of an op.

    Args:
        op: its name, `"namespace.name.overload"`, such as `"aten.mm.default"`.
        rule: the rule as a string; or a function of the node, its operands' types and its outputs' types.

    Raises:
        ValueError: the op has a rule already, or the string does not parse.
    """
    if op in _rules:
        raise ValueError(f"op {op} has a rule already: {_rules[op]!r}")
    if isinstance(rule, str):
        parse_rule(rule)
    _rules[op] = rule


def rule_of(node: Node, operands: tuple[TensorType, ...], outputs: tuple[TensorType, ...]) -> Rule:
    """The rule of a node.

    Raises:
        MissingRule: no table knows the op; the message says how to add it.
    """
    known = _rules.get(node.name)
    if known is None:
        raise MissingRule(
            f"no rule says how {node.name} shards (operands {', '.join(map(repr, operands))}; at "
            f"{node.origin.source or 'an unknown line'} in {node.origin.module or 'the program'}). Add one with "
            f'register_rule("{node.name}", "{_example(operands, outputs)}"), a factor for each dim, the same letter '
            "where dims belong together, or run the code on local shards with local_map"
        )
    rule = known if isinstance(known, str) else known(node, operands, outputs)
    return parse_rule(rule) if isinstance(rule, str) else rule


def _example(operands: tuple[TensorType, ...], outputs: tuple[TensorType, ...]) -> str:
    """A rule of the right form for an op nobody knows: dims of one size get one letter."""
    letters: dict[int, str] = {}

    def name(n: int) -> str:
        return letters.setdefault(n, "abcdefghijklmnopqrstuvwxyz"[len(letters) % 26])

    left, right = (", ".join(" ".join(map(name, t.shape)) for t in side) for side in (operands, outputs))
    return f"{left} -> {right}"


@lru_cache(maxsize=4096)
def parse_rule(text: str) -> Rule:
    """A rule from its string form.

    >>> parse_rule("b m k!, b k! n -> b m n").blocked
    frozenset({'k'})
    """
    body, reduce = text, "sum"
    for op in ("sum", "max", "min"):
        if text.startswith(f"{op}:"):
            body, reduce = text.removeprefix(f"{op}:"), op
    left, arrow, right = body.partition("->")
    if not arrow:
        raise ValueError(f"rule {text!r} has no '->'; write it as 'm k, k n -> m n'")
    blocked: set[str] = set()

    def side(part: str) -> tuple[Factors, ...]:
        found = []
        for term in part.split(","):
            names: list[str | None] = []
            for word in term.split():
                if word.endswith("!"):
                    blocked.add(word[:-1])
                names.append(None if word == "_" else word.rstrip("!"))
            found.append(tuple(names))
        return tuple(found)

    operands = side(left) if left.strip() else ()
    return Rule(operands, side(right), reduce=reduce, blocked=frozenset(blocked))


def has_rule(op: str) -> bool:
    """Whether a table knows an op, by name."""
    return op in _rules


def known_rules() -> Mapping[str, Any]:
    """All rules by op name."""
    return dict(_rules)
