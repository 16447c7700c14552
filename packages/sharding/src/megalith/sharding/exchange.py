"""Who fetches which elements from whom in an exchange? Boxes of indices, spread evenly over replicas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from megalith.sharding.layout import Range
from megalith.sharding.overlap import intersect, own_ranges
from megalith.sharding.transition import Step

__all__ = ["Box", "boxes", "indices", "positions"]

Ranges = tuple[Range, ...]


@dataclass(frozen=True, eq=False)
class Box:
    """A part of a local tensor: the product of `places`, per dim the positions in it, as int64 tensors."""

    places: tuple[Tensor, ...]

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple(index.numel() for index in self.places)

    @cached_property
    def size(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def starts(self) -> tuple[int | None, ...]:
        """Per dim where the positions start if they are a run, else None."""
        return tuple(_start(index) for index in self.places)


def _start(index: Tensor) -> int | None:
    if index.numel() == 0:
        return 0
    first = int(index[0])
    return first if int(index[-1]) - first == index.numel() - 1 else None


def boxes(step: Step, rank: int) -> tuple[tuple[Box, ...], tuple[Box, ...]]:
    """What a rank sends to each of its peers, of its source, and receives from each, in its target.

    What a rank holds it takes from itself. The rest is in shards that one or more peers hold: the one that has least
    to send so far gives it. All ranks of a group find the same, without talking.
    """
    peers = step.source.mesh.peers(rank, step.axes)
    routes = _routes(step, peers)
    held, wanted = step.source.ranges(rank), step.target.ranges(rank)
    send = [_box(routes.get((rank, peer)), held) for peer in peers]
    receive = [_box(routes.get((peer, rank)), wanted) for peer in peers]
    return tuple(send), tuple(receive)


def _box(ranges: Sequence[Ranges] | None, within: Sequence[Ranges]) -> Box:
    if ranges is None:
        return Box(tuple(torch.arange(0) for _ in within))
    return Box(tuple(positions(a, b) for a, b in zip(ranges, within, strict=True)))


@lru_cache(maxsize=4096)
def _routes(step: Step, peers: tuple[int, ...]) -> dict[tuple[int, int], tuple[Ranges, ...]]:
    """For each (sender, receiver) the indices that go, per dim."""
    source, target, mesh = step.source, step.target, step.source.mesh
    holding = [axis for axis in step.axes if axis in source.axes]
    holders: dict[tuple[int, ...], list[int]] = {}
    for peer in peers:
        held = mesh.coordinates(peer)
        holders.setdefault(tuple(held[axis] for axis in holding), []).append(peer)
    load = dict.fromkeys(peers, 0)
    routes: dict[tuple[int, int], tuple[Ranges, ...]] = {}
    for receiver in peers:
        wanted, here = target.ranges(receiver), mesh.coordinates(receiver)
        for same in holders.values():
            there = mesh.coordinates(same[0])
            offered = [own_ranges(dim, there, here) for dim in source.dims]
            common = tuple(intersect(a, b) for a, b in zip(offered, wanted, strict=True))
            size = math.prod(sum(stop - start for start, stop in ranges) for ranges in common)
            if size == 0:
                continue
            sender = receiver if receiver in same else min(same, key=lambda peer: load[peer])
            if sender != receiver:
                load[sender] += size
            routes[sender, receiver] = common
    return routes


def indices(ranges: Sequence[Range]) -> Tensor:
    """The indices of ranges, as an int64 tensor."""
    return torch.cat([torch.arange(start, stop) for start, stop in ranges] or [torch.arange(0)])


def positions(wanted: Sequence[Range], held: Sequence[Range]) -> Tensor:
    """Where in the local order of `held` the indices `wanted`, all of them held, stand."""
    return torch.searchsorted(indices(held), indices(wanted))
