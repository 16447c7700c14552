"""Which small collectives travel together? Those below a size, of one kind, side by side in one buffer.

Takes a program. Gives one in which small all-reduces, reduce-scatters and all-gathers, over one group and of one dtype,
are joined, as far as none waits for another: each costs a message otherwise. Gathers of inputs go with the first of
them, all others with the last. Large ones stay alone: copying them would cost more than it saves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import replace

import torch

from megalith.core.passes.prefetch import gathers_of_inputs
from megalith.core.program import SUMS, Compute, Instruction, Launch, Program, Wait, in_order, reads, writes
from megalith.sharding.graph import Ref, TensorType

__all__ = ["bucket"]

aten = torch.ops.aten


def bucket(program: Program, small: int = 256 << 10, limit: int = 4 << 20) -> Program:
    """The program with small collectives joined.

    Args:
        program: a rank's program.
        small: collectives of fewer bytes are joined: of the operand of a sum, of the result of a gather.
        limit: up to so many bytes together; of gathers of inputs, whose results wait for their use, half of `small`.
    """
    order = program.instructions
    packing = {}  # of gathers of inputs: by the pending slot, positions of what packs the operand
    for gather in gathers_of_inputs(program):
        *packs, last = gather.members
        packing[writes(order[last])[0]] = packs
    groups = _groups(program, packing.keys(), small, limit)
    if not groups:
        return program
    types = dict(program.types)
    waits = {i.pending: i for i in order if isinstance(i, Wait)}
    group_of = {launch.pending: group for group in groups for launch in group}
    issued = {group[0 if group[0].pending in packing else -1].pending: group for group in groups}
    early: set[int] = set()  # what packs gathers: it stands before the first gather of the group
    unpacking: dict[int, list[Instruction]] = {}  # by the pending slot of a group's first launch
    out: list[Instruction] = []
    for launch in (launch for group in groups for launch in group):
        early.update(packing.get(launch.pending, ()))
    for n, instruction in enumerate(order):
        if n in early:
            continue
        if not isinstance(instruction, (Launch, Wait)) or instruction.pending not in group_of:
            out.append(instruction)
        elif isinstance(instruction, Wait):
            out.extend(unpacking.pop(group_of[instruction.pending][0].pending, []))
        elif instruction.pending in issued:
            group = issued[instruction.pending]
            out.extend(order[m] for launch in group for m in packing.get(launch.pending, ()))
            joining, unpacking[group[0].pending] = _joined(group, types, waits)
            out.extend(joining)
    for rest in unpacking.values():
        out.extend(rest)
    return replace(program, instructions=in_order(program, out), types=types)


def _groups(program: Program, of_inputs: Collection[int], small: int, limit: int) -> list[list[Launch]]:
    """Runs of small collectives; no result is read before the run is launched."""
    open_groups: dict[object, list[Launch]] = {}
    done: list[list[Launch]] = []
    awaited: dict[int, object] = {}  # what a wait of an open group that goes with its last writes

    def close(key: object) -> None:
        group = open_groups.pop(key, [])
        if len(group) > 1:
            done.append(group)

    def nbytes(launch: Launch) -> int:
        return program.types[launch.buffer if launch.kind in SUMS else launch.pending].nbytes

    for instruction in program.instructions:
        for slot in reads(instruction):
            if not isinstance(instruction, Wait) and slot in awaited:
                close(awaited[slot])
        if isinstance(instruction, Wait):
            for key, group in open_groups.items():
                late = group[0].pending not in of_inputs
                if late and any(launch.pending == instruction.pending for launch in group):
                    awaited[instruction.output] = key
        if not isinstance(instruction, Launch) or nbytes(instruction) >= small:
            continue
        if instruction.kind != "all_gather" and not (instruction.kind in SUMS and instruction.op == "sum"):
            continue
        dtype = program.types[instruction.buffer].dtype
        # Of inputs, those of the forward and of the backward stay apart: the same are gathered in both.
        when = instruction.origin.phase if instruction.pending in of_inputs else ""
        key = (instruction.kind, instruction.peers, dtype, when)
        most = small // 2 if when else limit
        if sum(map(nbytes, open_groups.get(key, []))) + nbytes(instruction) > most:
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
            cause=f"{len(group)} small ones together: {'; '.join(dict.fromkeys(launch.cause for launch in group))}",
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
