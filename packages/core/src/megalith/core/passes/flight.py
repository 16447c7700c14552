"""How much is sent at a time? Whole gradients that only a reduce-scatter still reads, up to `IN_FLIGHT_BYTES`.

Takes a program. Gives the same instructions with some waits earlier. After this, the oldest operands of reduce-scatters
are awaited, and so freed, before the next would go over the bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megalith.core.program import Instruction, Launch, Program, Wait

__all__ = ["IN_FLIGHT_BYTES", "bounded"]

IN_FLIGHT_BYTES = 64 << 20


def bounded(program: Program) -> Program:
    """The program with a wait moved up wherever too much would be sent at once."""
    return replace(program, instructions=tuple(_bounded(program)))


def _bounded(program: Program) -> Iterator[Instruction]:
    waits = {i.pending: i for i in program.instructions if isinstance(i, Wait)}
    flying: dict[int, int] = {}  # pending slot -> bytes of the operand, oldest first
    awaited: set[int] = set()
    for instruction in program.instructions:
        if isinstance(instruction, Wait):
            if instruction.pending in awaited:
                continue
            flying.pop(instruction.pending, None)
        elif isinstance(instruction, Launch) and instruction.kind == "reduce_scatter":
            nbytes = program.types[instruction.buffer].nbytes
            while flying and sum(flying.values()) + nbytes > IN_FLIGHT_BYTES:
                oldest = next(iter(flying))
                del flying[oldest]
                awaited.add(oldest)
                yield waits[oldest]
            if instruction.pending in waits:
                flying[instruction.pending] = nbytes
        yield instruction
