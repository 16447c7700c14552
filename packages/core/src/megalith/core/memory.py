"""How much memory does a program take, instruction by instruction? From the storages of its ops, without running it.

A slot is freed after its last use, a storage with its last slot; inputs belong to the caller, who holds them
to the end, donated ones too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from megalith.core import _compat
from megalith.core.backends.direct import is_direct, sums_directly
from megalith.core.effects import Effect, Lying, effects
from megalith.core.explain import aligned, amount, merge_names, star
from megalith.core.program import Compute, Instruction, Launch, Program, Wait, reads, writes
from megalith.sharding.graph import op_name, refs

__all__ = ["KINDS", "Buffer", "MemoryReport", "memory"]

KINDS = ("inputs", "outputs", "saved", "communication", "temporary")
"""What a buffer is for: fed in (constants too), handed back, an activation kept for the backward, or passing by."""


@dataclass(frozen=True)
class Buffer:
    """One allocation.

    Args:
        name: of an input its name, else the op or the collective that made it.
        module: the path of the module that made it.
        shape, dtype: of the first tensor in it.
        bytes: as allocated.
        kind: one of `KINDS`.
        created, freed: positions of instructions: it is there in `range(created, freed + 1)`.
    """

    name: str
    module: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int
    kind: str
    created: int
    freed: int


@dataclass(frozen=True)
class MemoryReport:
    """What one rank's tensors take over a program; `str()` gives a table of the peak.

    Args:
        rank: whose.
        buffers: every allocation, in order of creation.
        curve: bytes allocated at the height of each instruction.
        by_kind: the same curve in parts, by kind of buffer; they add up to `curve`.
        start: bytes of the inputs and constants, before the first instruction.
        instructions: a name for each instruction.
    """

    rank: int
    buffers: tuple[Buffer, ...]
    curve: tuple[int, ...]
    by_kind: Mapping[str, tuple[int, ...]]
    start: int
    instructions: tuple[str, ...]

    @cached_property
    def peak(self) -> int:
        """The most bytes at one time, inputs included."""
        return max(self.curve, default=self.start)

    @cached_property
    def peak_position(self) -> int:
        """The first instruction at the peak."""
        return self.curve.index(self.peak) if self.curve else 0

    @cached_property
    def at_peak(self) -> tuple[Buffer, ...]:
        """The buffers alive at the peak, the largest first."""
        alive = [b for b in self.buffers if b.created <= self.peak_position <= b.freed]
        return tuple(sorted(alive, key=lambda b: -b.bytes))

    def grouped(self) -> list[tuple[str, str, str, int, int]]:
        """The buffers at the peak, alike ones merged: kind, name, module, count and bytes, the most bytes first."""
        groups: dict[Any, list[Buffer]] = {}
        for b in self.at_peak:
            groups.setdefault((b.kind, star(b.name), star(b.module), b.shape, b.dtype), []).append(b)
        rows = []
        for (kind, *_), members in groups.items():
            (name,) = merge_names([b.name for b in members])
            (module,) = merge_names([b.module for b in members])
            what = f"{name} {str(members[0].dtype).removeprefix('torch.')}{list(members[0].shape)}"
            rows.append((kind, what, module, len(members), sum(b.bytes for b in members)))
        return sorted(rows, key=lambda row: -row[4])

    def __str__(self) -> str:
        where = f" in {self.instructions[self.peak_position]}" if self.curve else ""
        lines = [f"rank {self.rank}: peak {amount(self.peak)}, at instruction {self.peak_position}{where}"]
        if self.curve:
            parts = {kind: curve[self.peak_position] for kind, curve in self.by_kind.items()}
            lines.append("  " + ", ".join(f"{kind} {amount(nbytes)}" for kind, nbytes in parts.items() if nbytes))
        rows = self.grouped()
        cells = [(amount(b), n, kind, what, module or "-") for kind, what, module, n, b in rows[:20]]
        lines += aligned(("bytes", "count", "kind", "buffer", "module"), cells, right=(0, 1))
        if len(rows) > 20:
            lines.append(f"and {len(rows) - 20} more, {amount(sum(row[4] for row in rows[20:]))}")
        return "\n".join(lines)

    def plot(self, path: str) -> None:
        """Writes a picture of the curve, stacked by kind, to a file (png, svg or pdf). Needs matplotlib."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 4), layout="constrained")
        axes = figure.add_subplot()
        used = [kind for kind in KINDS if any(self.by_kind[kind])]
        axes.stackplot(
            range(len(self.curve)), *([b / 1e6 for b in self.by_kind[kind]] for kind in used), labels=used, step="post"
        )
        axes.axvline(self.peak_position, color="black", linewidth=0.8, linestyle=":")
        axes.set(xlabel="instruction", ylabel="MB", title=f"rank {self.rank}: peak {amount(self.peak)}")
        axes.margins(x=0)
        axes.legend(loc="upper left", frameon=False)
        figure.savefig(path)


