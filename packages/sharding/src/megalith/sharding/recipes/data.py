"""How is a batch split? Data parallelism: its first dim over one axis, or over several."""

from __future__ import annotations

from dataclasses import replace

from megalith.sharding.recipes.table import Leaf, Recipe, Specs, split_dim

__all__ = ["data_parallel"]


def data_parallel(axis: str = "dp") -> Recipe:
    """Splits the first dim of every input; each gradient is then summed over the axis, by one all-reduce.

    A rank receives 2 (n - 1) / n bytes for each byte of parameters, n the size of the axis.

    Args:
        axis: the mesh axis, or several, major to minor: `"rep dp"`. Scalars are replicated.

    >>> from megalith.sharding.recipes import specs_for
    >>> print(specs_for({"w": (4, 8)}, {"input_ids": (4, 16), "weights": (4,)}, data_parallel("rep dp")))
    w          d0 d1
    input_ids  (rep dp d0) d1
    weights    (rep dp d0)
    """

    def split(_: str, leaf: Leaf) -> Leaf:
        return replace(leaf, used=split_dim(leaf.used, 0, axis)) if leaf.shape else leaf

    def recipe(specs: Specs) -> Specs:
        return specs.map_inputs(split).cutting("batch", axis)

    return recipe
