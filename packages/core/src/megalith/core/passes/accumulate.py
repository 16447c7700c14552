"""When are the terms of a sum added? As soon as there are two of them, so that few are held at a time.

Takes a program in which nothing is written in place yet. Gives the same instructions in another order. After this, an
addition of two terms that nobody else reads stands right behind the op that makes the later one: the gradients of a
weight that is used many times, by chunks or micro-batches, take the memory of two. An addition of what a collective
brings stays, lest it be awaited sooner.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from megalith.core.program import Compute, Instruction, Program, Wait, reads, writes
from megalith.sharding.graph import Ref

__all__ = ["accumulate"]


def accumulate(program: Program) -> Program:
    """The program with the terms of sums added as they come."""
    after: dict[int, list[Instruction]] = {}  # position -> the op there, and the additions that follow at once
    made: dict[int, int] = {}  # slot -> position of the op that makes it, or of the one that it was moved behind
    arrived: set[int] = set()  # slots of what collectives bring, unpacked or not
    for position, instruction in enumerate(program.instructions):
        if isinstance(instruction, Wait):
            arrived.add(instruction.output)
        if not isinstance(instruction, Compute):
            continue
        operands = reads(instruction)
        if len(operands) == 1 and operands[0] in arrived:
            arrived.update(writes(instruction))
        place = position
        here = all(slot in made and slot not in arrived for slot in operands)
        if here and _adds_last_uses(instruction, position, program):
            place = max(made[slot] for slot in operands)
        made.update(dict.fromkeys(writes(instruction), place))
        after.setdefault(place, []).append(instruction)
    order: list[Instruction] = []
    for position, instruction in enumerate(program.instructions):
        order.extend(after.get(position, []) if isinstance(instruction, Compute) else [instruction])
    return replace(program, instructions=tuple(order))


def _adds_last_uses(instruction: Compute, position: int, program: Program) -> bool:
    """Whether this adds two terms of one type, of which nobody reads either again."""
    if instruction.fn is not torch.ops.aten.add.Tensor or instruction.kwargs:
        return False
    kind = program.types[instruction.outputs[0]]
    return all(
        isinstance(term, Ref) and program.types[term.id] == kind and program.last_use[term.id] == position
        for term in instruction.args
    )
