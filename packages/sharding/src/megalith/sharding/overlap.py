"""How do two dims of the same size meet? Their aligned digits, common index sets, and the sizes of these."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from megalith.sharding.layout import Digit, Dim, Range, Segment, drop_axes

__all__ = [
    "aligned",
    "axis_sizes",
    "coordinates",
    "intersect",
    "is_even",
    "keep_axes",
    "largest",
    "largest_overlap",
    "merge",
    "most_missing",
    "own_ranges",
]

Pairs = tuple[tuple[Digit, Digit], ...]


@lru_cache(maxsize=65536)
def keep_axes(dim: Dim, axes: frozenset[str]) -> Dim:
    """A dim with all its axes but these gathered."""
    gathered = tuple(axis for axis in dim.axes if axis not in axes)
    return drop_axes(dim, gathered) if gathered else dim


@lru_cache(maxsize=65536)
def is_even(dim: Dim) -> bool:
    """Whether every digit divides what it cuts, so that all ranks hold equally much."""
    for segment in dim.segments:
        extent = segment.size
        for digit in segment.digits:
            if digit.size * digit.stride != extent:
                return False
            extent = digit.stride
    return True


def axis_sizes(*dims: Dim) -> dict[str, int]:
    """The mesh axes that hold any of these dims, with their sizes."""
    return {d.axis: d.size for dim in dims for s in dim.segments for d in s.digits if d.axis is not None}


def coordinates(sizes: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """All coordinates along axes of these sizes, the last varying fastest."""
    for values in itertools.product(*map(range, sizes.values())):
        yield dict(zip(sizes, values, strict=True))


@lru_cache(maxsize=65536)
def largest(dim: Dim) -> int:
    """The most indices of a dim that any rank holds."""
    if is_even(dim):
        return sum(s.size // math.prod(d.size for d in s.digits if d.axis is not None) for s in dim.segments)
    return max(dim.local_size(held) for held in coordinates(axis_sizes(dim)))


def intersect(a: Sequence[Range], b: Sequence[Range]) -> tuple[Range, ...]:
    """The common indices of two ascending lists of ranges.

    >>> intersect([(0, 4), (6, 9)], [(2, 7)])
    ((2, 4), (6, 7))
    """
    found: list[Range] = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, stop = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < stop:
            found.append((start, stop))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return tuple(found)


@lru_cache(maxsize=65536)
def aligned(a: Dim, b: Dim) -> tuple[Pairs, ...] | None:
    """Per segment the digits of both dims side by side, local ones split as needed; None where they straddle.

    >>> a, b = Dim.of(8, (Digit("dp", 2, 4),)), Dim.of(8, (Digit(None, 4, 2), Digit("tp", 2, 1)))
    >>> [(x.axis, y.axis, x.size, x.stride) for x, y in aligned(a, b)[0]]
    [('dp', None, 2, 4), (None, None, 2, 2), (None, 'tp', 2, 1)]
    """
    first, second = a.segments, b.segments
    if [s.size for s in first] != [s.size for s in second]:
        if not a.axes:
            first = tuple(Segment(s.size) for s in second)
        elif not b.axes:
            second = tuple(Segment(s.size) for s in first)
        else:
            return None
    found = [_align(x.digits, y.digits) for x, y in zip(first, second, strict=True)]
    return None if None in found else tuple(pairs for pairs in found if pairs is not None)


def _align(a: Sequence[Digit], b: Sequence[Digit]) -> Pairs | None:
    left, right = list(reversed(a)), list(reversed(b))
    pairs: list[tuple[Digit, Digit]] = []
    while left and right:
        x, y = left.pop(), right.pop()
        if (x.size, x.stride) == (y.size, y.stride):
            pairs.append((x, y))
        elif x.axis is None and _splits(x, y):
            left.append(Digit(None, y.stride // x.stride, x.stride))
            pairs.append((_local(y), y))
        elif y.axis is None and _splits(y, x):
            right.append(Digit(None, x.stride // y.stride, y.stride))
            pairs.append((x, _local(x)))
        else:
            return None
    pairs += [(x, _local(x)) for x in reversed(left)] + [(_local(y), y) for y in reversed(right)]
    return tuple(pairs)


def _local(digit: Digit) -> Digit:
    return Digit(None, digit.size, digit.stride)


def _splits(fine: Digit, coarse: Digit) -> bool:
    """Whether the cuts of a local digit include those of a coarser one of the same extent."""
    return fine.size * fine.stride == coarse.size * coarse.stride and coarse.stride % max(fine.stride, 1) == 0


@lru_cache(maxsize=65536)
def merge(a: Dim, b: Dim) -> Dim | None:
    """The dim that is held where both are: its index sets are the intersections; None where no digits say so.

    >>> merge(Dim.of(8, (Digit("dp", 2, 4),)), Dim.of(8, (Digit(None, 4, 2), Digit("tp", 2, 1)))).axes
    ('dp', 'tp')
    """
    pairs = aligned(a, b)
    if pairs is None:
        return None
    longer = a.segments if len(a.segments) > len(b.segments) else b.segments
    segments = []
    for segment, digits in zip(longer, pairs, strict=True):
        if any(x.axis and y.axis and x != y for x, y in digits):
            return None
        merged = tuple(x if x.axis else y for x, y in digits)
        axes = [digit.axis for digit in merged if digit.axis]
        if len(axes) > len(set(axes)):
            return None
        segments.append(Dim.of(segment.size, merged).segments[0])
    return Dim(tuple(segments)) if any(s.digits for s in segments) else Dim.of(a.size)


def _even_overlap(a: Dim, b: Dim) -> tuple[int, int] | None:
    """The (largest, smallest) overlap of the index sets of even, aligned dims in closed form; None for others."""
    pairs = aligned(a, b)
    if pairs is None or not (is_even(a) and is_even(b)):
        return None
    longer = a.segments if len(a.segments) > len(b.segments) else b.segments
    total, always = 0, True
    for segment, digits in zip(longer, pairs, strict=True):
        size = segment.size
        for x, y in digits:
            if x.axis or y.axis:
                size //= x.size
            if x.axis and y.axis and x != y:
                if x.back_and_forth or y.back_and_forth or len(longer) > 1:
                    return None
                always = False
        total += size
    return total, total if always else 0


@lru_cache(maxsize=65536)
def largest_overlap(a: Dim, b: Dim, free: frozenset[str]) -> int:
    """The most indices that a rank's part of `a` shares with a peer's part of `b`, peers differing along `free`."""
    closed = _even_overlap(a, b)
    if closed is not None:
        return closed[0]
    moving = {axis: n for axis, n in axis_sizes(b).items() if axis in free}
    most, bound = 0, min(largest(a), largest(b))
    for mine, theirs in itertools.product(coordinates(axis_sizes(a, b)), coordinates(moving)):
        most = max(most, _length(intersect(a.ranges(mine), b.ranges({**mine, **theirs}))))
        if most == bound:
            break
    return most


@lru_cache(maxsize=65536)
def most_missing(sources: tuple[Dim, ...], targets: tuple[Dim, ...]) -> int:
    """The most elements that any rank holds under `targets` and not under `sources`."""
    closed = [_even_overlap(a, b) for a, b in zip(sources, targets, strict=True)]
    if all(c is not None for c in closed):
        return math.prod(map(largest, targets)) - math.prod(c[1] for c in closed if c is not None)
    most, bound = 0, math.prod(map(largest, targets))
    for held in coordinates(axis_sizes(*sources, *targets)):
        needed, common = 1, 1
        for a, b in zip(sources, targets, strict=True):
            ranges = b.ranges(held)
            needed *= _length(ranges)
            common *= _length(intersect(a.ranges(held), ranges))
        most = max(most, needed - common)
        if most == bound:
            break
    return most


def own_ranges(dim: Dim, theirs: Mapping[str, int], mine: Mapping[str, int]) -> tuple[Range, ...]:
    """The ranges held at `theirs`, without the segments that are held at `mine` just so.

    A segment that an axis does not name, `b` in `(tp a + b)`, is the same for all along that axis.

    >>> dim = Dim((Segment(4, (Digit("tp", 2, 2),)), Segment(3)))
    >>> own_ranges(dim, {"tp": 1}, {"tp": 1}), own_ranges(dim, {"tp": 1}, {"tp": 0})
    (((2, 7),), ((2, 4),))
    """
    if len(dim.segments) == 1:
        return dim.ranges(theirs)
    apart = {axis for axis in dim.axes if theirs[axis] != mine[axis]}
    ranges, start = dim.ranges(theirs), 0
    kept: list[Range] = []
    for segment in dim.segments:
        if apart <= {digit.axis for digit in segment.digits}:
            begin = kept.pop()[0] if kept and kept[-1][1] == start else start
            kept.append((begin, start + segment.size))
        start += segment.size
    return intersect(ranges, kept)


def _length(ranges: Sequence[Range]) -> int:
    return sum(stop - start for start, stop in ranges)
