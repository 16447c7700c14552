"""Which small collectives travel together? Those below a size, of one kind, side by side in one buffer.

Takes a program. Gives one in which small all-reduces, reduce-scatters and gathers of inputs, over one group and of one
dtype, are joined, as far as none waits for another: each costs a message otherwise. Large ones stay alone: copying them
would cost more than it saves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from megalith.core.passes.prefetch import gathers_of_inputs
from megalith.core.program import SUMS, Compute, Instruction, Launch, Program, Wait, reads, writes
from megalith.sharding.graph import Ref, TensorType

__all__ = ["bucket"]

aten = torch.ops.aten


def bucket(program: Program, small: int = 256 << 10, limit: int = 4 << 20) -> Program:
    """The program with small collectives joined.

    Args:
        program: a rank's program.
        small: collectives of fewer bytes are joined: of the operand of a sum, of the result of a gather.
        limit: up to so many bytes together.
    """
    order = program.instructions
    packing = {gather.members[-1]: gather.members[:-1] for gather in gathers_of_inputs(program)}
    groups = _groups(program, set(packing), small, limit)
    if not groups:
        return program
    types = dict(program.types)
    waits = {i.pending: i for i in order if isinstance(i, Wait)}
    place = {i.pending: n for n, i in enumerate(order) if isinstance(i, Launch)}
    group_of = {launch.pending: group for group in groups for launch in group}
    issued = {(group[-1] if group[0].kind in SUMS else group[0]).pending: group for group in groups}
    early: set[int] = set()  # what packs gathers: it stands before the first gather of the group
    unpacking: dict[int, list[Instruction]] = {}  # by the pending slot of a group's first launch
    out: list[Instruction] = []
    for group in groups:
        if group[0].kind not in SUMS:
            early.update(n for launch in group for n in packing[place[launch.pending]])
    for n, instruction in enumerate(order):
        if n in early:
            continue
        if not isinstance(instruction, (Launch, Wait)) or instruction.pending not in group_of:
            out.append(instruction)
        elif isinstance(instruction, Wait):
            out.extend(unpacking.pop(group_of[instruction.pending][0].pending, []))
        elif instruction.pending in issued:
            group = issued[instruction.pending]
            if group[0].kind not in SUMS:
                out.extend(order[m] for launch in group for m in packing[place[launch.pending]])
            joining, unpacking[group[0].pending] = _joined(group, types, waits)
            out.extend(joining)
    for rest in unpacking.values():
        out.extend(rest)
    return replace(program, instructions=_in_order(program, out), types=types)


def _groups(program: Program, of_inputs: set[int], small: int, limit: int) -> list[list[Launch]]:
    """Runs of small collectives; the result of no sum is read before the last of its run is launched."""
    open_groups: dict[object, list[Launch]] = {}
    done: list[list[Launch]] = []
    awaited: dict[int, object] = {}  # what a wait of an open group of sums writes

    def close(key: object) -> None:
        group = open_groups.pop(key, [])
        if len(group) > 1:
            done.append(group)

    def nbytes(launch: Launch) -> int:
        return program.types[launch.buffer if launch.kind in SUMS else launch.pending].nbytes

    for position, instruction in enumerate(program.instructions):
        for slot in reads(instruction):
            if not isinstance(instruction, Wait) and slot in awaited:
                close(awaited[slot])
        if isinstance(instruction, Wait):
            for key, group in open_groups.items():
                if group[0].kind in SUMS and any(launch.pending == instruction.pending for launch in group):
                    awaited[instruction.output] = key
        if not isinstance(instruction, Launch) or nbytes(instruction) >= small:
            continue
        if position not in of_inputs and not (instruction.kind in SUMS and instruction.op == "sum"):
            continue
        key = (instruction.kind, instruction.peers, program.types[instruction.buffer].dtype)
        if sum(map(nbytes, open_groups.get(key, []))) + nbytes(instruction) > limit:
            close(key)
        open_groups.setdefault(key, []).append(instruction)
    for key in list(open_groups):
        close(key)
    return done


def _joined(
    group: list[Launch], types: dict[int, TensorType], waits: dict[int, Wait]
) -> tuple[list[Instruction], list[Instruction]]:
    """One collective in the place of several: what packs and launches it, and what awaits and unpacks it.

    Buffers lie side by side: in what a reduce-scatter sends and a gather brings as a row for each rank.
    """
    first = max(group, key=lambda launch: launch.bytes_received)
    origin, dtype = first.origin, types[first.buffer].dtype
    rows = (len(first.peers),)
    sent, brought = (rows if first.kind == kind else () for kind in ("reduce_scatter", "all_gather"))

    def slot(*shape: int) -> int:
        number = len(types)
        while number in types:
            number += 1
        types[number] = TensorType(shape, dtype)
        return number

    def write(fn: Callable[..., object], out: int, *args: object) -> Compute:
        return Compute(fn, args, {}, (out,), origin)

    before: list[Instruction] = []
    sizes = [math.prod(types[launch.buffer].shape) // math.prod(sent) for launch in group]
    pieces = [slot(*sent, n) for n in sizes]
    for launch, piece, n in zip(group, pieces, sizes, strict=True):
        before.append(write(aten.reshape.default, piece, Ref(launch.buffer), [*sent, n]))
    total = sum(sizes)
    buffer, pending, result = slot(*sent, total), slot(*brought, total), slot(*brought, total)
    before.append(write(aten.cat.default, buffer, tuple(map(Ref, pieces)), -1))
    before.append(
        replace(
            first,
            buffer=buffer,
            pending=pending,
            bytes_received=sum(launch.bytes_received for launch in group),
            may_overwrite=True,
            cause=f"{len(group)} small ones together, the largest: {first.cause}",
        )
    )
    after: list[Instruction] = [Wait(pending, result, origin)]
    start = 0
    for launch, n in zip(group, sizes, strict=True):
        piece, shaped = slot(*brought, n), waits[launch.pending].output
        after.append(write(aten.slice.Tensor, piece, Ref(result), len(brought), start, start + n))
        after.append(write(aten.reshape.default, shaped, Ref(piece), list(types[shaped].shape)))
        start += n
    return before, after


def _in_order(program: Program, instructions: list[Instruction]) -> tuple[Instruction, ...]:
    """The instructions with each that reads what comes later put after it."""
    known = {*program.inputs, *program.constants}
    waiting: list[Instruction] = []
    out: list[Instruction] = []

    def place(instruction: Instruction) -> None:
        out.append(instruction)
        known.update(writes(instruction))

    for instruction in instructions:
        if all(s in known for s in reads(instruction)):
            place(instruction)
            ready = [w for w in waiting if all(s in known for s in reads(w))]
            while ready:
                for w in ready:
                    place(w)
                waiting = [w for w in waiting if w not in ready]
                ready = [w for w in waiting if all(s in known for s in reads(w))]
        else:
            waiting.append(instruction)
    assert not waiting
    return tuple(out)
