"""Ops in which one operand holds indices into a dim of another.

The indexed dim may be sharded in contiguous blocks: each rank looks up what it holds, the rest counts as zero,
and the result is a partial sum.
"""

from __future__ import annotations

import torch

from megalith.sharding.graph import Node, Ref, TensorType
from megalith.sharding.rule import Rule, register_rule

__all__: list[str] = []

Types = tuple[TensorType, ...]


def _names(prefix: str, rank: int) -> tuple[str, ...]:
    return tuple(f"{prefix}{d}" for d in range(rank))


def _embedding(node: Node, operands: Types, outputs: Types) -> Rule:
    ids = _names("i", len(operands[1].shape))
    return Rule((("v", "e"), ids), ((*ids, "e"),), indexed=frozenset("v"))


def _embedding_backward(node: Node, operands: Types, outputs: Types) -> Rule:
    ids = _names("i", len(operands[1].shape))
    # Scaled by how often an id occurs: all ids have to be counted.
    blocked = frozenset(ids) if node.args[4] else frozenset()
    return Rule(((*ids, "e"), ids), (("v", "e"),), indexed=frozenset("v"), blocked=blocked)


def _gather(node: Node, operands: Types, outputs: Types) -> Rule:
    batch, dim = _batch(node.args[1], operands)
    x, index = (tuple(f if d == dim else b for d, b in enumerate(batch)) for f in ("v", "k"))
    return Rule((x, index), (index,), indexed=frozenset("v"), blocked=_boolean(operands[0], "v"))


def _scatter(node: Node, operands: Types, outputs: Types) -> Rule:
    """Adds into a dim of which each rank holds a block."""
    batch, dim = _batch(node.args[1], operands)
    x = tuple("v" if d == dim else b for d, b in enumerate(batch))
    return Rule((x, *(batch,) * (len(operands) - 1)), (x,), indexed=frozenset("v"))


def _overwrite(node: Node, operands: Types, outputs: Types) -> Rule:
    """Writes into a dim that is whole."""
    batch, _ = _batch(node.args[1], operands)
    return Rule((batch,) * len(operands), (batch,))


def _batch(dim: int, operands: Types) -> tuple[tuple[str | None, ...], int]:
    """A factor for each dim but the indexed one; none where an operand is shorter: only a whole dim is cut there."""
    shapes = [t.shape for t in operands]
    dim %= max(len(shapes[0]), 1)
    alike = [len({shape[d] for shape in shapes}) == 1 for d in range(len(shapes[0]))]
    return tuple(f"d{d}" if same and d != dim else None for d, same in enumerate(alike)), dim


def _boolean(x: TensorType, name: str) -> frozenset[str]:
    """A dim of booleans is looked up whole: they are no terms of a sum."""
    return frozenset({name}) if x.dtype == torch.bool else frozenset()


def _index_select(node: Node, operands: Types, outputs: Types) -> Rule:
    dim = node.args[1] % max(len(operands[0].shape), 1)
    x = tuple("v" if d == dim else f"d{d}" for d in range(len(operands[0].shape)))
    index = ("k",) if operands[1].shape else ()
    picked = "k" if index else None
    out = tuple(picked if d == dim else f"d{d}" for d in range(len(operands[0].shape)))
    return Rule((x, index), (out,), indexed=frozenset("v"), blocked=_boolean(operands[0], "v"))


def index_dims(indices: object, shapes: list[tuple[int, ...]], rank: int) -> tuple[list[int], int, int]:
    """Of `x[indices]`: the dims of x that are indexed, where the dims of the indices come out, and how many these are.

    Args:
        indices: as `aten.index` takes them, with None for a dim that is taken whole.
        shapes: of the indices that are there.
        rank: of x.
    """
    assert isinstance(indices, (list, tuple))
    dims = [d for d, index in enumerate(indices) if index is not None]
    together = dims == list(range(dims[0], dims[-1] + 1))
    return dims, dims[0] if together else 0, len(torch.broadcast_shapes(*shapes))


def _index_parts(indices: object, x_rank: int, types: Types) -> tuple[tuple[str | None, ...], ...]:
    """Factors of x, of each index, and of the result of `x[indices]`."""
    shapes = [t.shape for t in types]
    dims, at, n = index_dims(indices, shapes, x_rank)
    broadcast = torch.broadcast_shapes(*shapes)
    x = tuple(f"v{d}" if d in dims else f"d{d}" for d in range(x_rank))
    factors = tuple(
        tuple(
            None if size == 1 and broadcast[n - len(s) + d] != 1 else f"i{n - len(s) + d}" for d, size in enumerate(s)
        )
        for s in shapes
    )
    kept = [f for f in x if f[0] == "d"]
    return x, *factors, (*kept[:at], *_names("i", n), *kept[at:])


def _index(node: Node, operands: Types, outputs: Types) -> Rule:
    x, *indices, out = _index_parts(node.args[1], len(operands[0].shape), operands[1:])
    looked_up = frozenset(f for f in x if f is not None and f[0] == "v")
    blocked = looked_up if operands[0].dtype == torch.bool else frozenset()
    return Rule((x, *indices), (out,), indexed=looked_up, blocked=blocked)


def _index_sum(node: Node, operands: Types, outputs: Types) -> Rule:
    """The transpose of a look-up: values are added up where they were taken from."""
    x, *indices, values = _index_parts(node.args[1], len(outputs[0].shape), operands[1:])
    return Rule((values, *indices), (x,), indexed=frozenset(f for f in x if f is not None and f[0] == "v"))


def _index_put(node: Node, operands: Types, outputs: Types) -> Rule:
    """Overwrites: what is indexed, and the indices, are whole."""
    refs = [r for r in node.args[1] if isinstance(r, Ref)]
    x, *indices, values = _index_parts(node.args[1], len(operands[0].shape), operands[1 : 1 + len(refs)])
    sizes = dict(zip(x, outputs[0].shape, strict=True))
    for factors, t in zip(indices, operands[1:], strict=False):
        sizes.update(zip(factors, t.shape, strict=True))
    given = operands[-1].shape
    written = values[len(values) - len(given) :]  # aligned from the right, broadcast where of size one
    values = tuple(f if sizes.get(f, n) == n else None for f, n in zip(written, given, strict=True))
    blocked = frozenset(f for f in (*x, *(f for i in indices for f in i), *values) if f is not None and f[0] in "vi")
    return Rule((x, *indices, values), (x,), blocked=blocked)


register_rule("aten.embedding.default", _embedding)
register_rule("aten.embedding_dense_backward.default", _embedding_backward)
register_rule("aten.gather.default", _gather)
register_rule("aten.scatter_add.default", _scatter)
register_rule("aten.scatter.src", _overwrite)
register_rule("aten.scatter.value", _overwrite)
register_rule("aten.index_select.default", _index_select)
register_rule("aten.index.Tensor", _index)
register_rule("megalith.index_sum.default", _index_sum)
register_rule("aten.index_put.default", _index_put)
