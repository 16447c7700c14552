"""Which collectives did nobody ask for? Under `strict`, an error that lists them."""

from __future__ import annotations

from collections.abc import Iterator

from megalith.sharding.partition import Move, Partition
from megalith.sharding.transition import plan

__all__ = ["SilentCommunication", "check_strict"]


class SilentCommunication(ValueError):
    """A collective that no spec asked for."""


def check_strict(partition: Partition) -> None:
    """Raises where layouts disagree and no spec says who gives way.

    Asked for are: a parameter's way from stored to used, a gradient's to its parameter's layout, what `constrain` and
    output specs say, the sum over an axis by which a spec shards a contracted dim, and gathers of an activation over an
    axis by which the op's parameter is sharded.

    Raises:
        SilentCommunication: with the source line, the layouts and what to write, for each.
    """
    lines = [_line(move) for move in _unasked(partition)]
    if lines:
        raise SilentCommunication(
            f"strict: {len(lines)} collective{'s' if len(lines) > 1 else ''} that no spec asked for:\n"
            + "\n".join(lines)
            + "\nSay where the value lives before that line with constrain(x, layout), or drop strict=True"
        )


def _unasked(partition: Partition) -> Iterator[Move]:
    for step in partition.steps:
        if isinstance(step, Move):
            if not step.asked and plan(step.source.layout, step.target.layout, step.dtype_size).bytes_received:
                yield step
        elif step.block is not None:
            yield from _unasked(step.block)


def _line(move: Move) -> str:
    where = " ".join(p for p in (move.origin.source, f"in {move.origin.module}" if move.origin.module else "") if p)
    return f"  {where or 'an unknown line'}: {move.source.layout} -> {move.target.layout} ({move.cause})"
