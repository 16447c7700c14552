"""What does one rank run? A straight list of local ops and collectives, and all that is known of it beforehand."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from megalith.sharding.graph import NOWHERE, Origin, Ref, TensorType, map_refs, refs
from megalith.sharding.layout import Layout
from megalith.sharding.mesh import Mesh

__all__ = ["SUMS", "Compute", "Instruction", "Launch", "Program", "Wait", "without_dead"]


@dataclass(frozen=True, slots=True)
class Compute:
    """`outputs = fn(*args, **kwargs)` on this rank alone; a `Ref` stands for a slot. An output of -1 is dropped."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[int, ...]
    origin: Origin = NOWHERE


@dataclass(frozen=True, slots=True)
class Launch:
    """A collective is started on a buffer; `Wait` gives what arrives.

    Args:
        kind: `all_gather`, `all_reduce`, `reduce_scatter`, `all_to_all` or `exchange`.
        op: `sum`, `max` or `min` for reductions.
        axes: the mesh axes that the group spans.
        peers: the ranks of the group, ascending.
        buffer: the slot that is sent, as `StepRecipe` describes it.
        pending: the slot of the operation under way.
        send, receive: elements to and from each peer, for an exchange.
        bytes_received: what the busiest rank of the group receives.
        may_overwrite: whether the buffer is not read again, so that a reduction may be done in place.
        value: the name of what is moved, layouts and cause: for explanations.
        sizes: of an exchange whose sizes are known only at run time, two slots: counts of the rows of the buffer that
            go to each peer, and of those that come from each; a row of counts for each peer, to be added up. Types and
            bytes are then those of an even share.
    """

    kind: str
    op: str
    axes: tuple[str, ...]
    peers: tuple[int, ...]
    buffer: int
    pending: int
    send: tuple[int, ...]
    receive: tuple[int, ...]
    bytes_received: int
    may_overwrite: bool
    source: Layout
    target: Layout
    origin: Origin
    cause: str
    sizes: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Wait:
    """The result of a launched collective, in the shape that `StepRecipe` describes."""

    pending: int
    output: int
    origin: Origin = NOWHERE


Instruction = Compute | Launch | Wait
SUMS = frozenset({"all_reduce", "reduce_scatter"})
"""The kinds of collectives that combine what ranks send; the others move it."""


@dataclass(frozen=True)
class Program:
    """The program of one rank.

    Args:
        mesh: the mesh.
        rank: whose program it is.
        inputs: the slots fed, in order; `input_names` and `input_layouts` go with them.
        constants: slots that hold tensors of the program itself.
        instructions: in order of execution.
        outputs: a `Ref` to a slot or a constant for each output; `output_layouts` goes with them.
        types: local shape and dtype of every slot.
        donated: inputs whose memory the program may reuse for outputs: pairs `(input position, output position)`.
    """

    mesh: Mesh
    rank: int
    inputs: tuple[int, ...]
    input_names: tuple[str, ...]
    input_layouts: tuple[Layout, ...]
    constants: Mapping[int, torch.Tensor]
    instructions: tuple[Instruction, ...]
    outputs: tuple[Any, ...]
    output_layouts: tuple[Layout | None, ...]
    types: Mapping[int, TensorType]
    donated: tuple[tuple[int, int], ...] = field(default=())

    @cached_property
    def collectives(self) -> tuple[Launch, ...]:
        """The collectives in order."""
        return tuple(i for i in self.instructions if isinstance(i, Launch))

    @cached_property
    def bytes_received(self) -> int:
        """Bytes that the busiest rank of each group receives in one run."""
        return sum(c.bytes_received for c in self.collectives)

    @cached_property
    def last_use(self) -> Mapping[int, int]:
        """For each slot the position of the instruction that reads it last; outputs live on."""
        found: dict[int, int] = {}
        for position, instruction in enumerate(self.instructions):
            for slot in reads(instruction):
                found[slot] = position
        for output in refs(self.outputs):
            found[output.id] = len(self.instructions)
        return found

    @cached_property
    def digest(self) -> str:
        """A fingerprint of the sequence of collectives: ranks of one mesh have to agree on it."""
        text = "\n".join(signature(c, self.types[c.buffer].dtype) for c in self.collectives)
        return hashlib.sha256(text.encode()).hexdigest()

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def signature(launch: Launch, dtype: torch.dtype) -> str:
    """What ranks have to agree on in one collective."""
    layouts = f"{launch.source} -> {launch.target} {list(launch.source.shape)}"
    return f"{launch.kind} {launch.op} {dtype} over {' '.join(launch.axes)}: {layouts}"


