"""What does each op do to memory? Which outputs are views, what it allocates, and what it needs on the way.

Each op runs once on meta tensors with the strides that the real ones have, so views are told from copies as torch does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megalith.core import _compat
from megalith.core.program import Compute, Launch, Program, Wait, reads
from megalith.sharding.graph import Ref, map_refs, op_name

__all__ = ["Effect", "Lying", "Output", "effects"]

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Lying:
    """How a tensor lies in its storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, those that stride 0 repeats counted once."""
        sizes = (n for n, step in zip(self.shape, self.stride, strict=True) if step or not n)
        return math.prod(sizes) * self.dtype.itemsize

    @property
    def contiguous(self) -> bool:
        return self.meta().is_contiguous()

    def meta(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")

    @staticmethod
    def of(tensor: torch.Tensor) -> Lying:
        return Lying(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)

    @staticmethod
    def packed(shape: Sequence[int], dtype: torch.dtype) -> Lying:
        return Lying.of(torch.empty(tuple(shape), dtype=dtype, device="meta"))


@dataclass(frozen=True, slots=True)
class Output:
    """One output of an op: in the storage of operand `alias`, or in a new one of `nbytes` (then `alias` is None)."""

    lying: Lying
    alias: int | None
    nbytes: int


@dataclass(frozen=True, slots=True)
class Effect:
    """What an instruction does to memory.

    Args:
        operands: how its operands lie, in order of appearance.
        outputs: for each of its outputs; None for what is dropped or no tensor.
        workspace: bytes that the op allocates and frees within, beside its outputs.
    """

    operands: tuple[Lying, ...]
    outputs: tuple[Output | None, ...] = ()
    workspace: int = 0


def effects(program: Program) -> tuple[Effect, ...]:
    """What each instruction does to memory, on a CPU.

    Takes a program. Gives an effect for each instruction: of a `Launch` the buffer that it sends, of a `Wait` nothing.
    """
    known: dict[Any, Effect] = {}
    lying = {slot: Lying.packed(program.types[slot].shape, program.types[slot].dtype) for slot in program.inputs}
    lying |= {slot: Lying.of(tensor) for slot, tensor in program.constants.items()}
    found = []
    for instruction in program.instructions:
        if isinstance(instruction, Wait):
            kind = program.types[instruction.output]
            lying[instruction.output] = Lying.packed(kind.shape, kind.dtype)
            found.append(Effect(()))
            continue
        operands = tuple(lying[slot] for slot in reads(instruction))
        if isinstance(instruction, Launch):
            found.append(Effect(operands))
            continue
        numbers = iter(range(len(operands)))
        args, kwargs = map_refs((instruction.args, dict(instruction.kwargs)), lambda _: Ref(next(numbers)))  # noqa: B023
        key = instruction.fn, operands, repr((args, kwargs))
        if key not in known:
            known[key] = _effect(instruction, args, kwargs, operands, program)
        effect = known[key]
        for slot, output in zip(instruction.outputs, effect.outputs, strict=True):
            if slot >= 0 and output is not None:
                lying[slot] = output.lying
        found.append(effect)
    return tuple(found)


def _effect(instruction: Compute, args: Any, kwargs: Any, operands: tuple[Lying, ...], program: Program) -> Effect:
    fn, name = instruction.fn, op_name(instruction.fn)
    metas = [operand.meta() for operand in operands]
    storages = {_compat.storage_id(meta): i for i, meta in reversed(list(enumerate(metas)))}
    schema = getattr(fn, "_schema", None)
    if schema is not None and any(argument.name == "device" for argument in schema.arguments):
        kwargs = {**kwargs, "device": "meta"}
    args, kwargs = map_refs((args, kwargs), lambda ref: metas[ref.id])
    try:
        with torch.no_grad():
            results = META.get(name, fn)(*args, **kwargs)
    except (NotImplementedError, RuntimeError):  # no meta kernel: its outputs are taken to be new and contiguous
        kinds = [program.types[slot] if slot >= 0 else None for slot in instruction.outputs]
        results = [None if k is None else torch.empty(k.shape, dtype=k.dtype, device="meta") for k in kinds]
    else:
        results = (results,) if _compat.returns_one_tensor(fn) else results
    outputs: list[Output | None] = []
    for result in results:
        if not isinstance(result, torch.Tensor):
            outputs.append(None)
            continue
        storage = _compat.storage_id(result)
        alias = storages.get(storage)
        outputs.append(Output(Lying.of(result), alias, 0 if alias is not None else result.untyped_storage().nbytes()))
    return Effect(operands, tuple(outputs), _workspace(fn, name, operands, outputs))


def _flash(q: Any, k: Any, v: Any, mask: Any, causal: bool, scale: float) -> Any:
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)


def _flash_backward(g: Any, q: Any, k: Any, v: Any, mask: Any, out: Any, lse: Any, causal: bool, scale: float) -> Any:
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        g, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale
    )


META: dict[str, Callable[..., Any]] = {
    "megalith.sdpa.default": _flash,
    "megalith.sdpa_backward.default": _flash_backward,
}
"""Ops whose meta kernel gives other strides than the CPU's."""


