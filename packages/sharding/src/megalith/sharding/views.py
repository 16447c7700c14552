"""What do a reshape, a cut and a join do to a layout? They regroup digits and segments; nothing moves."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from megalith.sharding.layout import Digit, Dim, Layout, Segment, drop_axes, pieces_of

__all__ = ["cut", "join", "pad", "regroup"]


@lru_cache(maxsize=65536)
def regroup(layout: Layout, shape: tuple[int, ...]) -> tuple[Layout, Layout]:
    """How a tensor has to lie so that each rank can reshape its shard alone, and how it lies afterwards.

    Args:
        layout: the layout before the reshape.
        shape: the new global shape, of as many elements.

    Returns:
        The layout to bring the operand to (axes that straddle a new boundary are gathered) and the result's.

    >>> from megalith.sharding import Mesh
    >>> before, after = regroup(Layout.parse("b s (tp e)", (2, 3, 8), Mesh("tp=2")), (2, 3, 4, 2))
    >>> str(before), str(after)
    ('b s (tp e)', 'd0 d1 (tp d2) d3')
    """
    needed, dims = layout, []
    for old, new in _groups(layout.shape, shape):
        sizes = [shape[d] for d in new]
        if len(old) == len(new) == 1:
            dims.append(needed.dims[old[0]])
            continue
        while True:
            found = _regroup_run([needed.dims[d] for d in old], sizes)
            if not isinstance(found, str):
                dims.extend(found)
                break
            gathered = [drop_axes(dim, (found,)) if d in old else dim for d, dim in enumerate(needed.dims)]
            needed = needed.with_dims(tuple(gathered))
    return needed, replace(layout, dims=tuple(dims), names=())


def _groups(old: tuple[int, ...], new: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """The finest runs of old and new dims that hold the same elements."""
    if 0 in old:
        return [(list(range(len(old))), list(range(len(new))))]
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        left, right = [], []
        a = b = 1
        if i < len(old):
            left, a, i = [i], old[i], i + 1
        if j < len(new):
            right, b, j = [j], new[j], j + 1
        while a != b:
            if (a < b and i < len(old)) or j >= len(new):
                left, a, i = [*left, i], a * old[i], i + 1
            else:
                right, b, j = [*right, j], b * new[j], j + 1
        if not left or not right:  # ones at the end join the run before
            if groups:
                groups[-1][0].extend(left)
                groups[-1][1].extend(right)
            else:
                groups.append((left, right))
        else:
            groups.append((left, right))
    return groups


def _regroup_run(old: list[Dim], sizes: list[int]) -> list[Dim] | str:
    """The dims of these sizes that hold the same elements in the same order, or an axis that is in the way."""
    total = math.prod(dim.size for dim in old)
    held = [axis for dim in old for axis in dim.axes]
    if not held:
        return [Dim.of(n) for n in sizes]
    if total == 0 or any(len(dim.segments) > 1 for dim in old):
        return held[-1]
    flat: list[Digit] = []
    inner = total
    for dim in old:
        inner //= dim.size
        flat.extend(replace(d, stride=d.stride * inner) for d in dim.digits)
        if inner > 1:
            last = flat[-1].stride if flat else total
            if last > inner:
                flat.append(Digit(None, math.ceil(last / inner), inner))
    dims: list[Dim] = []
    inner = total
    position = 0
    period = total
    for size in sizes:
        inner //= size
        mine: list[Digit] = []
        while position < len(flat) and flat[position].stride >= inner:
            digit = flat[position]
            if digit.stride % inner:
                return digit.axis or _next_axis(flat, position)
            mine.append(replace(digit, stride=digit.stride // inner))
            period = digit.stride
            position += 1
        if position < len(flat) and period > inner:
            digit = flat[position]  # lies across the boundary, unless it is local and splits there
            if digit.axis is not None:
                return digit.axis
            if period % inner or inner % digit.stride:
                return _next_axis(flat, position)
            mine.append(Digit(None, period // inner, 1))
            flat[position] = replace(digit, size=inner // digit.stride)
            period = inner
            if flat[position].size == 1:
                position += 1
        if position < len(flat) and flat[position].back_and_forth and not mine and dims:
            return flat[position].axis or ""  # its direction depends on digits of another dim
        dims.append(Dim.of(size, tuple(mine)))
    return dims


def _next_axis(digits: list[Digit], position: int) -> str:
    """The first mesh axis at or after a position; there is one, since no canonical dim ends in a local digit."""
    return next((d.axis for d in digits[position:] if d.axis is not None), None) or next(
        d.axis for d in reversed(digits[:position]) if d.axis is not None
    )


# --- cuts and joins along one dim ----------------------------------------------------------------------


def join(dims: tuple[Dim, ...]) -> Dim | None:
    """The dim of pieces one behind the other, if the same axes hold them all: each rank joins its shards.

    >>> from megalith.sharding import Mesh
    >>> (dim,) = Layout.parse("(tp o)", (4,), Mesh("tp=2")).dims
    >>> str(Layout(Mesh("tp=2"), (join((dim, dim, dim)),)))
    '(3 tp d0)'
    """
    if len({frozenset(dim.axes) for dim in dims if dim.size}) > 1:
        return None
    return Dim.join(dims)


def cut(start: int, stop: int, dims: tuple[Dim, ...]) -> Dim | None:
    """The dim of the indices `start` to `stop`, if each rank can cut its shard: they are whole segments.

    >>> from megalith.sharding import Mesh
    >>> (dim,) = Layout.parse("(3 tp o)", (12,), Mesh("tp=2")).dims
    >>> cut(4, 8, (dim,)).size, cut(2, 6, (dim,))
    (4, None)
    """
    (dim,) = dims
    kept: list[Segment] = []
    offset = 0
    for piece in (piece for segment in dim.segments for piece in pieces_of(segment)):
        first, last = max(start, offset), min(stop, offset + piece.size)
        if first < last:
            if last - first < piece.size and piece.digits:
                return None
            kept.append(Segment(last - first, piece.digits))
        offset += piece.size
    return Dim.join(Dim((segment,)) for segment in kept)


def pad(before: int, after: int, dims: tuple[Dim, ...]) -> Dim | None:
    """The dim with zeros before and after it, if these lie like it: as many whole copies of it."""
    (dim,) = dims
    if not dim.size or before % dim.size or after % dim.size:
        return None
    return Dim.join((dim,) * ((before + after) // dim.size + 1))
