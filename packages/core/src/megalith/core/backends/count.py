"""What would these ranks do? The backend on which nothing runs: collectives, bytes, flops and memory are counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megalith.core.effects import effects
from megalith.core.explain import aligned, amount
from megalith.core.memory import memory
from megalith.core.price import flops_of
from megalith.core.program import Compute, Program

__all__ = ["Counted", "CountedRank", "count"]


@dataclass(frozen=True)
class CountedRank:
    """What one rank does in one run.

    Args:
        rank: which.
        collectives: how many, by kind and axes.
        bytes_received: what the busiest rank of each of its groups receives, by kind and axes.
        flops: floating-point operations in matrix products, attention and convolutions.
        peak_bytes: the most memory of its tensors at one time.
    """

    rank: int
    collectives: Mapping[tuple[str, tuple[str, ...]], int]
    bytes_received: Mapping[tuple[str, tuple[str, ...]], int]
    flops: int
    peak_bytes: int


@dataclass(frozen=True)
class Counted:
    """What ranks do in one run; `str()` gives a table. A number is the largest of all ranks."""

    ranks: tuple[CountedRank, ...]

    @property
    def collectives(self) -> int:
        """Collectives that a rank takes part in."""
        return max(sum(rank.collectives.values()) for rank in self.ranks)

    @property
    def bytes_received(self) -> int:
        """Bytes that a rank receives."""
        return max(sum(rank.bytes_received.values()) for rank in self.ranks)

    @property
    def flops(self) -> int:
        """Floating-point operations of a rank."""
        return max(rank.flops for rank in self.ranks)

    @property
    def peak_bytes(self) -> int:
        """Bytes of tensors of a rank at its peak."""
        return max(rank.peak_bytes for rank in self.ranks)

    def __str__(self) -> str:
        keys = dict.fromkeys(key for rank in self.ranks for key in rank.collectives)
        rows = []
        for key in keys:
            n = max(rank.collectives.get(key, 0) for rank in self.ranks)
            nbytes = max(rank.bytes_received.get(key, 0) for rank in self.ranks)
            rows.append((f"{key[0]} over {' '.join(key[1])}", n, amount(nbytes)))
        lines = aligned(("collective", "count", "received"), rows, right=(1, 2)) if rows else []
        total = f"{self.collectives} collectives, {amount(self.bytes_received)} received"
        lines.append(f"{total}; {self.flops:.3g} flops; peak {amount(self.peak_bytes)}")
        return "\n".join(lines)


def count(programs: Program | Sequence[Program]) -> Counted:
    """What programs do, counted rank by rank. Nothing runs.

    Args:
        programs: the program of one rank, or of several.

    >>> from megalith.core.shard import shard
    >>> from megalith.sharding import Mesh
    >>> import torch
    >>> step = shard(lambda x, w: (x @ w).relu(), Mesh("tp=2"), {"x": "b (tp e)", "w": "(tp e) f"}, backend="virtual")
    >>> print(count(step.program(torch.ones(8, 4), torch.ones(4, 6))))
    collective          count  received
    all_reduce over tp      1     192 B
    1 collectives, 192 B received; 192 flops; peak 320 B
    """
    many = (programs,) if isinstance(programs, Program) else tuple(programs)
    if not many:
        raise ValueError("there is no program to count; give the program of one rank at least")
    return Counted(tuple(map(_count, many)))


def _count(program: Program) -> CountedRank:
    number, received = Counter[tuple[str, tuple[str, ...]]](), Counter[tuple[str, tuple[str, ...]]]()
    for launch in program.collectives:
        number[launch.kind, launch.axes] += 1
        received[launch.kind, launch.axes] += launch.bytes_received
    flops = sum(
        flops_of(instruction, effect)
        for instruction, effect in zip(program.instructions, effects(program), strict=True)
        if isinstance(instruction, Compute)
    )
    return CountedRank(program.rank, dict(number), dict(received), flops, memory(program).peak)
