"""Which memory does a donated input lend to an output? A pass over a rank's program.

Takes a program and pairs of donated inputs and the outputs that take their place. Gives the program with ops replaced
by their in-place forms where an operand that nobody reads again can hold the result. After this, a donated parameter
is updated where it lies; its old value is gone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from megalith.core import ops
from megalith.core.program import Compute, Instruction, Program, reads
from megalith.sharding.graph import op_name, refs

__all__ = ["donate"]

_INPLACE: dict[Any, Any] = {
    ops.adamw: (ops.adamw_, (0, 2, 3)),
    torch.ops.aten.sub.Tensor: (torch.ops.aten.sub_.Tensor, (0,)),
    torch.ops.aten.add.Tensor: (torch.ops.aten.add_.Tensor, (0,)),
    torch.ops.aten.mul.Tensor: (torch.ops.aten.mul_.Tensor, (0,)),
}


def donate(program: Program, pairs: Sequence[tuple[int, int]]) -> Program:
    """The program with donated inputs updated in place.

    Args:
        program: one rank's program.
        pairs: `(input position, output position)`.
    """
    if not pairs:
        return program
    free = {program.inputs[i] for i, _ in pairs}
    shared = _shared(program)
    last = program.last_use
    instructions: list[Instruction] = []
    for position, instruction in enumerate(program.instructions):
        if isinstance(instruction, Compute) and instruction.fn in _INPLACE:
            inplace, written = _INPLACE[instruction.fn]
            slots = [instruction.args[k].id for k in written]
            ok = all(
                s in free and last.get(s) == position and s not in shared and program.types[s] == program.types[o]
                for s, o in zip(slots, instruction.outputs, strict=True)
            )
            if ok and len(set(slots)) == len(slots) and reads(instruction).count(slots[0]) == 1:
                instruction = replace(instruction, fn=inplace)
                free.update(instruction.outputs)
        instructions.append(instruction)
    return replace(program, instructions=tuple(instructions), donated=tuple(pairs))


def _shared(program: Program) -> set[int]:
    """Slots whose memory a view may share beyond their last use, or that come out under two names."""
    views = {"aten.reshape.default", "aten.permute.default", "aten.expand.default", "aten.slice.Tensor"}
    shared: set[int] = set()
    for instruction in program.instructions:
        if isinstance(instruction, Compute) and op_name(instruction.fn) in views:
            for ref in refs(instruction.args):
                if program.last_use.get(instruction.outputs[0], -1) > program.last_use.get(ref.id, -1):
                    shared.add(ref.id)
    times = Counter(r.id for r in refs(program.outputs))
    return shared | {slot for slot, n in times.items() if n > 1}
