"""Products of matrices, attention, convolution."""

from __future__ import annotations

from megalith.sharding.graph import Node, TensorType
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


def _mask(t: TensorType, q: tuple[int, ...]) -> str:
    """The dims of an attention mask: `b h q k`, each possibly of size one, leading ones possibly absent."""
    names = ["b", "h", "q", "k!"][4 - len(t.shape) :]
    sizes = [q[0], q[1], q[2], -1][4 - len(t.shape) :]
    return " ".join("_" if n == 1 and size != 1 else name for name, n, size in zip(names, t.shape, sizes, strict=True))


def _sdpa(node: Node, operands: tuple[TensorType, ...], outputs: tuple[TensorType, ...]) -> Rule:
    causal = node.args[4]
    q = "q!" if causal else "q"
    mask = f", {_mask(operands[3], operands[0].shape)}" if len(operands) > 3 else ""
    return parse_rule(f"b h {q} d!, b h k! d!, b h k! v!{mask} -> b h {q} v!, b h {q}")


def _sdpa_backward(node: Node, operands: tuple[TensorType, ...], outputs: tuple[TensorType, ...]) -> Rule:
    causal = node.args[7]
    q = "q!" if causal else "q"
    mask = f", {_mask(operands[4], operands[1].shape)}" if len(operands) > 6 else ""
    return parse_rule(
        f"b h {q} v!, b h {q} d!, b h k! d!, b h k! v!{mask}, b h {q} v!, b h {q} "
        f"-> b h {q} d!, b h k! d!, b h k! v!"
    )


register_rule("megalith.sdpa.default", _sdpa)
register_rule("megalith.sdpa_backward.default", _sdpa_backward)
