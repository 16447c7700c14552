"""When do collectives run? As early as their operand is there, awaited as late as their result is read.

Takes a program. Gives the same instructions in another order. After this, a reduction is launched right after the op
that makes its operand, and every wait stands right before the first reader of what arrives: what lies between overlaps.
Gathers are not launched earlier than they were, since what they bring takes memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TypeGuard

from megalith.core import _compat
from megalith.core.aliases import aliases, mutated
from megalith.core.program import SUMS, Compute, Instruction, Launch, Program, Wait, reads, writes

__all__ = ["overlap"]


def overlap(program: Program, early: bool = True) -> Program:
    """The program with reductions launched early and waits late.

    Args:
        program: a rank's program.
        early: whether reductions may overtake other launches. Ranks with other ops, for empty shards, would have other
            orders then.
    """
    instructions = program.instructions
    producer = {slot: i for i, instruction in enumerate(instructions) for slot in writes(instruction)}
    users: dict[int, list[int]] = {}
    for i, instruction in enumerate(instructions):
        for slot in reads(instruction):
            users.setdefault(slot, []).append(i)
    for wait, i in _overwriting(program):
        users.setdefault(wait.output, []).append(i)
    keys = [(i, 0, i) for i in range(len(instructions))]
    for i, instruction in enumerate(instructions):
        if early and isinstance(instruction, Launch) and instruction.kind in SUMS:
            _launch_early(i, instructions, producer, users, keys)
    for i in reversed(range(len(instructions))):
        if isinstance(instructions[i], Wait):
            _wait_late(i, instructions, users, keys)
    order = sorted(range(len(instructions)), key=keys.__getitem__)
    moved = tuple(instructions[i] for i in order)
    _check(program, moved)
    return replace(program, instructions=moved)


def _overwriting(program: Program) -> Iterator[tuple[Wait, int]]:
    """Waits and the positions of ops that write into what was sent: not before the wait."""
    memory = aliases(program.instructions)
    sent: dict[int, int] = {}  # pending slot -> root of what is sent
    awaited: dict[int, list[Wait]] = {}  # by that root
    for i, instruction in enumerate(program.instructions):
        if isinstance(instruction, Launch):
            sent[instruction.pending] = memory.root(instruction.buffer)
        elif isinstance(instruction, Wait):
            awaited.setdefault(sent[instruction.pending], []).append(instruction)
        for slot in mutated(instruction):
            for wait in awaited.get(memory.root(slot), []):
                yield wait, i


def _launch_early(
    i: int,
    instructions: tuple[Instruction, ...],
    producer: dict[int, int],
    users: dict[int, list[int]],
    keys: list[tuple[int, int, int]],
) -> None:
    """Moves a launch, and the ops that only pack its operand, to right after the op that makes the operand."""
    chain = [i]
    while True:
        sources = [producer[s] for s in reads(instructions[chain[-1]]) if s in producer]
        if len(sources) != 1 or len(reads(instructions[chain[-1]])) != 1:
            break
        before = instructions[sources[0]]
        packs = _only_reads(before) and len(before.outputs) == 1 and users[before.outputs[0]] == [chain[-1]]
        if not packs or len(reads(before)) != 1 or sources[0] != chain[-1] - 1:
            break
        chain.append(sources[0])
    made = [producer[s] for s in reads(instructions[chain[-1]]) if s in producer]
    if made and not isinstance(instructions[made[-1]], Wait):
        for member in chain:
            keys[member] = (made[-1], 1, member)


def _only_reads(instruction: Instruction | None) -> TypeGuard[Compute]:
    """Whether this is a local op that writes into none of its operands, so that it may move past other readers."""
    return isinstance(instruction, Compute) and not _compat.is_mutating(instruction.fn)


def _wait_late(
    i: int, instructions: tuple[Instruction, ...], users: dict[int, list[int]], keys: list[tuple[int, int, int]]
) -> None:
    """Moves a wait, and the ops that only unpack what arrives, to right before the first reader."""
    chain = [i]
    while True:
        (out,) = writes(instructions[chain[-1]])
        readers = users.get(out, [])
        after = instructions[readers[0]] if len(readers) == 1 else None
        unpacks = _only_reads(after) and len(after.outputs) == 1 and len(reads(after)) == 1
        if not unpacks or readers[0] != chain[-1] + 1:
            break
        chain.append(readers[0])
    first = min((keys[r] for r in users.get(writes(instructions[chain[-1]])[0], [])), default=(len(instructions), 0, 0))
    for member in chain:
        keys[member] = (first[0], first[1] - 1 if first[1] <= 0 else first[1], member)


def _check(program: Program, instructions: tuple[Instruction, ...]) -> None:
    known = {*program.inputs, *program.constants}
    for instruction in instructions:
        missing = [slot for slot in reads(instruction) if slot not in known]
        assert not missing, f"slot {missing} is read before it is written by {instruction}"
        known.update(writes(instruction))
