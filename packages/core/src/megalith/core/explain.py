"""What does a program communicate, and who asked for it? One row a collective, with the alternative."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from megalith.core.program import Launch, Program
from megalith.sharding.cost import collective_cost
from megalith.sharding.layout import Digit, Dim, Layout

__all__ = ["Explanation", "Row", "aligned", "amount", "explain", "merge_names", "star"]


@dataclass(frozen=True)
class Row:
    """One collective, or several that differ only in the index of their layer.

    Args:
        kind: `all_gather`, `all_reduce`, `reduce_scatter`, `all_to_all` or `exchange`.
        axes: the mesh axes that the group spans.
        count: how many collectives the row stands for.
        bytes: what the busiest rank receives in all of them.
        phase: `forward`, `backward` or `update`.
        module: the path of the module, with `*` for the indices that were merged.
        source: the user's line.
        cause: the spec or the rule that asked for it.
        before, after: the layouts.
        alternative: what else could be written; empty where there is nothing.
        alternative_bytes: what the busiest rank would receive instead.
        alternative_memory: how many more bytes a rank would hold.
    """

    kind: str
    axes: tuple[str, ...]
    count: int
    bytes: int
    phase: str
    module: str
    source: str
    cause: str
    before: str
    after: str
    alternative: str = ""
    alternative_bytes: int = 0
    alternative_memory: int = 0


@dataclass(frozen=True)
class Explanation:
    """The collectives of one run of a program; `str()` gives a table.

    Args:
        rows: in order of execution.
        replicated: names of tensors that no spec matched, merged likewise.
    """

    rows: tuple[Row, ...]
    replicated: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """How many collectives run."""
        return sum(row.count for row in self.rows)

    @property
    def bytes(self) -> int:
        """Bytes that the busiest rank of each group receives."""
        return sum(row.bytes for row in self.rows)

    @property
    def by_axis(self) -> dict[str, tuple[int, int]]:
        """Count and bytes by the axes of the group, such as `"tp"` or `"dp tp"`."""
        count, nbytes = Counter[str](), Counter[str]()
        for row in self.rows:
            count[" ".join(row.axes)] += row.count
            nbytes[" ".join(row.axes)] += row.bytes
        return {axes: (count[axes], nbytes[axes]) for axes in count}

    def __str__(self) -> str:
        lines = []
        if self.rows:
            cells = [
                (
                    row.phase,
                    (row.module or "-") + (f" x {row.count}" if row.count > 1 else ""),
                    row.kind,
                    " ".join(row.axes),
                    amount(row.bytes),
                    row.source,
                    row.cause,
                    _alternative_text(row),
                )
                for row in self.rows
            ]
            heads = ("phase", "module", "collective", "axes", "bytes", "line", "cause", "alternative")
            lines += aligned(heads, cells, right=(4,))
        lines.append(f"{self.count} collectives, {amount(self.bytes)} received by the busiest rank")
        lines += [f"  {axes}: {count}, {amount(nbytes)}" for axes, (count, nbytes) in self.by_axis.items()]
        if self.replicated:
            lines.append("replicated, as no spec names them: " + ", ".join(self.replicated))
        return "\n".join(lines)


def explain(program: Program, detail: str = "grouped", replicated: Iterable[str] = ()) -> Explanation:
    """What a program communicates, and why. Nothing runs.

    Args:
        program: one rank's program.
        detail: `"all"` gives a row for each collective; `"grouped"` merges those of layers that differ in their index.
        replicated: names of tensors that are replicated because no spec matched them, to be listed.

    Raises:
        ValueError: another detail.

    >>> from megalith.core.shard import shard
    >>> from megalith.sharding import Mesh
    >>> import torch
    >>> step = shard(lambda x, w: (x @ w).relu(), Mesh("tp=2"), {"x": "b (tp e)", "w": "(tp e) f"}, backend="virtual")
    >>> (row,) = explain(step.program(torch.ones(8, 4), torch.ones(4, 6))).rows
    >>> row.kind, row.axes, row.bytes, row.cause
    ('all_reduce', ('tp',), 192, 'partial over tp, read by aten.relu.default')
    >>> row.alternative, row.alternative_bytes
    ('constrain(x, "(tp d0) d1"): reduce_scatter', 96)
    """
    if detail not in ("grouped", "all"):
        raise ValueError(f"detail is {detail!r}; write 'grouped' or 'all'")
    rows = [_row(launch, program) for launch in program.collectives]
    names = tuple(replicated)
    if detail == "all":
        return Explanation(tuple(rows), names)
    groups: dict[Row, list[Row]] = {}
    for row in rows:
        groups.setdefault(replace(row, module=star(row.module), cause=star(row.cause)), []).append(row)
    return Explanation(tuple(_merge(group) for group in groups.values()), merge_names(names))


def _row(launch: Launch, program: Program) -> Row:
    return Row(
        launch.kind,
        launch.axes,
        1,
        launch.bytes_received,
        launch.origin.phase,
        launch.origin.module,
        launch.origin.source,
        launch.cause.removesuffix(": "),
        str(launch.source),
        str(launch.target),
        *_alternative(launch, program),
    )


def _merge(rows: Sequence[Row]) -> Row:
    (module,) = merge_names([row.module for row in rows])
    (cause,) = merge_names([row.cause for row in rows])
    return replace(
        rows[0],
        count=len(rows),
        bytes=sum(row.bytes for row in rows),
        module=module,
        cause=cause,
        alternative_bytes=sum(row.alternative_bytes for row in rows),
        alternative_memory=sum(row.alternative_memory for row in rows),
    )


# --- the alternative: facts about other layouts of the same value ------------------------------------


def _alternative(launch: Launch, program: Program) -> tuple[str, int, int]:
    """What else could be written, the bytes that would then be received, and the memory that it takes."""
    mesh, axes, over = launch.source.mesh, launch.axes, ", ".join(launch.axes)
    n = math.prod(mesh.sizes[axis] for axis in axes)
    kind = program.types[launch.buffer]
    held, itemsize = math.prod(kind.shape), kind.dtype.itemsize
    got = held * n if launch.kind == "all_gather" else held // n if launch.kind == "reduce_scatter" else held

    def received(kind: str) -> int:
        return collective_cost(kind, mesh, axes, -(-held // n) * n, itemsize).bytes_received

    if launch.kind == "reduce_scatter":
        return f"whole over {over}: all_reduce", received("all_reduce"), (held - got) * itemsize
    if launch.kind == "all_gather" and launch.cause.endswith("stored -> used"):
        return f'stored as used, "{launch.target}": no gather', 0, (got - held) * itemsize
    if launch.kind == "all_reduce" and "gradient" in launch.cause:
        text = f'":state" and ":grad" sharded over {over} (ZeRO): reduce_scatter'
        return text, received("reduce_scatter"), (held // n - held) * itemsize
    if launch.kind not in ("all_reduce", "all_gather") or launch.source.shape[-1:] in ((), (1,)):
        return "", 0, 0
    sharded = _shard_free_dim(launch.target, axes, program.rank)
    if not sharded:
        return "", 0, 0
    other, when = ("reduce_scatter", "") if launch.kind == "all_reduce" else ("all_to_all", ", if its reader allows")
    return f'constrain(x, "{sharded}"){when}: {other}', received(other), (got // n - got) * itemsize


def _alternative_text(row: Row) -> str:
    if not row.alternative:
        return ""
    text = f"{row.alternative}, {amount(row.alternative_bytes)}" if row.alternative_bytes else row.alternative
    memory = row.alternative_memory
    if memory:
        text += f", {amount(abs(memory))} {'more' if memory > 0 else 'less'} memory"
    return text


def _shard_free_dim(layout: Layout, axes: tuple[str, ...], rank: int) -> str:
    """The layout with `axes` within the first dim, but the last of three or more, that they divide; else empty."""
    n = math.prod(layout.mesh.sizes[axis] for axis in axes)
    local = layout.local_shape(rank)
    order = sorted(range(len(local)), key=lambda d: (bool(layout.dims[d].axes), d))
    for d in order:
        dim = layout.dims[d]
        if local[d] < n or local[d] % n or len(dim.segments) > 1:
            continue
        digits, stride = list(dim.digits), dim.digits[-1].stride if dim.digits else dim.size
        for axis in axes:
            stride //= layout.mesh.sizes[axis]
            digits.append(Digit(axis, layout.mesh.sizes[axis], stride))
        dims = (*layout.dims[:d], Dim.of(dim.size, tuple(digits)), *layout.dims[d + 1 :])
        return str(layout.with_dims(dims))
    return ""


# --- names and tables --------------------------------------------------------------------------------

_INDEX = re.compile(r"(?<![^.])\d+(?=[.:]|$)")


def star(name: str) -> str:
    """A dotted name with `*` for each index in it."""
    return _INDEX.sub("*", name)


def merge_names(names: Iterable[str]) -> tuple[str, ...]:
    """Names, those that differ only in indices as one, with `*` where they differ.

    >>> merge_names(["layers.0.mlp.0.w", "layers.1.mlp.0.w", "head.w"])
    ('layers.*.mlp.0.w', 'head.w')
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(star(name), []).append(name)
    merged = []
    for group in groups.values():
        indices = zip(*(_INDEX.findall(name) for name in group), strict=True)
        shown = iter([column[0] if len(set(column)) == 1 else "*" for column in indices])
        merged.append(_INDEX.sub(lambda _: next(shown), group[0]))  # noqa: B023
    return tuple(merged)


def amount(nbytes: float) -> str:
    """Bytes for a reader, in powers of 1000.

    >>> amount(0), amount(999), amount(16384), amount(2.5e9)
    ('0 B', '999 B', '16.4 kB', '2.50 GB')
    """
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}" if nbytes >= 10 * size else f"{nbytes / size:.2f} {unit}"
    return f"{int(nbytes)} B"


def aligned(heads: Sequence[str], rows: Sequence[Sequence[object]], right: Sequence[int] = ()) -> list[str]:
    """The lines of a table of plain text.

    Args:
        heads: the names of the columns.
        rows: the cells.
        right: the columns that are aligned to the right.

    >>> for line in aligned(("op", "n"), [("mm", 12), ("add", 3)], right=(1,)):
    ...     print(line)
    op    n
    mm   12
    add   3
    """
    texts = [[str(cell) for cell in row] for row in (heads, *rows)]
    widths = [max(len(row[column]) for row in texts) for column in range(len(heads))]
    return [
        "  ".join(
            c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in texts
    ]
