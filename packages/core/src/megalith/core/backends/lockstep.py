"""How do all ranks of a mesh take a step in one process? One after the other, by plain tensor operations."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megalith.sharding.layout import Layout
from megalith.sharding.transition import Step, Transition
from megalith.sharding.transport import local_indices, neutral, pack, recipe, unpack

__all__ = ["ReplicaError", "Traffic", "apply", "apply_step", "gather", "scatter"]


class ReplicaError(AssertionError):
    """Ranks that should hold the same do not."""


@dataclass
class Traffic:
    """The bytes that each rank has received and sent, counted on the buffers that were really handed over.

    Buffers count as rings move them: an all-gather hands on n-1 chunks, a reduce-scatter n-1 of n, an all-reduce both.
    """

    received: dict[int, int] = field(default_factory=dict)
    sent: dict[int, int] = field(default_factory=dict)

    def add(self, rank: int, received: int, sent: int) -> None:
        """Count bytes of one rank."""
        self.received[rank] = self.received.get(rank, 0) + received
        self.sent[rank] = self.sent.get(rank, 0) + sent

    @property
    def most_received(self) -> int:
        """The bytes that the busiest rank has received."""
        return max(self.received.values(), default=0)


def apply(transition: Transition, shards: Sequence[Tensor], traffic: Traffic | None = None) -> list[Tensor]:
    """Every rank's shard after a transition, from every rank's shard before it.

    >>> from megalith.sharding.layout import Digit, Dim
    >>> from megalith.sharding.mesh import Mesh
    >>> from megalith.sharding.transition import plan
    >>> whole, mesh = torch.arange(8), Mesh("tp=2")
    >>> rows = Layout(mesh, (Dim.of(8, (Digit("tp", 2, 4),)),))
    >>> [shard.tolist() for shard in apply(plan(rows, Layout(mesh, (Dim.of(8),)), 8), scatter(whole, rows))]
    [[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6, 7]]
    """
    for step in transition.steps:
        shards = apply_step(step, shards, traffic)
    return list(shards)


def apply_step(step: Step, shards: Sequence[Tensor], traffic: Traffic | None = None) -> list[Tensor]:
    """Every rank's shard after one step: pack on each, the collective within each group, unpack on each.

    Args:
        step: the step.
        shards: by rank, the shards in the step's source.
        traffic: where to count the bytes that move.
    """
    buffers = [pack(step, rank, shard) for rank, shard in enumerate(shards)]
    if step.kind not in _COLLECTIVES:
        return buffers
    results: list[Tensor | None] = [None] * len(buffers)
    for rank in range(len(buffers)):
        peers = recipe(step, rank).peers
        if rank == peers[0]:
            outputs = _COLLECTIVES[step.kind](step, peers, [buffers[peer] for peer in peers])
            for peer, output in zip(peers, outputs, strict=True):
                results[peer] = unpack(step, peer, output)
    if traffic is not None:
        for rank, buffer in enumerate(buffers):
            received, sent = _moved(step, rank, buffer)
            traffic.add(rank, received * buffer.itemsize, sent * buffer.itemsize)
    return [result for result in results if result is not None]


def _moved(step: Step, rank: int, buffer: Tensor) -> tuple[int, int]:
    """The elements that a rank receives and sends when its group hands over packed buffers like this one."""
    made = recipe(step, rank)
    n = len(made.peers)
    if step.kind == "exchange":
        own = made.index
        return sum(made.receive_sizes) - made.receive_sizes[own], buffer.numel() - made.send_sizes[own]
    if step.kind == "all_gather":
        moved = buffer.numel() * (n - 1)
    elif step.kind == "all_reduce":
        moved = 2 * -(-buffer.numel() // n) * (n - 1)
    else:
        moved = buffer[0].numel() * (n - 1)
    return moved, moved


def _all_gather(step: Step, peers: Sequence[int], buffers: list[Tensor]) -> list[Tensor]:
    return [torch.stack(buffers) for _ in peers]


def _all_reduce(step: Step, peers: Sequence[int], buffers: list[Tensor]) -> list[Tensor]:
    total = _reduce(buffers, step.op)
    return [total.clone() for _ in peers]


def _reduce_scatter(step: Step, peers: Sequence[int], buffers: list[Tensor]) -> list[Tensor]:
    return [_reduce([buffer[i] for buffer in buffers], step.op) for i in range(len(peers))]


def _all_to_all(step: Step, peers: Sequence[int], buffers: list[Tensor]) -> list[Tensor]:
    return [torch.stack([buffer[i] for buffer in buffers]) for i in range(len(peers))]


def _exchange(step: Step, peers: Sequence[int], buffers: list[Tensor]) -> list[Tensor]:
    pieces = [buffer.split(recipe(step, peer).send_sizes) for peer, buffer in zip(peers, buffers, strict=True)]
    return [torch.cat([sent[i] for sent in pieces]) for i in range(len(peers))]


_COLLECTIVES: dict[str, Callable[[Step, Sequence[int], list[Tensor]], list[Tensor]]] = {
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "exchange": _exchange,
}


def _reduce(terms: Sequence[Tensor], op: str) -> Tensor:
    total = terms[0].clone()
    for term in terms[1:]:
        if op == "sum":
            total += term
        elif op == "max":
            torch.maximum(total, term, out=total)
        else:
            torch.minimum(total, term, out=total)
    return total


def scatter(tensor: Tensor, layout: Layout) -> list[Tensor]:
    """Every rank's shard of a tensor; of a partial value the first rank along its axes holds it, the others nothing.

    Args:
        tensor: the whole tensor, of `layout.shape`.
        layout: where its elements are to live.
    """
    return [shard_of(tensor, layout, rank) for rank in range(layout.mesh.size)]


def shard_of(tensor: Tensor, layout: Layout, rank: int) -> Tensor:
    """One rank's shard of a tensor, as `scatter` gives it; a copy."""
    here = layout.mesh.coordinates(rank)
    empty = [op for axis, op in layout.partial if here[axis]]
    if empty:
        return tensor.new_full(layout.local_shape(rank), neutral(empty[0], tensor.dtype))
    shard = tensor
    for d, ranges in enumerate(layout.ranges(rank)):
        if len(ranges) == 1:
            shard = shard.narrow(d, ranges[0][0], ranges[0][1] - ranges[0][0])
        else:
            shard = shard.index_select(d, local_indices(layout, rank, d).to(tensor.device))
    return shard.clone(memory_format=torch.contiguous_format)


