"""What does the backward of experts make again that the forward has made? It takes that instead.

Takes a rank's program. Gives an equal one without the second routing, exchange of rows and first products of experts
whose operands are the same. After this, rows travel twice a pass, to the experts and back.

Operands are the same if they are one slot, or the same view or gather of such. What is computed again from a block's
inputs, to save memory, is not the same, and stays.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from functools import partial
from typing import Any

from megalith.core.program import Compute, Instruction, Launch, Program, Wait, reads, renamed, without_dead, writes
from megalith.sharding.graph import Ref, map_refs, op_name

__all__ = ["merge"]

_MERGED = {f"megalith.expert_{name}.default" for name in ("slots", "order", "counts", "regroup", "mm")}
_SEEN_THROUGH = {
    *(f"aten.{name}" for name in ("reshape.default", "permute.default", "expand.default", "slice.Tensor")),
    *(f"aten.{name}" for name in ("index_select.default", "floor_divide.default", "sum.dim_IntList")),
}


def merge(program: Program) -> Program:
    """The program with equal pieces of experts computed, and sent, once."""
    if not any(isinstance(i, Compute) and op_name(i.fn) in _MERGED for i in program.instructions):
        return program
    numbers: dict[int, int] = {}  # slot -> a number that slots of one value share
    first: dict[Hashable, Instruction] = {}
    slots: dict[int, int] = {}  # slot -> the one that takes its place
    kept: list[Instruction] = []
    for instruction in program.instructions:
        instruction = renamed(instruction, lambda slot: slots.get(slot, slot), instruction.origin)
        key = _key(instruction, numbers, program)
        twin = first.get(key) if key is not None else None
        for number, slot in enumerate(writes(instruction)):
            numbers[slot] = slot if twin is None else numbers[writes(twin)[number]]
        if twin is not None and _is_merged(instruction, twin, program):
            slots.update(zip(writes(instruction), writes(twin), strict=True))
            continue
        if key is not None:
            first.setdefault(key, instruction)
        kept.append(instruction)
    outputs = tuple(map_refs(o, lambda ref: Ref(slots.get(ref.id, ref.id))) for o in program.outputs)
    return replace(program, instructions=tuple(without_dead(kept, outputs)), outputs=outputs)


def _is_merged(instruction: Instruction, twin: Instruction, program: Program) -> bool:
    """Whether the second of two equal instructions is dropped: of launches those of rows and of counts."""
    if isinstance(instruction, Compute):
        return op_name(instruction.fn) in _MERGED
    if isinstance(instruction, Launch):
        return instruction.sizes is not None or not program.types[instruction.buffer].dtype.is_floating_point
    return instruction.pending == twin.pending  # type: ignore[union-attr]


def _key(instruction: Instruction, numbers: dict[int, int], program: Program) -> Hashable | None:
    """What equal instructions have in common; None for those that are not looked into."""
    read = tuple(numbers.get(slot, slot) for slot in reads(instruction))
    if isinstance(instruction, Wait):
        return "wait", read
    if isinstance(instruction, Launch):
        return instruction.kind, instruction.op, instruction.peers, read, instruction.source, instruction.target
    fn: Any = instruction.fn
    if op_name(fn) not in _MERGED | _SEEN_THROUGH and not isinstance(fn, partial):
        return None
    named = (fn.func, fn.args) if isinstance(fn, partial) else (fn,)
    arguments = map_refs((instruction.args, dict(instruction.kwargs)), lambda _: "slot")
    return (*named, repr(arguments), read)
