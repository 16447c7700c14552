"""How are heads kept whole? The layout of a dim that consists of heads, once their number is known."""

from __future__ import annotations

from dataclasses import dataclass

from megalith.sharding.recipes.table import Dims

__all__ = ["Heads", "with_heads"]


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


def with_heads(dims: Dims, shape: tuple[int, ...], heads: Heads) -> Dims:
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
