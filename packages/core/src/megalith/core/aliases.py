"""Which slots of a program lie in the same memory, and which of it does an op write?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megalith.core import _compat, ops
from megalith.core.program import Compute, Instruction, reads, writes
from megalith.sharding.graph import op_name

__all__ = ["Aliases", "aliases", "mutated"]

_EXPAND = "aten.expand.default"
_VIEWS = {"aten.reshape.default", "aten.permute.default", "aten.slice.Tensor", _EXPAND}


@dataclass(frozen=True)
class Aliases:
    """What may share memory: a reshape, say, gives a view or a copy, and counts as a view.

    Args:
        family: for each slot that may lie in another one's memory, that other one.
        shared: slots whose elements may share memory with each other, or with more than one other slot.
    """

    family: dict[int, int]
    shared: frozenset[int]

    def root(self, slot: int) -> int:
        """The slot that stands for the memory in which this one lies."""
        return self.family.get(slot, slot)


def aliases(instructions: Iterable[Instruction]) -> Aliases:
    """Who shares memory with whom, over all of a program's instructions."""
    family: dict[int, int] = {}
    shared: set[int] = set()
    for instruction in instructions:
        if not isinstance(instruction, Compute):
            continue
        is_opaque = not hasattr(instruction.fn, "overloadpacket")
        name = op_name(instruction.fn)
        sources = mutated(instruction) or (reads(instruction) if is_opaque or name in _VIEWS else ())
        if not sources:
            continue
        if is_opaque and len(sources) > 1:
            shared.update(sources)
        for position, out in enumerate(instruction.outputs):
            source = sources[min(position, len(sources) - 1)]
            if out >= 0:
                family[out] = family.get(source, source)
                if name == _EXPAND or source in shared:
                    shared.add(out)
    return Aliases(family, frozenset(shared))


def mutated(instruction: Instruction) -> tuple[int, ...]:
    """The slots that a local op writes into, in the order of its outputs."""
    if not isinstance(instruction, Compute) or not _compat.is_mutating(instruction.fn):
        return ()
    if instruction.fn is ops.adamw_:
        return tuple(instruction.args[k].id for k in ops.ADAMW_WRITES)
    return reads(instruction)[: len(writes(instruction))]
