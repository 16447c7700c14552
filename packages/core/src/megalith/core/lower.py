"""How does a partition become the program of one rank? Sizes become local ones, moves become collectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from megalith.core import dispatch, ring
from megalith.core.aliases import aliases
from megalith.core.decompose import FACTORIES
from megalith.core.localize import LOCALIZE, Emit, identity
from megalith.core.program import Compute, Instruction, Launch, Program, Wait, reads, renamed, without_dead
from megalith.sharding.graph import Call, Local, Origin, Ref, TensorType, map_refs, op_name, refs
from megalith.sharding.layout import Layout
from megalith.sharding.partition import Move, Partition, Run, Version
from megalith.sharding.transition import Step, plan
from megalith.sharding.transport import StepRecipe, apply_op, pack, recipe, unpack

__all__ = ["lower"]

aten = torch.ops.aten
EXPAND = {**ring.EXPAND, **dispatch.EXPAND}
"""Ops that become several, collectives among them: each gives what its outputs are, or None where it stays as it is."""


def lower(
    partition: Partition, rank: int, names: tuple[str, ...] | None = None, device: torch.device | None = None
) -> Program:
    """The program of one rank.

    Takes a partition. Gives instructions on local shards: each run with its shape arguments made local, each move as
    its planned steps, packed, launched, awaited and unpacked. After this, all ranks of a group have the same
    collectives in the same order.

    Args:
        partition: the graph laid out.
        rank: the rank, by which sizes, offsets and peers are fixed.
        names: names of the inputs, if not the graph's own.
        device: where tensors are made from nothing; by default the CPU.
    """
    builder = _Builder(partition, rank, {}, device or torch.device("cpu"))
    inputs = [builder.slot_for(v) for v in partition.inputs]
    constants = builder.build()
    outputs = tuple(Ref(builder.slots[o]) if isinstance(o, Version) else o for o in partition.outputs)
    instructions = _mark_overwrites(without_dead(builder.instructions, outputs), {*inputs, *constants}, outputs)
    used = {slot for i in instructions for slot in reads(i)} | {r.id for r in refs(outputs)}
    return Program(
        partition.mesh,
        rank,
        tuple(inputs),
        names or partition.graph.names,
        tuple(v.layout for v in partition.inputs),
        {slot: tensor for slot, tensor in constants.items() if slot in used},
        instructions,
        outputs,
        tuple(o.layout if isinstance(o, Version) else None for o in partition.outputs),
        builder.types,
    )


@dataclass(frozen=True)
class _Template:
    """A block's instructions, to be repeated under other slots."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    instructions: tuple[Instruction, ...]
    types: Mapping[int, TensorType]
    constants: Mapping[int, torch.Tensor]


