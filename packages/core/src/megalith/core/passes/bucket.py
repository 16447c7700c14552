"""Which small collectives travel together? All-reduces below a size, side by side in one buffer.

Takes a program. Gives one in which small all-reduces over one group and of one dtype are joined, as far as none waits
for another: each costs a message otherwise. Large ones stay alone: copying them would cost more than it saves.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from megalith.core.program import Compute, Instruction, Launch, Program, Wait, reads, writes
from megalith.sharding.graph import Ref, TensorType

__all__ = ["bucket"]

aten = torch.ops.aten


def bucket(program: Program, small: int = 256 << 10, limit: int = 4 << 20) -> Program:
    """The program with small all-reduces joined.

    Args:
        program: a rank's program.
        small: all-reduces of fewer bytes are joined.
        limit: up to so many bytes together.
    """
    groups = _groups(program, small, limit)
    if not groups:
        return program
    types = dict(program.types)
    waits = {i.pending: i for i in program.instructions if isinstance(i, Wait)}
    group_of = {launch.pending: group for group in groups for launch in group}
    unpacking: dict[int, list[Instruction]] = {}  # by the pending slot of a group's last launch
    out: list[Instruction] = []
    for instruction in program.instructions:
        if not isinstance(instruction, (Launch, Wait)) or instruction.pending not in group_of:
            out.append(instruction)
            continue
        group = group_of[instruction.pending]
        last = group[-1].pending
        if isinstance(instruction, Wait):
            out.extend(unpacking.pop(last, []))
        elif instruction.pending == last:
            packing, unpacking[last] = _joined(group, types, waits)
            out.extend(packing)
    for rest in unpacking.values():
        out.extend(rest)
    return replace(program, instructions=_in_order(program, out), types=types)


def _groups(program: Program, small: int, limit: int) -> list[list[Launch]]:
    """Runs of small all-reduces; the result of none is read before the last of its run is launched."""
    open_groups: dict[object, list[Launch]] = {}
    done: list[list[Launch]] = []
    awaited: dict[int, object] = {}  # what a wait of an open group writes

    def close(key: object) -> None:
        group = open_groups.pop(key, [])
        if len(group) > 1:
            done.append(group)

    for instruction in program.instructions:
        for slot in reads(instruction):
            if not isinstance(instruction, Wait) and slot in awaited:
                close(awaited[slot])
        if isinstance(instruction, Wait):
            for key, group in open_groups.items():
                if any(launch.pending == instruction.pending for launch in group):
                    awaited[instruction.output] = key
        if not isinstance(instruction, Launch) or instruction.kind != "all_reduce":
            continue
        kind = program.types[instruction.buffer]
        if kind.nbytes >= small or instruction.op != "sum":
            continue
        key = (instruction.peers, kind.dtype)
        group = open_groups.get(key, [])
        if sum(program.types[launch.buffer].nbytes for launch in group) + kind.nbytes > limit:
            close(key)
        open_groups.setdefault(key, []).append(instruction)
    for key in list(open_groups):
        close(key)
    return done


def _joined(
    group: list[Launch], types: dict[int, TensorType], waits: dict[int, Wait]
) -> tuple[list[Instruction], list[Instruction]]:
    """One all-reduce in the place of several: what packs and launches it, and what awaits and unpacks it."""
    first = max(group, key=lambda launch: launch.bytes_received)
    origin = first.origin
    dtype = types[first.buffer].dtype
    sizes = [types[launch.buffer] for launch in group]
    out: list[Instruction] = []

    def slot(shape: tuple[int, ...]) -> int:
        number = len(types)
        while number in types:
            number += 1
        types[number] = TensorType(shape, dtype)
        return number

    flat = []
    for launch, kind in zip(group, sizes, strict=True):
        n = _numel(kind)
        piece = slot((n,))
        out.append(Compute(aten.reshape.default, (Ref(launch.buffer), [n]), {}, (piece,), origin))
        flat.append(Ref(piece))
    total = sum(_numel(kind) for kind in sizes)
    buffer, pending, result = slot((total,)), slot((total,)), slot((total,))
    out.append(Compute(aten.cat.default, (tuple(flat),), {}, (buffer,), origin))
    out.append(
        replace(
            first,
            buffer=buffer,
            pending=pending,
            bytes_received=sum(launch.bytes_received for launch in group),
            may_overwrite=True,
            origin=origin,
            cause=f"{len(group)} small ones together, the largest: {first.cause}",
        )
    )
    after: list[Instruction] = [Wait(pending, result, origin)]
    start = 0
    for launch, kind in zip(group, sizes, strict=True):
        n = _numel(kind)
        piece = slot((n,))
        after.append(Compute(aten.slice.Tensor, (Ref(result), 0, start, start + n), {}, (piece,), origin))
        shaped = waits[launch.pending].output
        after.append(Compute(aten.reshape.default, (Ref(piece), list(kind.shape)), {}, (shaped,), origin))
        start += n
    return out, after


def _numel(kind: TensorType) -> int:
    n = 1
    for size in kind.shape:
        n *= size
    return n


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
