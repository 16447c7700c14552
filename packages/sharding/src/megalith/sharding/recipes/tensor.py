"""How are the matrices of each layer split? Tensor parallelism, by the names and shapes of a model's parameters."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from megalith.sharding.recipes.names import megatron
from megalith.sharding.recipes.table import Dims, Leaf, Recipe, Specs, split_dim

__all__ = ["Heads", "one_dim", "tensor_parallel"]


@dataclass(frozen=True)
class Heads:
    """What is known of a model's attention.

    Args:
        n, n_kv: how many heads of queries and of keys and values; 0 is not known.
        kv_axis: the mesh axis of keys and values, a part of the tensor axis, if that has more ranks than they heads.
    """

    n: int = 0
    n_kv: int = 0
    kv_axis: str | None = None

    def __post_init__(self) -> None:
        if self.n < 0 or self.n_kv < 0 or (self.n_kv and self.n % self.n_kv) or (self.n_kv and not self.n):
            raise ValueError(
                f"heads={self.n}, kv_heads={self.n_kv}: every head of keys and values serves as many heads of queries; "
                "give both as the model's config has them"
            )


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
        kind: `"1d"`.
        heads, kv_heads: how many heads of queries, and of keys and values (by default as many), as a model's config has
            them. Then heads are never cut, and where they do not divide the axis, a rank holds the queries of its keys.
        kv_axis: with fewer heads of keys and values than ranks: the part of the axis that splits them, `kv` of
            `Mesh("tp=(kv=2 rep=2)")`.

    Raises:
        ValueError: another kind, head counts that do not fit together, or parameters that are split at rest already.

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
        layouts = megatron({name: leaf.shape for name, leaf in specs.params.items()})

        def split(name: str, leaf: Leaf) -> Leaf:
            if leaf.rest != leaf.used or leaf.grad is not None or leaf.state is not None:
                raise ValueError(
                    f"{name!r} is split at rest already, and tensor_parallel({axis!r}) says how it computes; apply "
                    "zero last"
                )
            dims = layouts.get(name)
            if dims is None:
                return leaf
            return replace(leaf, used=_over(leaf.used, _with_heads(dims, leaf.shape, heads), axis))

        return specs.map_params(split).cutting("heads", axis)

    return recipe


_KINDS: dict[str, Callable[[str, Heads], Recipe]] = {"1d": one_dim}


def _over(before: Dims, dims: Dims, axis: str) -> Dims:
    """A layout over `tp` on top of one that has other axes already."""
    found = tuple(re.sub(r"\btp\b", axis, dim) for dim in dims)
    for at, dim in enumerate(before):
        if dim.startswith("("):
            cut = split_dim(before, at, axis) if found[at].startswith("(") else before
            found = (*found[:at], cut[at], *found[at + 1 :])
    return found


def _with_heads(dims: Dims, shape: tuple[int, ...], heads: Heads) -> Dims:
    """A layout whose heads are whole, and with the queries that read them where heads of keys are fewer."""
    return tuple(_blocks(dim, size, heads) for dim, size in zip(dims, shape, strict=True)) if heads.n else dims


def _blocks(dim: str, size: int, heads: Heads) -> str:
    """A dim with its heads in numbers; as it is where it does not consist of that many heads."""
    n, n_kv, shared = heads.n, heads.n_kv, heads.n // heads.n_kv
    if dim == "(3 tp heads)" and shared > 1:
        each, rest = divmod(size, n + 2 * n_kv)
        return dim if rest else f"(tp kv_heads {shared} {each} + tp kv_heads {each} + tp kv_heads {each})"
    count = {"(tp heads)": n, "(3 tp heads)": 3 * n, "(tp kv_heads)": n_kv, "(tp groups)": n_kv}.get(dim)
    if count is None or size % count:
        return dim
    each = size // count
    if dim == "(tp kv_heads)":
        return f"({heads.kv_axis or 'tp'} kv_heads {each})"
    if dim == "(tp heads)" and shared > 1 and heads.kv_axis is None:
        return f"(tp kv_heads {shared} {each})"
    return f"{dim[:-1]} {each})"
