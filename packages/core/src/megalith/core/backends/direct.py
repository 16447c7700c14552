"""How do ranks over gloo gather, and scatter sums, without copies? Each sends straight into the result of the others.

gloo's own all-gather packs into a flat buffer and unpacks from it, in a ring. Here every rank sends its shard to every
other one by an all-to-all in which all but two sizes are zero: as many bytes, and what arrives lies where it belongs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["COMBINE", "direct_gather", "direct_reduce_scatter", "is_direct", "sums_directly"]

Tensor = torch.Tensor
Swap = Callable[[Tensor, Tensor, list[int], list[int]], Any]
"""Starts an all-to-all: `swap(out, sent, sizes of what arrives, sizes of what is sent)`."""

SMALL_BYTES = 64 << 10
COMBINE: dict[str, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


def is_direct(n: int, chunk_bytes: int) -> bool:
    """Whether chunks of this size go straight to each of `n` ranks: a message each, which small ones are not worth."""
    return n == 2 or chunk_bytes >= SMALL_BYTES


def sums_directly(n: int, chunk_bytes: int, dtype: torch.dtype) -> bool:
    """Whether chunks to be summed go straight to each rank: many of two bytes an element are better summed at once."""
    return is_direct(n, chunk_bytes) and (n == 2 or dtype.itemsize > 2)


def _exchanges(
    swap: Swap, me: int, n: int, size: int, sent: Callable[[int], Tensor], arrives: Callable[[int], Tensor]
) -> list[Any]:
    """Starts sending `sent(peer)` to each peer, and receiving `arrives(peer)` from each, of `size` elements."""
    works = []
    for shift in range(1, n):
        target, source = (me + shift) % n, (me - shift) % n
        receives, sends = [0] * n, [0] * n
        receives[source] = sends[target] = size
        works.append(swap(arrives(source), sent(target), receives, sends))
    return works


def direct_gather(
    swap: Swap, me: int, n: int, finish: Callable[[Any], None]
) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """Start and wait of an all-gather: flat shards of one size in, `n size` out."""

    def start(flat: Tensor) -> tuple[list[Any], Tensor]:
        out = flat.new_empty(n, len(flat))
        works = _exchanges(swap, me, n, len(flat), lambda _: flat, out.__getitem__)
        out[me] = flat
        return works, out

    def wait(pending: tuple[list[Any], Tensor]) -> Tensor:
        works, out = pending
        for work in works:
            finish(work)
        return out

    return start, wait


def direct_reduce_scatter(
    op: str, swap: Swap, me: int, n: int, finish: Callable[[Any], None]
) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """Start and wait of a reduce-scatter: `n size` in, the combined chunk out, in memory that a chunk arrived in.

    The terms are combined in the order of ranks.
    """
    combine = COMBINE[op]

    def start(x: Tensor) -> tuple[list[Any], list[Tensor]]:
        terms = [x[peer] if peer == me else x.new_empty(x.shape[1]) for peer in range(n)]
        return _exchanges(swap, me, n, x.shape[1], x.__getitem__, terms.__getitem__), terms

    def wait(pending: tuple[list[Any], list[Tensor]]) -> Tensor:
        works, (first, second, *rest) = pending
        for work in works:
            finish(work)
        total = combine(first, second, out=second if me == 0 else first)  # a rank's own term is not its to write
        for term in rest:
            combine(total, term, out=total)
        return total

    return start, wait
