"""How are the matrices of each layer split? Tensor parallelism, by the names and shapes of a model's parameters."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from megalith.sharding.recipes.grid import grid_2d, grid_3d, grid_25d
from megalith.sharding.recipes.heads import Heads
from megalith.sharding.recipes.names import megatron
from megalith.sharding.recipes.table import Dims, Leaf, Recipe, Specs, split_dim

__all__ = ["one_dim", "tensor_parallel"]


def tensor_parallel(
    axis: str = "tp", kind: str = "1d", *, heads: int = 0, kv_heads: int = 0, kv_axis: str | None = None
) -> Recipe:
    """Splits the matrices of each layer over a mesh axis.

    `"1d"` is Megatron's layout (Shoeybi et al., arXiv:1909.08053): the first matrix of attention and of the MLP by its
    outputs, the second by its inputs, embeddings and the head by vocabulary, experts by their hidden dim. Each of
    attention and MLP then has one all-reduce forward and one backward. What a matrix is, tables say by its name; for
    names that no table knows, its shape and its siblings' do. Norms, and what stays unknown, are replicated.

    Args:
        axis: the mesh axis; for the other kinds their axes, with blanks between.
        kind: `"1d"`; `"2d"`, `"2.5d"` or `"3d"` for `grid_2d`, `grid_25d`, `grid_3d`, which split activations too.
        heads, kv_heads: how many heads of queries, and of keys and values (by default as many), as a model's config has
            them. Then heads are never cut, and where they do not divide the axis, a rank holds the queries of its keys.
        kv_axis: with fewer heads of keys and values than ranks: the part of the axis that splits them, `kv` of
            `Mesh("tp=(kv=2 rep=2)")`.

    Raises:
        ValueError: another kind or number of axes, head counts that do not fit together, or parameters that are split
            at rest already.

    >>> from megalith.sharding.recipes import specs_for
    >>> shapes = {"h.0.q_proj.weight": (576, 576), "h.0.k_proj.weight": (192, 576), "h.0.o_proj.weight": (576, 576)}
    >>> print(specs_for(shapes, None, tensor_parallel("tp")))
    h.*.q_proj.weight  (tp heads) embed
    h.*.k_proj.weight  (tp kv_heads) embed
    h.*.o_proj.weight  embed (tp heads)
    >>> print(specs_for(shapes, None, tensor_parallel("tp", heads=9, kv_heads=3)))
    h.*.q_proj.weight  (tp kv_heads 3 64) embed
    h.*.k_proj.weight  (tp kv_heads 64) embed
    h.*.o_proj.weight  embed (tp kv_heads 3 64)
    """
    if kind not in _KINDS:
        raise ValueError(f"tensor_parallel kind={kind!r}: write one of {', '.join(map(repr, _KINDS))}")
    return _KINDS[kind](axis, Heads(heads, kv_heads or heads, kv_axis))


def one_dim(axis: str, heads: Heads) -> Recipe:
    """Megatron's layout, over one axis."""

    def recipe(specs: Specs) -> Specs:
        layouts = megatron({name: leaf.shape for name, leaf in specs.params.items()}, heads)

        def split(name: str, leaf: Leaf) -> Leaf:
            if leaf.rest != leaf.used or leaf.grad is not None or leaf.state is not None:
                raise ValueError(
                    f"{name!r} is split at rest already, and tensor_parallel({axis!r}) says how it computes; apply "
                    "zero last"
                )
            dims = layouts.get(name)
            if dims is None:
                return leaf
            return replace(leaf, used=_over(leaf.used, dims, axis))

        return specs.map_params(split).cutting("heads", axis)

    return recipe


def _grid(grid: Callable[..., Recipe], kind: str, names: str) -> Callable[[str, Heads], Recipe]:
    """A grid by its axes in one text."""

    def recipe(axis: str, heads: Heads) -> Recipe:
        axes = axis.split()
        if len(axes) != len(names.split()):
            raise ValueError(
                f"tensor_parallel({axis!r}, kind={kind!r}): this kind has {len(names.split())} axes; write their names "
                f"with blanks between: {names!r}"
            )
        return grid(*axes, heads)

    return recipe


_KINDS: dict[str, Callable[[str, Heads], Recipe]] = {
    "1d": one_dim,
    "2d": _grid(grid_2d, "2d", "row col"),
    "2.5d": _grid(grid_25d, "2.5d", "dep row col"),
    "3d": _grid(grid_3d, "3d", "i j k"),
}


def _over(before: Dims, dims: Dims, axis: str) -> Dims:
    """A layout over `tp` on top of one that has other axes already."""
    found = tuple(re.sub(r"\btp\b", axis, dim) for dim in dims)
    for at, dim in enumerate(before):
        if dim.startswith("("):
            cut = split_dim(before, at, axis) if found[at].startswith("(") else before
            found = (*found[:at], cut[at], *found[at + 1 :])
    return found
