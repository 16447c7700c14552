"""What can run while a reduction is under way? What stands before it and nobody needs yet, weight gradients mostly.

Takes a program in which nothing is written in place yet. Gives the same instructions in another order. After this, an
op that stood before a reduction, and whose result is read only after what the reduction brings, stands behind its
launch: the gradient that the next layer waits for goes first (Megatron-LM overlaps its sums in the same way).
"""

from __future__ import annotations

from dataclasses import replace

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
    start = 0  # of the run of ops since the last collective
    for instruction in order:
        result.append(instruction)
        if isinstance(instruction, Wait):
            start = len(result)
        elif isinstance(instruction, Launch):
            if instruction.kind == "all_reduce" and instruction.origin.phase == "backward":
                arrived = readers.get(wait_of[instruction.pending].output, [])
                needed = min((place[id(reader)] for reader in arrived), default=len(order))
                _push_behind(result, start, instruction, needed, readers, place)
            start = len(result)
    return replace(program, instructions=tuple(result))


def _push_behind(
    result: list[Instruction],
    start: int,
    launch: Launch,
    needed: int,
    readers: dict[int, list[Instruction]],
    place: dict[int, int],
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
        if later and launch.buffer not in reads(candidate):
            chosen.add(id(candidate))
            moved.append(candidate)
        else:
            kept.append(candidate)
    result[start:] = [*reversed(kept), launch, *reversed(moved)]
