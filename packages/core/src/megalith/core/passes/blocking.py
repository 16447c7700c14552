"""What does overlap hide? Every collective awaited as soon as it is launched, to compare with.

Takes a program. Gives the same instructions with each wait right behind its launch. After this, nothing computes while
anything is sent.
"""

from __future__ import annotations

from dataclasses import replace

from megalith.core.program import Instruction, Launch, Program, Wait

__all__ = ["blocking"]


def blocking(program: Program) -> Program:
    """The program with nothing under way while it computes."""
    waits = {i.pending: i for i in program.instructions if isinstance(i, Wait)}
    order: list[Instruction] = []
    for instruction in program.instructions:
        if not isinstance(instruction, Wait):
            order.append(instruction)
        if isinstance(instruction, Launch) and instruction.pending in waits:
            order.append(waits[instruction.pending])
    return replace(program, instructions=tuple(order))
