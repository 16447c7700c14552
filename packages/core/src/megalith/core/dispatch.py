"""How do rows reach experts that other ranks hold? The recipe of `experts` as the instructions of one rank.

Rows and experts are sharded over the same mesh axes. The ranks along these swap how many rows each has for each expert,
an all-to-all of `p E` integers; then the rows, in an exchange whose sizes are these counts, known only at run time; and
the results go back the same way. Until then an even share is what types say and what is priced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from megalith.core.experts import run_backward, run_forward
from megalith.core.localize import Emit
from megalith.sharding.graph import Ref
from megalith.sharding.transport import local_indices

__all__ = ["EXPAND"]


def _forward(e: Emit) -> tuple[Ref, ...]:
    return (run_forward(_AsInstructions(e, first=0), *e.args),)


def _backward(e: Emit) -> tuple[Ref, ...]:
    return tuple(run_backward(_AsInstructions(e, first=1), *e.args))


EXPAND: Mapping[str, Callable[[Emit], tuple[Ref, ...]]] = MappingProxyType(
    {"megalith.experts.default": _forward, "megalith.experts_backward.default": _backward}
)
"""The ops of experts, each by what gives its outputs."""


class _AsInstructions:
    """The steps of the recipe on the slots of one rank; see `Steps`.

    `first` is the place of the rows among the operands; behind them are the ids and the weights.
    """

    def __init__(self, e: Emit, first: int) -> None:
        self.e = e
        self.rows, ids, weight = (version.layout for version in e.run.operands[first : first + 3])
        both = {*weight.dims[0].axes} & {*self.rows.dims[0].axes}
        self.axes = tuple(axis for axis in weight.mesh.axes if axis in both)
        peers = weight.mesh.peers(e.rank, self.axes)
        held = [local_indices(weight, peer, 0).tolist() for peer in peers]
        self.n_ranks, self.n_experts = len(peers), max(map(len, held))
        self.n_here = len(held[peers.index(e.rank)])
        slots = [self.n_ranks * self.n_experts] * weight.shape[0]
        for number, experts in enumerate(held):
            for place, expert in enumerate(experts):
                slots[expert] = number * self.n_experts + place
        self.slots = tuple(slots)
        self.share = -(-sum(math.prod(ids.local_shape(peer)) for peer in peers) // self.n_ranks)

    def op(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Ref:
        made: Ref = self.e.emit(fn, *args, **kwargs)
        return made

    def shape(self, x: Ref) -> tuple[int, ...]:
        return self.e.shape(x)

    def swap(self, counts: Ref) -> Ref:
        nbytes = self._away(self.n_ranks, counts)
        why = "how many rows go to each expert"
        return self.e.start("all_to_all", self.axes, counts, self.shape(counts), nbytes, self.rows, why)()

    def exchange(self, rows: Ref, sent: Ref, received: Ref, n: int) -> Ref:
        shape, nbytes = (n, *self.shape(rows)[1:]), self._away(self.share, rows)
        why = "rows to and from experts, an even share"
        return self.e.start(
            "exchange", self.axes, rows, shape, nbytes, self.rows, why, sizes=(sent.id, received.id)
        )()

    def _away(self, n: int, x: Ref) -> int:
        """Bytes of n rows of x but for the share that stays on the rank."""
        kind = self.e.types[x.id]
        return -(-n * (self.n_ranks - 1) // self.n_ranks) * math.prod(kind.shape[1:]) * kind.dtype.itemsize
