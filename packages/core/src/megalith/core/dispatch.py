"""How do rows reach experts that other ranks hold? The recipe of `experts` as the instructions of one rank.

Rows and experts are sharded over the same mesh axes. The ranks along these swap how many rows each has for each expert,
an all-to-all of `p E` integers; then the rows, in an exchange whose sizes are these counts, known only at run time; and
the results go back the same way. Until then an even share is what types say and what is priced.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch

from megalith.core.experts import run_backward, run_forward
from megalith.core.program import Compute, Instruction, Launch, Wait
from megalith.sharding.graph import Ref, TensorType
from megalith.sharding.partition import Run
from megalith.sharding.transport import local_indices

__all__ = ["SENDING", "Builder"]


class Builder(Protocol):
    """What instructions are written to."""

    rank: int
    types: dict[int, TensorType]
    instructions: list[Instruction]

    def write(self, instruction: Compute) -> None: ...

    def infer(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> tuple[int, ...]:
        """New slots for what an op makes."""

    def new_slot(self, shape: tuple[int, ...], dtype: torch.dtype) -> int: ...


def _forward(run: Run, args: tuple[Any, ...], builder: Builder) -> list[Ref]:
    return [run_forward(_AsInstructions(run, builder, first=0), *args)]


def _backward(run: Run, args: tuple[Any, ...], builder: Builder) -> list[Ref]:
    return run_backward(_AsInstructions(run, builder, first=1), *args)


SENDING = {"megalith.experts.default": _forward, "megalith.experts_backward.default": _backward}
"""Ops that send what they read, and what writes their instructions; it gives a slot for each output."""


class _AsInstructions:
    """The steps of the recipe on the slots of one rank; see `Steps`.

    `first` is the place of the rows among the operands; behind them are the ids and the weights.
    """

    def __init__(self, run: Run, builder: Builder, first: int) -> None:
        self.run, self.builder = run, builder
        self.rows, ids, weight = (version.layout for version in run.operands[first : first + 3])
        self.axes = tuple(axis for axis in weight.dims[0].axes if axis in self.rows.dims[0].axes)
        self.peers = tuple(sorted(weight.mesh.peers(builder.rank, self.axes)))
        held = [local_indices(weight, peer, 0).tolist() for peer in self.peers]
        self.n_ranks, self.n_experts = len(self.peers), max(map(len, held))
        self.n_here = len(held[self.peers.index(builder.rank)])
        slots = [self.n_ranks * self.n_experts] * weight.shape[0]
        for number, experts in enumerate(held):
            for place, expert in enumerate(experts):
                slots[expert] = number * self.n_experts + place
        self.slots = tuple(slots)
        self.share = -(-sum(math.prod(ids.local_shape(peer)) for peer in self.peers) // self.n_ranks)

    def op(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Ref:
        (slot,) = self.builder.infer(fn, args, kwargs)
        self.builder.write(Compute(fn, args, kwargs, (slot,), self.run.node.origin))
        return Ref(slot)

    def shape(self, x: Ref) -> tuple[int, ...]:
        return self.builder.types[x.id].shape

    def swap(self, counts: Ref) -> Ref:
        return self._launch("all_to_all", counts, self.shape(counts), None, "how many rows go to each expert")

    def exchange(self, rows: Ref, sent: Ref, received: Ref, n: int) -> Ref:
        shape = (n, *self.shape(rows)[1:])
        return self._launch("exchange", rows, shape, (sent.id, received.id), "rows to and from experts, an even share")

    def _launch(self, kind: str, buffer: Ref, shape: tuple[int, ...], sizes: tuple[int, int] | None, why: str) -> Ref:
        builder, origin = self.builder, self.run.node.origin
        dtype = builder.types[buffer.id].dtype
        pending, result = builder.new_slot(shape, dtype), builder.new_slot(shape, dtype)
        rows, n = shape[0] if sizes is None else self.share, self.n_ranks
        elements = -(-rows * (n - 1) // n) * math.prod(shape[1:])
        launch = Launch(
            kind,
            "",
            self.axes,
            self.peers,
            buffer.id,
            pending,
            (),
            (),
            elements * dtype.itemsize,
            False,
            self.rows,
            self.rows,
            origin,
            why,
            sizes,
        )
        builder.instructions += [launch, Wait(pending, result, origin)]
        return Ref(result)
