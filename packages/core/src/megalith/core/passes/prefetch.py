"""When are stored parameters gathered? Ahead of their use, as far as a budget of memory allows.

Takes a program. Gives the same instructions with gathers of inputs launched earlier. After this, the parameters of the
next layers are on their way while the present one computes (FSDP's prefetching, Zhao et al., arXiv:2304.11277), and
what was gathered ahead of its time takes at most the budget. Their order among themselves stays.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from megalith.core import _compat
from megalith.core.program import Compute, Instruction, Launch, Program, reads, writes

__all__ = ["Gather", "gathers_of_inputs", "prefetch"]


@dataclass(frozen=True)
class Gather:
    """A launch whose operand is there from the start.

    Args:
        members: positions of the ops that only pack its operand, and last of the launch.
        nbytes: what it brings.
    """

    members: tuple[int, ...]
    nbytes: int


def prefetch(program: Program, budget: int | None = None) -> Program:
    """The program with gathers of its inputs launched early.

    Args:
        program: a rank's program; all ranks have to have the same ops, lest they launch in different orders.
        budget: bytes that may be gathered ahead of their use; by default twice the largest.
    """
    gathers = gathers_of_inputs(program)
    if not gathers:
        return program
    limit = 2 * max(g.nbytes for g in gathers) if budget is None else budget
    waiting = deque(gathers)
    packed = {member for gather in gathers for member in gather.members}
    ahead: dict[int, int] = {}  # position of a launch that was issued before its time -> its bytes
    order: list[Instruction] = []
    for position, instruction in enumerate(program.instructions):
        ahead.pop(position, None)
        while waiting:
            due = waiting[0].members[-1]
            if due > position and sum(ahead.values()) + waiting[0].nbytes > limit:
                break
            if due > position:
                ahead[due] = waiting[0].nbytes
            order.extend(program.instructions[member] for member in waiting.popleft().members)
        if position not in packed:
            order.append(instruction)
    return replace(program, instructions=tuple(order))


def gathers_of_inputs(program: Program) -> list[Gather]:
    """The gathers whose operand is an input, or packed from inputs, in order."""
    producer = {slot: i for i, instruction in enumerate(program.instructions) for slot in writes(instruction)}
    users: dict[int, set[int]] = {}
    for i, instruction in enumerate(program.instructions):
        for slot in reads(instruction):
            users.setdefault(slot, set()).add(i)
    inputs = set(program.inputs)
    found = []
    for i, instruction in enumerate(program.instructions):
        if not isinstance(instruction, Launch) or instruction.kind != "all_gather":
            continue
        members, open_slots = {i}, list(reads(instruction))
        while open_slots:
            slot = open_slots.pop()
            if slot in inputs:
                continue
            source = producer.get(slot)
            maker = program.instructions[source] if source is not None else None
            packs = isinstance(maker, Compute) and not _compat.is_mutating(maker.fn) and users[slot] <= members
            if source is None or not packs:
                break
            members.add(source)
            open_slots.extend(reads(program.instructions[source]))
        else:
            found.append(Gather(tuple(sorted(members)), program.types[instruction.pending].nbytes))
    return found
