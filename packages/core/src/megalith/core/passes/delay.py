"""What can run while a reduction is under way? What stands before it and nobody needs yet, weight gradients mostly.

Takes a program in which nothing is written in place yet. Gives the same instructions in another order. After this, an
op that stood before a reduction, and whose result is read only after what the reduction brings, stands behind its
launch: the gradient that the next layer waits for goes first (Megatron-LM overlaps its sums in the same way). What it
reads is held for longer, but never so that more is alive at a time than at the peak of the program as it was.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from megalith.core.aliases import aliases
from megalith.core.program import Compute, Instruction, Launch, Program, Wait, reads, writes

__all__ = ["delay"]


def delay(program: Program) -> Program:
    """The program with ops that can wait moved behind the next reduction."""
    order = list(program.instructions)
    readers: dict[int, list[Instruction]] = {}
    for instruction in order:
        for slot in reads(instruction):
            readers.setdefault(slot, []).append(instruction)
    wait_of = {i.pending: i for i in order if isinstance(i, Wait)}
    result: list[Instruction] = []
    place = {id(instruction): position for position, instruction in enumerate(order)}
    room = _Room(program)
    start = 0  # of the run of ops since the last collective
    for instruction in order:
        result.append(instruction)
        if isinstance(instruction, Wait):
            start = len(result)
        elif isinstance(instruction, Launch):
            if instruction.kind == "all_reduce" and instruction.origin.phase == "backward":
                arrived = readers.get(wait_of[instruction.pending].output, [])
                needed = min((place[id(reader)] for reader in arrived), default=len(order))
                _push_behind(result, start, instruction, needed, readers, place, room)
            start = len(result)
    return replace(program, instructions=tuple(result))


def _push_behind(
    result: list[Instruction],
    start: int,
    launch: Launch,
    needed: int,
    readers: dict[int, list[Instruction]],
    place: dict[int, int],
    room: _Room,
) -> None:
    """Moves what can wait from `result[start:-1]` behind the launch that ends `result`."""
    moved: list[Instruction] = []
    chosen: set[int] = set()
    kept: list[Instruction] = []
    for candidate in reversed(result[start:-1]):
        later = isinstance(candidate, Compute) and all(
            id(reader) in chosen or place[id(reader)] > needed
            for slot in writes(candidate)
            for reader in readers.get(slot, [])
        )
        later = later and launch.buffer not in reads(candidate)
        if later and room.take(candidate, place[id(candidate)], place[id(launch)]):
            chosen.add(id(candidate))
            moved.append(candidate)
        else:
            kept.append(candidate)
    result[start:] = [*reversed(kept), launch, *reversed(moved)]


class _Room:
    """How many bytes are alive at each instruction; as many more may be held as the peak allows."""

    def __init__(self, program: Program) -> None:
        self.root = aliases(program.instructions).root
        order = program.instructions
        self.bytes = {slot: kind.nbytes for slot, kind in program.types.items()}
        self.made: dict[int, int] = {}  # root of memory -> the position that writes it first
        for position, instruction in enumerate(order):
            for slot in writes(instruction):
                self.made.setdefault(self.root(slot), position)
        self.last: dict[int, int] = {}  # root of memory -> the position that reads it last
        for slot, position in program.last_use.items():
            self.last[self.root(slot)] = max(position, self.last.get(self.root(slot), 0))
        change = [0] * (len(order) + 2)
        for root, position in self.made.items():
            change[position] += self.bytes[root]
            change[self.last.get(root, position) + 1] -= self.bytes[root]
        self.alive = list(itertools.accumulate(change))
        self.peak = max(self.alive)

    def take(self, candidate: Instruction, position: int, launch: int) -> bool:
        """Whether what this op reads may be held until after the launch; if so, from now on it is."""
        held = {root for root in map(self.root, reads(candidate)) if root in self.made and self.last[root] < launch}
        more = sum(self.bytes[root] for root in held)
        if max(self.alive[position : launch + 1]) + more > self.peak:
            return False
        for root in held:
            for i in range(self.last[root] + 1, launch + 1):
                self.alive[i] += self.bytes[root]
            self.last[root] = launch
        return True
