"""How are experts split? Whole ones over an axis: the first dim of the parameters that stack them."""

from __future__ import annotations

from dataclasses import replace

from megalith.sharding.recipes.names import Shapes
from megalith.sharding.recipes.table import Leaf, Recipe, Specs, split_dim

__all__ = ["expert_parallel"]


def expert_parallel(axis: str = "ep") -> Recipe:
    """Splits experts that are stacked in one parameter, `expert ...`, by expert.

    They are those in a module called `experts`. Where none is called so: parameters of one module that are matrices
    `expert m n` and `expert n m`; one of them may be two in one, gate and up.

    Args:
        axis: the mesh axis, or several.

    Raises:
        ValueError: no stacked experts.

    >>> from megalith.sharding.recipes import specs_for
    >>> shapes = {"gate.weight": (4, 8), "experts.gate_up_proj": (4, 32, 8), "experts.down_proj": (4, 8, 16)}
    >>> print(specs_for(shapes, None, expert_parallel("ep")))
    gate.weight           d0 d1
    experts.gate_up_proj  (ep d0) d1 d2
    experts.down_proj     (ep d0) d1 d2
    """

    def recipe(specs: Specs) -> Specs:
        stacked = stacked_experts({name: leaf.shape for name, leaf in specs.params.items()})
        if not stacked:
            shown = ", ".join(map(repr, list(specs.params)[:5])) or "none"
            raise ValueError(
                f"expert_parallel({axis!r}) finds no stacked experts among {shown}; stack the weights of all experts "
                "in one parameter `expert ...` of a module called 'experts'"
            )

        def split(name: str, leaf: Leaf) -> Leaf:
            return replace(leaf, used=split_dim(leaf.used, 0, axis)) if name in stacked else leaf

        return specs.map_params(split)

    return recipe


def stacked_experts(shapes: Shapes) -> set[str]:
    """The parameters whose first dim is for experts."""
    named = {name for name, shape in shapes.items() if "experts" in name.split(".")[:-1] and len(shape) == 3}
    if named:
        n_experts = {(_module(name), shapes[name][0]) for name in named}  # their biases are `expert n`
        return {name for name, shape in shapes.items() if shape and (_module(name), shape[0]) in n_experts}
    stacks = {name: shape for name, shape in shapes.items() if len(shape) == 3}
    return {a for a in stacks for b in stacks if _module(a) == _module(b) and _lead_back(stacks[a], stacks[b])}


def _lead_back(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether `expert m n` and `expert n m`: one of them may be two in one."""
    pairs = zip(one, (other[0], other[2], other[1]), strict=True)
    first, *ratios = [max(pair) / min(pair) for pair in pairs]
    return first == 1 and sorted(ratios) in ([1, 1], [1, 2])


def _module(name: str) -> str:
    return name.rpartition(".")[0]