def reads(instruction: Instruction) -> tuple[int, ...]:
    """The slots that an instruction reads."""
    if isinstance(instruction, Compute):
        found = refs(instruction.args)
        return tuple([r.id for r in (found + refs(instruction.kwargs) if instruction.kwargs else found)])
    if isinstance(instruction, Launch):
        return (instruction.buffer, *(instruction.sizes or ()))
    return (instruction.pending,)


def writes(instruction: Instruction) -> tuple[int, ...]:
    """The slots that an instruction writes."""
    if isinstance(instruction, Compute):
        return instruction.outputs if -1 not in instruction.outputs else tuple(o for o in instruction.outputs if o >= 0)
    return (instruction.pending,) if isinstance(instruction, Launch) else (instruction.output,)


def renamed(instruction: Instruction, slot: Callable[[int], int], origin: Origin) -> Instruction:
    """The same instruction on other slots."""
    if isinstance(instruction, Compute):

        def new(ref: Ref) -> Ref:
            return Ref(slot(ref.id))

        args, kwargs = map_refs(instruction.args, new), map_refs(instruction.kwargs, new)
        outputs = tuple(o if o < 0 else slot(o) for o in instruction.outputs)
        return Compute(instruction.fn, args, kwargs, outputs, origin)
    if isinstance(instruction, Launch):
        sizes = instruction.sizes and (slot(instruction.sizes[0]), slot(instruction.sizes[1]))
        buffer, pending = slot(instruction.buffer), slot(instruction.pending)
        return replace(instruction, buffer=buffer, pending=pending, sizes=sizes, origin=origin)
    return Wait(slot(instruction.pending), slot(instruction.output), origin)


def without_dead(instructions: Sequence[Instruction], outputs: tuple[Any, ...]) -> list[Instruction]:
    """Drops local ops that nothing reads. Collectives stay: a dead one was never planned."""
    live = {r.id for r in refs(outputs)}
    kept = []
    for instruction in reversed(instructions):
        if not isinstance(instruction, Compute) or any(o in live for o in instruction.outputs):
            kept.append(instruction)
            live.update(reads(instruction))
    return kept[::-1]


def in_order(program: Program, instructions: list[Instruction]) -> tuple[Instruction, ...]:
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


def _lines(program: Program) -> Iterator[str]:
    from megalith.sharding.graph import op_name

    def show(slot: int) -> str:
        return f"%{slot}: {program.types[slot]}"

    for slot, name, layout in zip(program.inputs, program.input_names, program.input_layouts, strict=True):
        yield f"{show(slot)} = input {name}  # {layout}"
    for slot in program.constants:
        yield f"{show(slot)} = constant"
    for i in program.instructions:
        if isinstance(i, Compute):
            args = [repr(a) for a in i.args] + [f"{k}={v!r}" for k, v in i.kwargs.items()]
            outs = ", ".join("_" if o < 0 else show(o) for o in i.outputs)
            yield f"{outs} = {op_name(i.fn)}({', '.join(args)})  # {i.origin.phase} {i.origin.module}"
        elif isinstance(i, Launch):
            yield (
                f"%{i.pending} = launch {i.kind} {i.op} over {' '.join(i.axes)} of %{i.buffer}  "
                f"# {i.bytes_received} bytes; {i.cause}"
            )
        else:
            yield f"{show(i.output)} = wait %{i.pending}"
    yield f"return {', '.join(repr(o) if isinstance(o, Ref) else str(o) for o in program.outputs)}"
