"""Products of matrices, attention, convolution, pooling."""

from __future__ import annotations

from dataclasses import replace

from megalith.sharding.graph import Node, Ref, TensorType
from megalith.sharding.rule import Rule, parse_rule, register_rule

__all__: list[str] = []

TABLE = {
    "aten.mm.default": "m k, k n -> m n",
    "aten.bmm.default": "b m k, b k n -> b m n",
    "aten.mv.default": "m k, k -> m",
    "aten.dot.default": "k, k -> ",
}

for _op, _rule in TABLE.items():
    register_rule(_op, _rule)

Types = tuple[TensorType, ...]


def _mask(t: TensorType, scores: tuple[int, ...]) -> str:
    """The dims of an attention mask: `b h q k`, each possibly of size one, leading ones possibly absent.

    Its columns are whole even where keys are sharded: each rank meets all keys in turn.
    """
    names = ["b", "h", "q", "column!"][4 - len(t.shape) :]
    sizes = scores[4 - len(t.shape) :]
    return " ".join("_" if n == 1 and size != 1 else name for name, n, size in zip(names, t.shape, sizes, strict=True))


def _sdpa(node: Node, operands: Types, outputs: Types) -> Rule:
    scores = (*operands[0].shape[:3], operands[1].shape[2])
    mask = f", {_mask(operands[3], scores)}" if len(operands) > 3 else ""
    rule = parse_rule(f"b h q d!, b h k! d!, b h k! v!{mask} -> b h q v!, b h q")
    return replace(rule, ring=((0, 2), (1, 2), (2, 2)))


def _sdpa_backward(node: Node, operands: Types, outputs: Types) -> Rule:
    scores = (*operands[1].shape[:3], operands[2].shape[2])
    mask = f", {_mask(operands[4], scores)}" if len(operands) > 6 else ""
    rule = parse_rule(
        f"b h q v!, b h q d!, b h k! d!, b h k! v!{mask}, b h q v!, b h q -> b h q d!, b h k! d!, b h k! v!"
    )
    return replace(rule, ring=((1, 2), (2, 2), (3, 2)))


register_rule("megalith.sdpa.default", _sdpa)
register_rule("megalith.sdpa_backward.default", _sdpa_backward)


def _spatial(rank: int) -> str:
    return "_ " * (rank - 2)


def _convolution(node: Node, operands: Types, outputs: Types) -> Rule:
    """Channels are contracted; in groups they are whole. Spatial dims are whole; the bias is added apart."""
    assert not isinstance(node.args[2], Ref), "the bias of a convolution is decomposed into a sum"
    transposed, groups = node.args[6], node.args[8]
    s = _spatial(len(operands[0].shape))
    c, o = ("c", "o") if groups == 1 else ("_", "_")
    weight = f"{c} {o}" if transposed else f"{o} {c}"
    return parse_rule(f"b {c} {s}, {weight} {s} -> b {o} {s}")


def _convolution_backward(node: Node, operands: Types, outputs: Types) -> Rule:
    transposed, groups, mask = node.args[7], node.args[9], node.args[10]
    s = _spatial(len(operands[1].shape))
    c, o = ("c", "o") if groups == 1 else ("_", "_")
    weight = f"{c} {o} {s}" if transposed else f"{o} {c} {s}"
    outs = [f"b {c} {s}"] * mask[0] + [weight] * mask[1]
    return parse_rule(f"b {o} {s}, b {c} {s}, {weight} -> {', '.join(outs)}")


register_rule("aten.convolution.default", _convolution)
register_rule("aten.convolution_backward.default", _convolution_backward)


def _pooling(n_spatial: int):  # type: ignore[no-untyped-def]
    def rule(node: Node, operands: Types, outputs: Types) -> Rule:
        def factors(t: TensorType) -> tuple[str | None, ...]:
            kept = len(t.shape) - n_spatial
            return tuple(f"d{d}" if d < kept else None for d in range(len(t.shape)))

        return Rule(tuple(map(factors, operands)), tuple(map(factors, outputs)))

    return rule


for _op in """
    max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d avg_pool2d_backward _adaptive_avg_pool2d
    _adaptive_avg_pool2d_backward
""".split():
    register_rule(f"aten.{_op}.default", _pooling(2))
