"""How is a layout shown? As a pattern that parses to it again."""

from __future__ import annotations

import math

from megalith.sharding.grammar import LayoutError, Part, Where, digits_of, is_near
from megalith.sharding.layout import Dim, Layout, Segment
from megalith.sharding.mesh import Mesh

__all__ = ["format_layout"]


def format_layout(layout: Layout) -> str:
    """The pattern of a layout: it parses to the same layout, without any sizes given.

    A layout that no pattern expresses, one whose first digit is local and uneven (what is left of a mesh axis that was
    gathered, or behind one of size one), shows its strides as `factor:stride`, which does not parse.

    >>> format_layout(Layout.parse("(3 tp h d) e // sum:dp @host", (48, 8), Mesh("dp=2 tp=2"), {"d": 4}))
    '(3 tp h d) e // dp @host'
    >>> format_layout(Layout.parse("(tp h d) e", (20, 8), Mesh("tp=4"), {"d": 4}))
    '(tp 4 h d) e'
    """
    names = _print_names(layout)
    text = [_format_dim(dim, name, layout.mesh) for dim, name in zip(layout.dims, names, strict=True)]
    if layout.partial:
        by_op = {op: [axis for axis, o in layout.partial if o == op] for _, op in layout.partial}
        text.append("//")
        for op, axes in by_op.items():
            text += [axis if op == "sum" else f"{op}:{axis}" for axis in _composed(axes, layout.mesh)]
    if layout.tier != "device":
        text.append(f"@{layout.tier}")
    return " ".join(text)


def _print_names(layout: Layout) -> list[str]:
    """Per dim a name that stands for one size only and that nothing takes for an axis."""
    mesh = layout.mesh
    used = {*layout.axes, *layout.partial_axes}
    free = [axis for axis in (*mesh.axes, *mesh.groups) if not used & {*mesh.expand(axis)}]
    taken: set[str] = set()
    names = []
    for i, name in enumerate(layout.names or [""] * len(layout.dims)):
        words = name.split()
        if not words or taken & {*words} or any(w in mesh or is_near(w, a, True) for w in words for a in free):
            name = f"d{i}"
            while name in mesh or name in taken or any(name in other.split() for other in layout.names):
                name += "_"
        taken |= {*name.split()}
        names.append(name)
    return names


def _format_dim(dim: Dim, name: str, mesh: Mesh) -> str:
    if not dim.axes and len(dim.segments) == 1:
        return f"({name})" if " " in name else name
    if len(dim.segments) > 1:
        words = []
        for segment in dim.segments:
            last = segment.digits[-1].stride if segment.digits else segment.size
            even = segment.size == last * math.prod(digit.size for digit in segment.digits)
            words.append(_factors(segment, mesh, [str(last)]) if even else _strides(segment) + f" of {segment.size}")
        return f"({' + '.join(words)})"
    (segment,) = dim.segments
    last = segment.digits[-1].stride
    units = [k for k in range(1, last + 1) if last % k == 0]
    for unit in sorted(units, key=lambda k: segment.size % k != 0):  # whole units first
        if _is_expressed(segment, unit):
            return f"({_factors(segment, mesh, [name] if unit == 1 else [str(unit), name])})"
    return f"({_strides(segment)} {name})"


def _is_expressed(segment: Segment, unit: int) -> bool:
    """Whether the factors of a segment, with `unit` and an open name minor to them, are bound to its very digits."""
    where = Where("", (), Mesh(""), "")
    parts = [Part((0, 0), d.axis, d.size, d.back_and_forth) for d in segment.digits]
    try:
        digits = digits_of(segment.size, [*parts, Part((0, 0), None, unit), Part((0, 0))], (0, 0), where, {})
    except LayoutError:
        return False
    return digits[: len(parts)] == segment.digits


def _factors(segment: Segment, mesh: Mesh, minor: list[str]) -> str:
    major = [str(d.size) if d.axis is None else "~" * d.back_and_forth + d.axis for d in segment.digits]
    return " ".join([*_composed(major, mesh), *minor])


def _strides(segment: Segment) -> str:
    return " ".join(f"{'~' * d.back_and_forth}{d.axis or d.size}:{d.stride}" for d in segment.digits)


def _composed(factors: list[str], mesh: Mesh) -> list[str]:
    """The factors with the members of a composite axis, where all stand together in order, written as that axis."""
    for group, members in mesh.groups.items():
        run = [axis for axis in members if mesh.sizes[axis] > 1]
        for i in range(len(factors) - len(run) + 1):
            if len(run) > 1 and factors[i : i + len(run)] == run:
                factors = [*factors[:i], group, *factors[i + len(run) :]]
    return factors
