"""How are replicas of parameters, gradients and optimizer state avoided? ZeRO: split at rest, gathered at use."""

from __future__ import annotations

from dataclasses import replace

from megalith.sharding.recipes.table import Dims, Leaf, Recipe, Specs, split_dim

__all__ = ["zero"]


def zero(stage: int, axis: str = "dp") -> Recipe:
    """Splits what data parallelism replicates (Rajbhandari et al., arXiv:1910.02054).

    Stage 1 splits the optimizer's state, stage 2 the gradients too, stage 3 the parameters at rest. For each byte of
    parameters a rank receives 2 (n - 1) / n bytes in stages 1 and 2, as without, and 3 (n - 1) / n in stage 3, n the
    size of the axis. It comes last, after the recipes that say how a parameter computes. Scalars stay whole.

    **Hybrid**, shards in a node and replicas between nodes: `data_parallel("rep dp")`, then `zero(3, "dp")`. Of s ranks
    in a node and r nodes a rank receives 3 (s - 1) / s + 2 (r - 1) / (r s). Two stages on two axes compose too:
    `zero(3, "dp")`, then `zero(1, "rep")` splits the state over both.

    Args:
        stage: 1, 2 or 3.
        axis: the mesh axis, or several.

    Raises:
        ValueError: another stage; stage 3 after a lower one.

    >>> from megalith.sharding.recipes import specs_for
    >>> print(specs_for({"h.0.w": (4, 8), "h.1.w": (4, 8), "cls": (1, 1, 8), "scale": ()}, None, zero(3, "dp")))
    h.*.w  (dp d0) d1 -> d0 d1
    cls    d0 d1 (dp d2) -> d0 d1 d2
    scale  ...
    >>> print(specs_for({"w": (4, 8)}, None, zero(2, "dp")))
    w        d0 d1
    w:grad   (dp d0) d1
    w:state  (dp d0) d1
    """
    if stage not in (1, 2, 3):
        raise ValueError(
            f"zero({stage!r}): there is no such stage; write 1 for optimizer state, 2 for gradients too, 3 for "
            "parameters too"
        )

    def split(name: str, leaf: Leaf) -> Leaf:
        if not leaf.shape:
            return leaf
        at = storage_dim(leaf.rest, leaf.shape)
        if stage == 3:
            if leaf.state is not None or leaf.grad is not None:
                raise ValueError(
                    f"{name!r}: zero(3, {axis!r}) comes after a lower stage, whose layouts do not know of it; write "
                    f"zero(3, {axis!r}) first"
                )
            return replace(leaf, stored=split_dim(leaf.rest, at, axis))
        state = split_dim(leaf.state or leaf.rest, at, axis)
        grad = leaf.grad if stage == 1 else split_dim(leaf.grad or leaf.rest, at, axis)
        return replace(leaf, grad=grad, state=state)

    def recipe(specs: Specs) -> Specs:
        return specs.map_params(split)

    return recipe


def storage_dim(dims: Dims, shape: tuple[int, ...]) -> int:
    """The dim to be split at rest: the first that is not far shorter than the longest; its shards are in one piece.

    A dim that is cut into blocks of numbers, whole heads, is avoided: it would give some ranks more blocks than others.

    >>> storage_dim(("(tp o)", "i"), (64, 64)), storage_dim(("(tp kv 3 64)", "e"), (576, 576))
    (0, 1)
    """
    even = [at for at, dim in enumerate(dims) if not any(word.split()[-1].isdigit() for word in _words(dim))]
    long = [at for at in even if 8 * shape[at] > max(shape)]
    return min(long or even or range(len(dims)), key=lambda at: at if long else -shape[at])


def _words(dim: str) -> list[str]:
    return dim.strip("()").split("+")
