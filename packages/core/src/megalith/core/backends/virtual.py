"""How does a mesh run in one process? Every rank's program in lockstep, from collective to collective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megalith.core import _compat
from megalith.core.backends.lockstep import Traffic
from megalith.core.program import Compute, Launch, Program, Wait, signature
from megalith.sharding.graph import Ref, map_refs, refs

__all__ = ["LockstepError", "run_virtual"]


class LockstepError(RuntimeError):
    """Ranks that do not run the same collectives."""


def run_virtual(
    programs: Sequence[Program],
    inputs: Sequence[Sequence[torch.Tensor]],
    traffic: dict[str, Traffic] | None = None,
) -> list[list[Any]]:
    """Runs the programs of all ranks of a mesh.

    Args:
        programs: one for each rank, in order.
        inputs: for each rank its input shards.
        traffic: where to count the bytes that really move, by kind of collective.

    Returns:
        for each rank its outputs.

    Raises:
        LockstepError: ranks of a group that come to different collectives, as they would hang on a real mesh.
    """
    ranks = [_Rank(p, values) for p, values in zip(programs, inputs, strict=True)]
    with torch.no_grad():
        while True:
            for rank in ranks:
                rank.advance()
            waiting = [rank for rank in ranks if rank.launch is not None]
            if not waiting:
                break
            progressed = False
            for rank in waiting:
                launch = rank.launch
                if launch is None:
                    continue
                group = [ranks[r] for r in launch.peers]
                if all(g.launch is not None and g.launch.peers == launch.peers for g in group):
                    _exchange(group, traffic)
                    progressed = True
            if not progressed:
                _fail(ranks)
    return [rank.finish() for rank in ranks]


class _Rank:
    """One rank: its values, and the collective it stands before."""

    def __init__(self, program: Program, inputs: Sequence[torch.Tensor]) -> None:
        self.program = program
        self.values: dict[int, Any] = dict(zip(program.inputs, inputs, strict=True))
        for name, slot in zip(program.input_names, program.inputs, strict=True):
            given, expected = tuple(self.values[slot].shape), program.types[slot].shape
            if given != expected:
                raise ValueError(f"rank {program.rank}: {name} has local shape {given}, the program expects {expected}")
        self.values.update(program.constants)
        self.position = 0
        self.launch: Launch | None = None

    def read(self, ref: Ref) -> Any:
        return self.values[ref.id]

    def advance(self) -> None:
        """Runs up to the next collective, or to the end."""
        instructions = self.program.instructions
        while self.launch is None and self.position < len(instructions):
            instruction = instructions[self.position]
            if isinstance(instruction, Launch):
                self.launch = instruction
                return
            if isinstance(instruction, Wait):
                self.values[instruction.output] = self.values.pop(instruction.pending)
            else:
                self._compute(instruction)
            self.position += 1

    def _compute(self, instruction: Compute) -> None:
        args, kwargs = map_refs((instruction.args, instruction.kwargs), self.read)
        outs = instruction.fn(*args, **kwargs)
        if _compat.returns_one_tensor(instruction.fn):
            outs = (outs,)
        for slot, out in zip(instruction.outputs, outs, strict=True):
            if slot >= 0:
                self.values[slot] = out
        for ref in refs((instruction.args, instruction.kwargs)):
            if self.program.last_use.get(ref.id) == self.position:
                self.values.pop(ref.id, None)

    def arrive(self, result: torch.Tensor) -> None:
        assert self.launch is not None
        given, expected = tuple(result.shape), self.program.types[self.launch.pending].shape
        known = 0 if self.launch.sizes is None else 1  # the first dim with known size: how many rows come shows now
        assert given[known:] == expected[known:], f"{self.launch.kind} gave {given}, not {expected}"
        self.values[self.launch.pending] = result
        self.launch = None
        self.position += 1

    def finish(self) -> list[Any]:
        return [map_refs(output, self.read) for output in self.program.outputs]


_COMBINE: dict[str, Any] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


def _reduce(op: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    total = tensors[0]
    for other in tensors[1:]:
        total = _COMBINE[op](total, other)
    return total


def _exchange(group: Sequence[_Rank], traffic: dict[str, Traffic] | None) -> None:
    """One collective among the ranks of a group."""
    launches = [g.launch for g in group if g.launch is not None]
    texts = {signature(launch, g.program.types[launch.buffer].dtype) for g, launch in zip(group, launches, strict=True)}
    if len(texts) > 1:
        _fail(group)
    buffers = [g.values[launch.buffer].contiguous() for g, launch in zip(group, launches, strict=True)]
    kind, op = launches[0].kind, launches[0].op
    n = len(group)
    pieces: list[tuple[torch.Tensor, ...]] = []  # of an exchange, by sender and receiver
    if kind == "all_gather":
        results = [torch.stack(buffers) for _ in group]
    elif kind == "all_reduce":
        total = _reduce(op, buffers)
        results = [total.clone() for _ in group]
    elif kind == "reduce_scatter":
        results = [_reduce(op, [b[i] for b in buffers]).clone() for i in range(n)]
    elif kind == "all_to_all":
        results = [torch.stack([b[i] for b in buffers]) for i in range(n)]
    else:
        pieces = [b.split(_sent(g, launch)) for g, b, launch in zip(group, buffers, launches, strict=True)]
        results = [torch.cat([p[i] for p in pieces]) for i in range(n)]
    if traffic is not None:
        counted = traffic.setdefault(kind, Traffic())
        for i, member in enumerate(group):
            counted.add(member.program.rank, *_moved(kind, i, buffers, pieces))
    for member, result in zip(group, results, strict=True):
        member.arrive(result)


def _moved(
    kind: str, index: int, buffers: Sequence[torch.Tensor], pieces: Sequence[Sequence[torch.Tensor]]
) -> tuple[int, int]:
    """Bytes that a rank of a group receives and sends, as a ring moves them; of an exchange all but its own piece."""
    n, buffer = len(buffers), buffers[index]
    if kind == "exchange":
        own = pieces[index][index].nbytes
        return sum(p[index].nbytes for p in pieces) - own, buffer.nbytes - own
    chunk = -(-buffer.numel() // n) * buffer.itemsize
    moved = {"all_gather": buffer.nbytes, "all_reduce": 2 * chunk}.get(kind, chunk) * (n - 1)
    return moved, moved


def _sent(rank: _Rank, launch: Launch) -> list[int]:
    """How much of its buffer a rank sends to each peer in an exchange."""
    if launch.sizes is None:
        return list(launch.send)
    sizes: list[int] = rank.values[launch.sizes[0]].sum(1).tolist()
    return sizes


def _fail(ranks: Sequence[_Rank]) -> None:
    lines = []
    for rank in ranks:
        if rank.launch is None:
            lines.append(f"  rank {rank.program.rank}: at the end")
        else:
            text = signature(rank.launch, rank.program.types[rank.launch.buffer].dtype)
            lines.append(f"  rank {rank.program.rank}: {text}")
    raise LockstepError("ranks disagree on the next collective:\n" + "\n".join(lines))