def memory(program: Program, granularity: int = 64) -> MemoryReport:
    """What a program's tensors take on one rank of a CPU over gloo. Nothing runs.

    Args:
        program: one rank's program.
        granularity: each allocation is rounded up to a multiple of this many bytes: 64 is the alignment of torch's CPU
            allocator, 512 the block of its CUDA allocator, 1 counts the bytes asked for.

    >>> from megalith.core.shard import shard
    >>> from megalith.sharding import Mesh
    >>> step = shard(lambda x, w: (x @ w).relu(), Mesh("tp=2"), {"w": "e (tp f)"}, backend="virtual")
    >>> report = memory(step.program(torch.ones(64, 32), torch.ones(32, 64)))
    >>> report.start, report.curve      # x and half of w; then 64 x 32 numbers, the product and in its place its relu
    (12288, (20480, 20480))
    """
    return _Walk(program, granularity).report()


_TERMS = 1 << 40  # sets apart the stand-ins for the other terms of a sum


class _Walk:
    """The allocations of a program, in order."""

    def __init__(self, program: Program, granularity: int) -> None:
        self.program, self.granularity = program, granularity
        self.storage: dict[int, int] = {}  # slot -> its storage
        self.slots: dict[int, set[int]] = {}  # storage -> the live slots in it
        self.made: list[tuple[str, str, tuple[int, ...], torch.dtype, int, int]] = []
        self.fresh: list[Instruction | None] = []
        self.freed: dict[int, int] = {}
        self.last_read: dict[int, int] = {}
        self.workspace: list[int] = []

    def allocate(self, name: str, module: str, lying: Lying, nbytes: int, position: int, slot: int) -> int:
        rounded = -(-nbytes // self.granularity) * self.granularity
        storage = len(self.made)
        self.made.append((name, module, lying.shape, lying.dtype, rounded, position))
        self.fresh.append(self.program.instructions[position] if position >= 0 else None)
        self.slots[storage] = set()
        self.hold(slot, storage)
        return storage

    def hold(self, slot: int, storage: int) -> None:
        self.storage[slot] = storage
        self.slots[storage].add(slot)

    def release(self, slot: int, position: int) -> None:
        storage = self.storage.get(slot)
        if storage is None or slot not in self.slots[storage]:
            return
        self.slots[storage].discard(slot)
        if not self.slots[storage]:
            self.freed[storage] = position

    def report(self) -> MemoryReport:
        program = self.program
        pinned = self.start()
        last = program.last_use
        sent: dict[int, tuple[int, ...]] = {}  # pending slot -> stand-ins for buffers that are needed until its wait
        for slot in set(program.inputs) - pinned - set(last):
            self.release(slot, -1)
        done = effects(program)
        for position, (instruction, effect) in enumerate(zip(program.instructions, done, strict=True)):
            for slot in reads(instruction):
                self.last_read[self.storage[slot]] = position
            extra = effect.workspace
            if isinstance(instruction, Compute):
                self.compute(instruction, effect, position)
            elif isinstance(instruction, Launch):
                extra += self.launch(instruction, effect, position, sent)
            else:
                self.wait(instruction, position)
                for hidden in sent.pop(instruction.pending):
                    self.release(hidden, position)
            self.workspace.append(-(-extra // self.granularity) * self.granularity)
            for slot in dict.fromkeys((*reads(instruction), *writes(instruction))):
                if last.get(slot, position) == position and slot not in pinned:
                    self.release(slot, position)
        return self.finish()

    def start(self) -> set[int]:
        """Allocates inputs and constants; gives the slots that the program may not free."""
        program = self.program
        for slot, name in zip(program.inputs, program.input_names, strict=True):
            kind = program.types[slot]
            self.allocate(name, "", Lying.packed(kind.shape, kind.dtype), kind.nbytes, -1, slot)
        seen: dict[int, int] = {}
        for slot, tensor in program.constants.items():
            storage = seen.get(_compat.storage_id(tensor))
            if storage is None:
                size = tensor.untyped_storage().nbytes()
                storage = self.allocate("constant", "", Lying.of(tensor), size, -1, slot)
                seen[_compat.storage_id(tensor)] = storage
            self.hold(slot, storage)
        return set(program.inputs) | set(program.constants)

    def compute(self, instruction: Compute, effect: Effect, position: int) -> None:
        operands = reads(instruction)
        for slot, output in zip(instruction.outputs, effect.outputs, strict=True):
            if output is None:
                continue
            if output.alias is not None:
                if slot >= 0:
                    self.hold(slot, self.storage[operands[output.alias]])
                continue
            name, module = op_name(instruction.fn), instruction.origin.module
            key = slot if slot >= 0 else -1 - position
            self.allocate(name, module, output.lying, output.nbytes, position, key)
            if slot < 0:
                self.release(key, position)

    def launch(self, launch: Launch, effect: Effect, position: int, sent: dict[int, tuple[int, ...]]) -> int:
        """Allocates what a collective writes, and a copy of what it sends where that is not contiguous."""
        kind, module = self.program.types[launch.pending], launch.origin.module
        buffer = effect.operands[0]
        hidden = -1 - position
        sent[launch.pending] = (hidden,)
        if buffer.contiguous:
            self.hold(hidden, self.storage[launch.buffer])
        else:
            packed = Lying.packed(buffer.shape, buffer.dtype)
            self.allocate(f"{launch.kind} (packed)", module, packed, packed.nbytes, position, hidden)
        if launch.kind == "all_reduce" and (launch.may_overwrite or not buffer.contiguous):
            self.hold(launch.pending, self.storage[hidden])
            return 0
        n = len(launch.peers)
        lying = Lying.packed(kind.shape, kind.dtype)
        if launch.kind == "reduce_scatter" and sums_directly(n, lying.nbytes, kind.dtype):
            # The rank's own term stays where it is, and the sum takes the place of another one.
            if n > 2:
                rest = Lying.packed((n - 2, *kind.shape), kind.dtype)
                self.allocate(f"{launch.kind} (terms)", module, rest, rest.nbytes, position, hidden - _TERMS)
                sent[launch.pending] = (hidden, hidden - _TERMS)
        elif launch.kind == "reduce_scatter":  # gloo: an all-to-all, then a sum
            lying = Lying.packed((n, *kind.shape), kind.dtype)
        self.allocate(launch.kind, module, lying, lying.nbytes, position, launch.pending)
        flat = launch.kind == "all_gather" and not is_direct(n, lying.nbytes // n)
        return lying.nbytes if flat else 0  # gloo gathers into a flat copy

    def wait(self, wait: Wait, position: int) -> None:
        kind = self.program.types[wait.output]
        storage = self.storage[wait.pending]
        if math.prod(self.made[storage][2]) > math.prod(kind.shape):
            lying = Lying.packed(kind.shape, kind.dtype)
            self.allocate("reduce_scatter (sum)", wait.origin.module, lying, lying.nbytes, position, wait.output)
        else:
            self.hold(wait.output, storage)

    def finish(self) -> MemoryReport:
        program, end = self.program, len(self.program.instructions)
        handed_back = {self.storage[ref.id] for ref in refs(program.outputs)}
        buffers = []
        for number, (made, instruction) in enumerate(zip(self.made, self.fresh, strict=True)):
            created, freed = made[5], self.freed.get(number, end)
            if instruction is None:
                kind = "inputs"
            elif number in handed_back:
                kind = "outputs"
            elif self._is_saved(instruction, number):
                kind = "saved"
            else:
                kind = "temporary" if isinstance(instruction, Compute) else "communication"
            buffers.append(Buffer(*made[:5], kind, created, freed))
        changes = {kind: [0] * (end + 1) for kind in KINDS}
        for b in buffers:
            changes[b.kind][max(b.created, 0)] += b.bytes
            if b.freed < end:
                changes[b.kind][b.freed + 1] -= b.bytes
        by_kind = {kind: list(_running(change))[:end] for kind, change in changes.items()}
        for position, (instruction, extra) in enumerate(zip(program.instructions, self.workspace, strict=True)):
            by_kind["temporary" if isinstance(instruction, Compute) else "communication"][position] += extra
        curve = tuple(map(sum, zip(*by_kind.values(), strict=True)))
        names = tuple(f"{i.origin.phase} {_name(i)} {i.origin.module}".rstrip() for i in program.instructions)
        start = sum(b.bytes for b in buffers if b.kind == "inputs")
        return MemoryReport(
            program.rank, tuple(buffers), curve, {k: tuple(v) for k, v in by_kind.items()}, start, names
        )

    def _is_saved(self, instruction: Instruction, storage: int) -> bool:
        """Whether a storage that the forward made is read after it."""
        reader = self.last_read.get(storage)
        if instruction.origin.phase != "forward" or reader is None:
            return False
        return self.program.instructions[reader].origin.phase != "forward"


def _running(changes: Sequence[int]) -> Iterator[int]:
    total = 0
    for change in changes:
        total += change
        yield total


def _name(instruction: Instruction) -> str:
    if isinstance(instruction, Compute):
        return op_name(instruction.fn)
    return instruction.kind if isinstance(instruction, Launch) else "wait"