class _Builder:
    """The instructions so far, and which slot holds which version of which value."""

    def __init__(
        self, partition: Partition, rank: int, blocks: dict[int, _Template], device: torch.device
    ) -> None:
        self.partition = partition
        self.device = device
        self.rank = rank
        self.blocks = blocks  # by id of the block's partition
        self.slots: dict[Version, int] = {}
        self.types: dict[int, TensorType] = {}
        self.constants: dict[int, torch.Tensor] = {}
        self.instructions: list[Instruction] = []
        self.factories: dict[int, Run] = {}  # value -> the run that makes it from nothing

    def build(self) -> dict[int, torch.Tensor]:
        """Writes all instructions; gives the constants by slot."""
        for version in self.partition.constants:
            self.constants[self.slot_for(version)] = self.partition.graph.constants[version.value]
        for step in self.partition.steps:
            if isinstance(step, Move):
                self.move(step)
            elif step.block is not None:
                self.call(step, step.block)
            elif isinstance(step.node.op, Local):
                self.local(step, step.node.op)
            else:
                self.run(step)
        return self.constants

    # --- blocks ---

    def call(self, run: Run, block: Partition) -> None:
        """The instructions of a block, lowered once, under new slots."""
        template = self.blocks.get(id(block))
        if template is None:
            inner = _Builder(block, self.rank, self.blocks, self.device)
            fed = [inner.slot_for(v) for v in block.inputs]
            inner.build()
            outs = tuple(inner.slots[o] for o in block.outputs if isinstance(o, Version))
            live = without_dead(inner.instructions, tuple(Ref(o) for o in outs))
            template = _Template(tuple(fed), outs, tuple(live), inner.types, inner.constants)
            self.blocks[id(block)] = template
        assert isinstance(run.node.op, Call)
        prefix = run.node.op.prefix
        slots = dict(zip(template.inputs, (self.slots[v] for v in run.operands), strict=True))

        def rename(slot: int) -> int:
            new = slots.get(slot)
            if new is None:
                kind = template.types[slot]
                new = slots[slot] = self.new_slot(kind.shape, kind.dtype)
                if slot in template.constants:
                    self.constants[new] = template.constants[slot]
            return new

        origins: dict[Origin, Origin] = {}
        for instruction in template.instructions:
            origin = origins.get(instruction.origin)
            if origin is None:
                inner_path = instruction.origin.module
                module = f"{prefix}.{inner_path}" if inner_path else prefix
                origin = origins[instruction.origin] = replace(instruction.origin, module=module)
            self.instructions.append(renamed(instruction, rename, origin))
        for version, slot in zip(run.outputs, template.outputs, strict=True):
            if version is not None:
                self.slots[version] = rename(slot)

    def local(self, run: Run, local: Local) -> None:
        """The nodes of code that is on shards already."""
        graph = local.graph
        held = {value: self.slots[v] for value, v in zip(graph.inputs, run.operands, strict=True)}
        held.update({value: self.constant(tensor).id for value, tensor in graph.constants.items()})
        for node in graph.nodes:
            args, kwargs = map_refs((node.args, node.kwargs), lambda ref: Ref(held[ref.id]))
            kinds = [graph.types[o] if o >= 0 else None for o in node.outputs]
            outs = tuple(-1 if kind is None else self.new_slot(kind.shape, kind.dtype) for kind in kinds)
            held.update(zip(node.outputs, outs, strict=True))
            origin = replace(run.node.origin, source=node.origin.source)
            self.write(Compute(node.op, args, kwargs, outs, origin))  # type: ignore[arg-type]
        for version, output in zip(run.outputs, graph.outputs, strict=True):
            if version is not None:
                self.slots[version] = held[output.id]

    def write(self, instruction: Compute) -> None:
        """Adds an op; one that makes a tensor from nothing is told the device."""
        if instruction.fn in FACTORIES and self.device.type != "cpu":
            instruction = replace(instruction, kwargs={**instruction.kwargs, "device": self.device})
        self.instructions.append(instruction)

    # --- slots ---

    def new_slot(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        slot = len(self.types)
        self.types[slot] = TensorType(tuple(shape), dtype)
        return slot

    def slot_for(self, version: Version) -> int:
        dtype = self.partition.types[version.value].dtype
        slot = self.new_slot(version.layout.local_shape(self.rank), dtype)
        self.slots[version] = slot
        return slot

    def constant(self, tensor: torch.Tensor) -> Ref:
        slot = self.new_slot(tuple(tensor.shape), tensor.dtype)
        self.constants[slot] = tensor.to(self.device)
        return Ref(slot)

    # --- runs ---

    def run(self, run: Run) -> None:
        node = run.node
        operands = iter(run.operands)
        args, kwargs = map_refs((node.args, node.kwargs), lambda _: Ref(self.slots[next(operands)]))
        shapes = [None if o is None else o.layout.local_shape(self.rank) for o in run.outputs]
        if identity(node.op):
            assert run.outputs[0] is not None
            self.slots[run.outputs[0]] = args[0].id
            return
        if node.name == "aten.full.default":
            self.factories[node.outputs[0]] = run

        def emit(fn: Callable[..., Any], *a: Any, out: int | None = None, **k: Any) -> Any:
            """One op; the types of its outputs are learnt from torch's meta kernels unless the slot is given."""
            slots = self.infer(fn, a, k) if out is None else (out,)
            self.write(Compute(fn, a, k, slots, node.origin))
            return Ref(slots[0]) if len(slots) == 1 else tuple(map(Ref, slots))

        expand = EXPAND.get(node.name)
        start, graph = partial(self.start, node.origin), self.partition.graph
        context = Emit(run, self.rank, args, kwargs, (), self.types, graph, emit, start)
        results = expand(context) if expand is not None else None
        if results is not None:
            self.slots.update((v, ref.id) for v, ref in zip(run.outputs, results, strict=True) if v is not None)
            return
        outs = tuple(-1 if v is None else self.slot_for(v) for v in run.outputs)
        if all(s is not None and 0 in s for s in shapes):
            for slot, shape in zip(outs, shapes, strict=True):
                emit(aten.full.default, list(shape or ()), 0, out=slot, dtype=self.types[slot].dtype)
            return
        localize = LOCALIZE.get(node.name)
        if localize is not None:
            changed = localize(replace(context, outputs=outs))
            if changed is None:
                return
            args, kwargs = changed
        self.write(Compute(node.op, args, kwargs, outs, node.origin))  # type: ignore[arg-type]

    def start(
        self,
        origin: Origin,
        kind: str,
        axes: tuple[str, ...],
        buffer: Ref,
        shape: tuple[int, ...],
        nbytes: int,
        layout: Layout,
        why: str,
        *,
        send: tuple[int, ...] = (),
        receive: tuple[int, ...] = (),
        sizes: tuple[int, int] | None = None,
    ) -> Callable[[], Ref]:
        """Launches a collective that an op asks for; the result awaits what arrives."""
        pending, result = (self.new_slot(shape, self.types[buffer.id].dtype) for _ in range(2))
        peers, same = layout.mesh.peers(self.rank, axes), (layout, layout)
        self.instructions.append(
            Launch(kind, "", axes, peers, buffer.id, pending, send, receive, nbytes, False, *same, origin, why, sizes)
        )

        def arrived() -> Ref:
            self.instructions.append(Wait(pending, result, origin))
            return Ref(result)

        return arrived

    def infer(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> tuple[int, ...]:
        def meta(ref: Ref) -> torch.Tensor:
            kind = self.types[ref.id]
            return torch.empty(kind.shape, dtype=kind.dtype, device="meta")

        meta_kwargs = {**kwargs, "device": "meta"} if op_name(fn).startswith("aten.full") else kwargs
        made = fn(*map_refs(args, meta), **map_refs(meta_kwargs, meta))
        outs = (made,) if isinstance(made, torch.Tensor) else made
        return tuple(self.new_slot(tuple(out.shape), out.dtype) for out in outs)

    # --- moves ---

    def move(self, move: Move) -> None:
        source, target = move.source, move.target
        factory = self.factories.get(source.value)
        if factory is not None and not target.layout.partial:
            slot = self.slot_for(target)
            shape = list(target.layout.local_shape(self.rank))
            node = factory.node
            self.write(Compute(node.op, (shape, *node.args[1:]), node.kwargs, (slot,), node.origin))  # type: ignore[arg-type]
            return
        slot = self.slots[source]
        for step in plan(source.layout, target.layout, move.dtype_size).steps:
            slot = self.step(step, slot, move)
        if self.types[slot].shape != target.layout.local_shape(self.rank):
            raise AssertionError(f"{source.layout} -> {target.layout} gave {self.types[slot]}")
        self.slots[target] = slot

    def step(self, step: Step, slot: int, move: Move) -> int:
        dtype = self.types[slot].dtype
        how = recipe(step, self.rank)
        packed = self._pack_exchange if step.kind == "exchange" else self._pack
        buffer = packed(step, how, slot, move)
        if step.kind in ("slice", "zero"):
            return buffer
        n = len(how.peers)
        arrived = {
            "all_gather": (n, *how.chunk),
            "all_to_all": (n, *how.chunk),
            "all_reduce": how.chunk,
            "reduce_scatter": how.chunk,
            "exchange": (sum(how.receive_sizes),),
        }[step.kind]
        pending = self.new_slot(arrived, dtype)
        result = self.new_slot(arrived, dtype)
        self.instructions.append(
            Launch(
                step.kind,
                step.op,
                step.axes,
                how.peers,
                buffer,
                pending,
                how.send_sizes,
                how.receive_sizes,
                step.cost(move.dtype_size).bytes_received,
                False,
                step.source,
                step.target,
                move.origin,
                move.cause,
            )
        )
        self.instructions.append(Wait(pending, result, move.origin))
        if step.kind == "exchange":
            out = self.new_slot(how.shape, dtype)
            fn = _named("unpack_exchange", unpack, step, self.rank)
            self.write(Compute(fn, (Ref(result),), {}, (out,), move.origin))
            return out
        return self.transport(how, how.unpack, result, move)

    def _pack(self, step: Step, how: StepRecipe, slot: int, move: Move) -> int:
        return self.transport(how, how.pack, slot, move)

    def _pack_exchange(self, step: Step, how: StepRecipe, slot: int, move: Move) -> int:
        out = self.new_slot((sum(how.send_sizes),), self.types[slot].dtype)
        fn = _named("pack_exchange", pack, step, self.rank)
        self.write(Compute(fn, (Ref(slot),), {}, (out,), move.origin))
        return out

    def transport(self, how: StepRecipe, ops: Any, slot: int, move: Move) -> int:
        """Local reordering before or after a collective, as plain ops."""
        for name, parameter in ops:
            shape, dtype = self.types[slot].shape, self.types[slot].dtype
            fn, args, new = _transport_op(name, parameter, shape, dtype, self.constant)
            out = self.new_slot(new, dtype)
            self.write(Compute(fn, (Ref(slot), *args), {}, (out,), move.origin))
            slot = out
        return slot


def _transport_op(
    name: str, parameter: Any, shape: tuple[int, ...], dtype: torch.dtype, constant: Callable[[torch.Tensor], Ref]
) -> tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]:
    """A transport operation as a function, its further arguments and the shape of its result."""
    if name == "reshape":
        return aten.reshape.default, (list(parameter),), tuple(parameter)
    if name == "permute":
        return aten.permute.default, (list(parameter),), tuple(shape[d] for d in parameter)
    if name == "narrow":
        dim, start, length = parameter
        return aten.slice.Tensor, (dim, start, start + length), (*shape[:dim], length, *shape[dim + 1 :])
    if name == "select":
        dim, index = parameter
        return aten.index_select.default, (dim, constant(index)), (*shape[:dim], len(index), *shape[dim + 1 :])
    new = parameter if name == "pad" else parameter[0]
    return _named(name, apply_op, name, parameter), (), tuple(new)


def _named(name: str, fn: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """`fn` with its first arguments fixed, under a name for the program's text."""
    bound = partial(fn, *args)
    bound.__name__ = name  # type: ignore[attr-defined]
    return bound


def _mark_overwrites(
    instructions: list[Instruction], pinned: set[int], outputs: tuple[Any, ...]
) -> tuple[Instruction, ...]:
    """Marks the reductions whose buffer nobody else reads: these are done in place.

    A buffer that may share memory with another slot (a view of it, or the other way round) is not marked.
    """
    root = aliases(instructions).root
    last: dict[int, int] = {}
    for position, instruction in enumerate(instructions):
        for slot in reads(instruction):
            last[root(slot)] = position
    kept_alive = {root(slot) for slot in pinned} | {root(ref.id) for ref in refs(outputs)}
    marked: list[Instruction] = []
    for position, instruction in enumerate(instructions):
        if isinstance(instruction, Launch):
            buffer = root(instruction.buffer)
            if last.get(buffer) == position and buffer not in kept_alive:
                instruction = replace(instruction, may_overwrite=True)
        marked.append(instruction)
    return tuple(marked)