# --- workspaces: what ops allocate beside their outputs, as measured on torch's CPU kernels -------------

Operands = Sequence[Lying]
Outputs = Sequence[Output | None]


def _flash_blocks(q: Lying, k: Lying) -> tuple[int, int]:
    """Rows of queries and keys that a thread of the CPU's attention takes at a time."""
    rows = q.shape[2]
    return min(256 if rows >= 768 else 64 if rows >= 192 else 32, rows), min(512, k.shape[2])


def _attention(operands: Operands, _: Outputs) -> int:
    q, k, *rest = operands
    rows, keys = _flash_blocks(q, k)
    numbers = rows * keys + 2 * rows + rows * q.shape[-1]
    halves = rows * keys * q.dtype.itemsize if q.dtype.itemsize == 2 else 0
    per_thread = numbers * max(q.dtype.itemsize, 4) + halves
    return per_thread * torch.get_num_threads() + _additive_mask(rest[1:2], q)


def _attention_backward(operands: Operands, _: Outputs) -> int:
    q, k, rest = operands[1], operands[2], operands[4:]
    rows, keys = _flash_blocks(q, k)
    numbers = 2 * rows * keys + rows
    halves = 2 * rows * keys * q.dtype.itemsize if q.dtype.itemsize == 2 else 0
    per_thread = numbers * max(q.dtype.itemsize, 4) + halves
    return per_thread * torch.get_num_threads() + _additive_mask(rest[:-2], q)


def _merge(operands: Operands, _: Outputs) -> int:
    """Three of the rows' log-sum-exps, and the rows themselves where they are of another dtype."""
    lse, more, more_lse = operands[1:4]
    return 3 * more_lse.nbytes + (math.prod(more.shape) * lse.dtype.itemsize if more.dtype != lse.dtype else 0)


def _additive_mask(masks: Operands, q: Lying) -> int:
    return sum(math.prod(m.shape) * q.dtype.itemsize for m in masks if m.dtype == torch.bool)


def _norm_backward(operands: Operands, _: Outputs) -> int:
    """Sums of the two parameters' gradients, for each thread."""
    normalized = math.prod(operands[-1].shape)
    return 2 * normalized * max(operands[-1].dtype.itemsize, 4) * torch.get_num_threads()


def _in_float32(position: int) -> Callable[[Operands, Outputs], int]:
    """Of two-byte numbers, a copy of an operand (-1: of the output) in float32."""

    def workspace(operands: Operands, outputs: Outputs) -> int:
        shown = operands[position] if position >= 0 else outputs[0].lying  # type: ignore[union-attr]
        return math.prod(shown.shape) * 4 if shown.dtype.itemsize == 2 else 0

    return workspace


def _in_dtype_of_output(operands: Operands, outputs: Outputs) -> int:
    (x, *_), out = operands, outputs[0]
    assert out is not None
    return math.prod(x.shape) * out.lying.dtype.itemsize if x.dtype != out.lying.dtype else 0


WORKSPACE: dict[str, Callable[[Operands, Outputs], int]] = {
    "megalith.sdpa.default": _attention,
    "megalith.sdpa_backward.default": _attention_backward,
    "megalith.sdpa_merge.default": _merge,
    "aten.native_layer_norm_backward.default": _norm_backward,
    "aten.gather.default": _in_float32(-1),
    "aten.scatter_add.default": _in_float32(0),
    "aten.sum.default": _in_dtype_of_output,
    "aten.sum.dim_IntList": _in_dtype_of_output,
}
"""Per op, the bytes that it allocates and frees within, of operands and outputs."""

_MASKS = {"aten.where.self": 0, "aten.masked_fill.Scalar": 1, "aten.masked_fill.Tensor": 1}
"""Pointwise ops with an operand that is not converted to the dtype of the others."""


def _workspace(fn: Callable[..., Any], name: str, operands: Operands, outputs: Outputs) -> int:
    name = name.replace("_.", ".")  # in place an op computes as it does otherwise
    table = WORKSPACE.get(name)
    if table is not None:
        return table(operands, outputs)
    if torch.Tag.pointwise in getattr(fn, "tags", ()) and name != "aten._to_copy.default":
        return _conversions(name, operands, outputs)
    return 0


def _conversions(name: str, operands: Operands, outputs: Outputs) -> int:
    """Copies of the operands of a pointwise op in the dtype that it computes in."""
    converted = [x for i, x in enumerate(operands) if _MASKS.get(name) != i]
    big = [x for x in converted if x.shape] or converted
    dtypes = [x.dtype for x in big] + [o.lying.dtype for o in outputs if o and o.lying.dtype != torch.bool]
    if len({*dtypes, *(x.dtype for x in converted)}) < 2:
        return 0
    common = dtypes[0]
    for dtype in dtypes[1:]:
        common = torch.promote_types(common, dtype)
    return sum(math.prod(x.shape) * common.itemsize for x in converted if x.shape and x.dtype != common)
