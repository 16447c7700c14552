"""Which memory does an op write into? That of an operand which nobody reads again, where it can hold the result.

Takes a rank's program and pairs of donated inputs and the outputs that take their place. Gives the program with ops
replaced by their in-place forms. After this, a donated parameter is updated where it lies (its old value is gone), and
an element-wise op allocates nothing if one of its operands ends with it.

Memory that a collective may still be reading is left alone, and so is memory of which a view lives on. That a wait
stays before what is written after it is for later passes to see to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from megalith.core import _compat, ops
from megalith.core.aliases import aliases
from megalith.core.program import SUMS, Compute, Instruction, Launch, Program, Wait, reads
from megalith.sharding.aten.pointwise import POINTWISE
from megalith.sharding.graph import Ref, op_name, refs

__all__ = ["inplace"]

aten = torch.ops.aten
_COMMUTATIVE = {aten.add.Tensor, aten.mul.Tensor}
_ELEMENTWISE = {f"aten.{name}" if "." in name else f"aten.{name}.default" for name in POINTWISE}
_ELEMENTWISE |= {"aten.scatter_add.default"}


def inplace(program: Program, donated: Sequence[tuple[int, int]]) -> Program:
    """The program with memory reused.

    Args:
        program: one rank's program.
        donated: `(input position, output position)`.
    """
    memory = _Memory(program, donated)
    instructions: list[Instruction] = []
    for position, instruction in enumerate(program.instructions):
        if isinstance(instruction, Compute):
            instruction = _reusing(instruction, position, memory, program)
        instructions.append(instruction)
    return replace(program, instructions=tuple(instructions), donated=tuple(donated))


def _reusing(instruction: Compute, position: int, memory: _Memory, program: Program) -> Compute:
    """The instruction in its in-place form, if it has one and its operand may be written."""
    if instruction.fn is ops.adamw:
        slots = [instruction.args[k].id for k in ops.ADAMW_WRITES]
        roots = [memory.root(slot) for slot in reads(instruction)]
        alone = all(roots.count(memory.root(slot)) == 1 for slot in slots)
        if alone and all(memory.ends(slot, position) for slot in slots):
            return replace(instruction, fn=ops.adamw_)
        return instruction
    form = _inplace_form(instruction.fn)
    if form is None or len(instruction.outputs) != 1:
        return instruction
    kind = program.types[instruction.outputs[0]]
    read = [memory.root(slot) for slot in reads(instruction)]

    def writable(argument: Any) -> bool:
        return (
            isinstance(argument, Ref)
            and program.types[argument.id] == kind
            and read.count(memory.root(argument.id)) == 1  # no other operand lies in the same memory
            and memory.ends(argument.id, position)
        )

    args = instruction.args
    if not writable(args[0]) and instruction.fn in _COMMUTATIVE and not instruction.kwargs and writable(args[1]):
        args = (args[1], args[0])
    return replace(instruction, fn=form, args=args) if writable(args[0]) else instruction


@lru_cache(maxsize=1024)
def _inplace_form(op: Any) -> Any:
    """`aten.add_.Tensor` for `aten.add.Tensor`; None for ops that have none or do more than go element by element."""
    return _compat.inplace_form(op) if hasattr(op, "overloadpacket") and op_name(op) in _ELEMENTWISE else None


class _Memory:
    """When each piece of memory is read last, and what may not be written at all."""

    def __init__(self, program: Program, donated: Sequence[tuple[int, int]]) -> None:
        self.aliases = aliases(program.instructions)
        self.last: dict[int, int] = {}
        pinned = {*program.inputs, *program.constants} - {program.inputs[i] for i, _ in donated}
        under_way: dict[int, int] = {}  # pending slot -> root of what is sent
        for position, instruction in enumerate(program.instructions):
            for slot in reads(instruction):
                self.last[self.root(slot)] = position
            if isinstance(instruction, Launch):
                if instruction.kind in SUMS:  # may write into its buffer, and be joined with later ones
                    pinned.add(instruction.buffer)
                under_way[instruction.pending] = self.root(instruction.buffer)
            elif isinstance(instruction, Wait):
                self.last[under_way.pop(instruction.pending)] = position
        self.kept = {self.root(slot) for slot in pinned} | {self.root(slot) for slot in self.aliases.shared}
        for ref in refs(program.outputs):
            self.last[self.root(ref.id)] = len(program.instructions)

    def root(self, slot: int) -> int:
        return self.aliases.root(slot)

    def ends(self, slot: int, position: int) -> bool:
        """Whether nobody reads this memory after the instruction at `position`, so that it may be written."""
        root = self.root(slot)
        return root not in self.kept and self.last.get(root) == position