def gather(shards: Sequence[Tensor], layout: Layout, check: bool = False) -> Tensor:
    """The whole tensor of which these are the shards.

    Args:
        shards: by rank, of `layout.local_shape(rank)`.
        layout: where the elements live; terms of a partial value are reduced.
        check: whether to compare replicas, bit by bit.

    Raises:
        ReplicaError: with `check`, where a rank differs from its first replica; names the first such rank.
        ValueError: where a shard has another shape than its layout says.
    """
    mesh = layout.mesh
    for rank, shard in enumerate(shards):
        if tuple(shard.shape) != layout.local_shape(rank):
            raise ValueError(
                f"rank {rank} holds a shard of shape {tuple(shard.shape)}; "
                f"{layout} of a tensor of shape {layout.shape} gives it {layout.local_shape(rank)}"
            )
    if check:
        _check_replicas(shards, layout)
    out = shards[0].new_empty(layout.shape)
    held = {axis: range(mesh.sizes[axis]) for axis in layout.axes}
    terms = {axis: range(mesh.sizes[axis]) for axis in layout.partial_axes}
    for place in itertools.product(*map(reversed, held.values())):  # the first rank is written last, and stays
        here = dict(zip(held, place, strict=True))
        ranks = [mesh.rank({**here, **dict(zip(terms, at, strict=True))}) for at in itertools.product(*terms.values())]
        part = _reduce([shards[r] for r in ranks], layout.partial[0][1]) if terms else shards[ranks[0]]
        grid = [local_indices(layout, ranks[0], d).to(part.device) for d in range(part.dim())]
        if grid:
            out[torch.meshgrid(*grid, indexing="ij")] = part
        else:
            out.copy_(part)
    if check and not terms:
        for rank, (shard, whole) in enumerate(zip(shards, scatter(out, layout), strict=True)):
            if not _same_bits(shard, whole):  # a segment that an axis does not name is a replica too
                raise ReplicaError(f"rank {rank} at {mesh.coordinates(rank)} differs from a lower rank under {layout}")
    return out


def _check_replicas(shards: Sequence[Tensor], layout: Layout) -> None:
    mesh = layout.mesh
    for rank, shard in enumerate(shards):
        here = mesh.coordinates(rank)
        first = mesh.rank({**here, **dict.fromkeys(layout.replicas, 0)})
        if not _same_bits(shards[first], shard):
            raise ReplicaError(
                f"rank {rank} at {here} differs from rank {first}, of which it should be a replica under {layout}"
            )


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    if a.dtype is torch.bool:
        return torch.equal(a, b)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.itemsize]
    return torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))
