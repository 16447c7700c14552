"""Where do the elements of one tensor live? A layout: per dim, the digits of its index that mesh axes hold."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

from megalith.sharding.mesh import Mesh

__all__ = ["Digit", "Dim", "Layout", "Segment", "replicated"]

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Digit:
    """One digit of an index: `(index % period) // stride`, where the period is the stride of the digit before it.

    A digit with an axis is held by that mesh axis: a rank keeps the indices whose digit is its coordinate
    (on odd values of the digits before it counted backwards, where `back_and_forth`). One without is local.
    """

    axis: str | None
    size: int
    stride: int
    back_and_forth: bool = False


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of `size` indices of a dim with its own digits, major to minor; the innermost local one is implied."""

    size: int
    digits: tuple[Digit, ...] = ()


@dataclass(frozen=True)
class Dim:
    """One dim of a layout: segments one behind the other, mostly a single one."""

    segments: tuple[Segment, ...]

    @staticmethod
    def of(size: int, digits: tuple[Digit, ...] = ()) -> Dim:
        """The dim of one segment, in canonical form.

        No digit is of size one, no local one last, the first never runs back; local neighbours are one digit, unless
        the first was an uneven cut. A dim of size zero has no digits.
        """
        kept: list[Digit] = []
        for digit in digits if size else ():
            if digit.size == 1:
                continue
            if not kept:
                digit = replace(digit, back_and_forth=False)
            elif digit.axis is None and kept[-1].axis is None and kept[-1].stride == digit.size * digit.stride:
                digit = replace(digit, size=kept.pop().size * digit.size)
            kept.append(digit)
        while kept and kept[-1].axis is None:
            kept.pop()
        return Dim((Segment(size, tuple(kept)),))

    @staticmethod
    def join(dims: Iterable[Dim]) -> Dim:
        """Dims one behind the other as one, in canonical form.

        Local neighbours are one segment; a segment with a local digit first is several; segments all alike are one
        segment with a local digit first (segments with digits that run back and forth stay as they are).
        """
        segments = tuple(segment for dim in dims for segment in dim.segments if segment.size)
        if len(segments) < 2:
            return Dim(segments or (Segment(0),))
        pieces: list[Segment] = []
        for piece in (piece for segment in segments for piece in pieces_of(segment)):
            if pieces and not piece.digits and not pieces[-1].digits:
                piece = Segment(pieces.pop().size + piece.size)
            pieces.append(piece)
        first = pieces[0]
        if any(piece != first or any(d.back_and_forth for d in piece.digits) for piece in pieces):
            return Dim(tuple(pieces))
        return Dim.of(len(pieces) * first.size, (Digit(None, len(pieces), first.size), *first.digits))

    def __reduce__(self) -> tuple[object, ...]:  # a hash kept in the instance is another process's
        return Dim, (self.segments,)

    @cached_property
    def size(self) -> int:
        return sum(s.size for s in self.segments)

    @property
    def digits(self) -> tuple[Digit, ...]:
        """The digits of a dim of one segment."""
        (segment,) = self.segments
        return segment.digits

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that hold this dim, major to minor, each once."""
        seen = [d.axis for s in self.segments for d in s.digits if d.axis is not None]
        return tuple(dict.fromkeys(seen))

    @cached_property
    def _hash(self) -> int:
        return hash(self.segments)

    def __hash__(self) -> int:
        return self._hash

    def ranges(self, coordinates: Mapping[str, int]) -> tuple[Range, ...]:
        """The index ranges `[start, stop)` held at these coordinates, ascending, neighbours joined."""
        key = tuple((axis, coordinates[axis]) for axis in self.axes)
        return _ranges(self, key)

    def local_size(self, coordinates: Mapping[str, int]) -> int:
        """How many indices are held at these coordinates."""
        return sum(stop - start for start, stop in self.ranges(coordinates))


def pieces_of(segment: Segment) -> Iterator[Segment]:
    """A segment with a local digit first as that many segments."""
    digits = segment.digits
    if not digits or digits[0].axis is not None or any(digit.back_and_forth for digit in digits):
        yield segment
        return
    for start in range(0, segment.size, digits[0].stride):
        yield Segment(min(digits[0].stride, segment.size - start), digits[1:])


@lru_cache(maxsize=65536)
def _ranges(dim: Dim, coordinates: tuple[tuple[str, int], ...]) -> tuple[Range, ...]:
    held = dict(coordinates)
    found: list[Range] = []

    def visit(start: int, stop: int, digits: tuple[Digit, ...], parity: int) -> None:
        if start >= stop:
            return
        if not digits:
            if found and found[-1][1] == start:
                found[-1] = (found[-1][0], stop)
            else:
                found.append((start, stop))
            return
        digit, rest = digits[0], digits[1:]
        if digit.axis is None:
            values = range(math.ceil((stop - start) / digit.stride))
        else:
            coordinate = held[digit.axis]
            if digit.back_and_forth and parity:
                coordinate = digit.size - 1 - coordinate
            values = range(coordinate, coordinate + 1)
        for value in values:
            begin = start + value * digit.stride
            visit(begin, min(begin + digit.stride, stop), rest, (parity * digit.size + value) % 2)

    offset = 0
    for segment in dim.segments:
        visit(offset, offset + segment.size, segment.digits, 0)
        offset += segment.size
    return tuple(found)


@dataclass(frozen=True)
class Layout:
    """Where the elements of one tensor live on a mesh.

    Rank r holds the elements whose mesh digits equal r's coordinates, in the order of their indices.
    An axis that no dim names holds replicas, or, if it is in `partial`, terms: the value is the sum
    (max, min) over that axis.

    Args:
        mesh: the mesh.
        dims: per dim of the tensor, its segments and digits.
        partial: pairs `(mesh axis, "sum" | "max" | "min")`, in the mesh's order of axes.
        tier: where the bytes rest: `"device"`, `"host"`, `"disk"` or `"paged"`.
        names: per dim a name for printing; not part of equality.

    >>> layout = Layout.parse("(tp o) i", (8, 6), Mesh("dp=2 tp=4"))
    >>> layout.local_shape(0), str(layout)
    ((2, 6), '(tp o) i')
    """

    mesh: Mesh
    dims: tuple[Dim, ...]
    partial: tuple[tuple[str, str], ...] = ()
    tier: str = "device"
    names: tuple[str, ...] = field(default=(), compare=False)

    @staticmethod
    def parse(
        pattern: str, shape: tuple[int, ...], mesh: Mesh, sizes: Mapping[str, int] | None = None, name: str = ""
    ) -> Layout:
        """The layout that a pattern of the grammar gives a tensor of this (global) shape.

        Args:
            pattern: for example `"(dp b) (sp s) ... // tp @host"`.
            shape: the global shape.
            mesh: the mesh that the pattern's axes are from.
            sizes: sizes of named factors that the pattern leaves open.
            name: the tensor's name, for errors.

        Raises:
            LayoutError: what does not fit, with the pattern, the tensor, the mesh and what to write instead.
        """
        from megalith.sharding.grammar import parse_layout

        return parse_layout(pattern, tuple(shape), mesh, dict(sizes or {}), name)

    def __reduce__(self) -> tuple[object, ...]:  # a hash kept in the instance is another process's
        return Layout, (self.mesh, self.dims, self.partial, self.tier, self.names)

    @cached_property
    def _hash(self) -> int:
        return hash((self.mesh.pattern, self.dims, self.partial, self.tier))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return tuple(dim.size for dim in self.dims)

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that hold dims, by dim, major to minor."""
        return tuple(dict.fromkeys(axis for dim in self.dims for axis in dim.axes))

    @cached_property
    def partial_axes(self) -> tuple[str, ...]:
        """The mesh axes over which the value is a sum (max, min)."""
        return tuple(axis for axis, _ in self.partial)

    @cached_property
    def replicas(self) -> tuple[str, ...]:
        """The mesh axes along which all ranks hold the same."""
        used = {*self.axes, *self.partial_axes}
        return tuple(axis for axis in self.mesh.axes if axis not in used)

    @property
    def is_replicated(self) -> bool:
        return not self.axes and not self.partial

    def ranges(self, rank: int) -> tuple[tuple[Range, ...], ...]:
        """Per dim the index ranges that a rank holds; it holds their product."""
        coordinates = self.mesh.coordinates(rank)
        return tuple(dim.ranges(coordinates) for dim in self.dims)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of a rank's shard."""
        return _local_shape(self, rank)

    def with_dims(self, dims: tuple[Dim, ...]) -> Layout:
        return replace(self, dims=dims, names=self.names if len(dims) == len(self.dims) else ())

    def with_partial(self, partial: Mapping[str, str]) -> Layout:
        return replace(self, partial=tuple((a, partial[a]) for a in self.mesh.axes if a in partial))

    def without_partial(self) -> Layout:
        return replace(self, partial=()) if self.partial else self

    def without_axes(self, axes: tuple[str, ...]) -> Layout:
        """The same layout with these axes gathered: their digits become local."""
        return self.with_dims(tuple(drop_axes(dim, axes) for dim in self.dims))

    def __str__(self) -> str:
        from megalith.sharding.printing import format_layout

        return format_layout(self)


@lru_cache(maxsize=65536)
def _local_shape(layout: Layout, rank: int) -> tuple[int, ...]:
    coordinates = layout.mesh.coordinates(rank)
    return tuple(dim.local_size(coordinates) for dim in layout.dims)


def drop_axes(dim: Dim, axes: tuple[str, ...]) -> Dim:
    """A dim with these axes gathered: their digits become local."""
    if not any(axis in axes for axis in dim.axes):
        return dim
    gathered = []
    for segment in dim.segments:
        digits = tuple(replace(d, axis=None, back_and_forth=False) if d.axis in axes else d for d in segment.digits)
        gathered.append(Dim.of(segment.size, digits))
    return Dim.join(gathered)


def replicated(shape: tuple[int, ...], mesh: Mesh) -> Layout:
    """The layout in which every rank holds the whole tensor.

    >>> replicated((4, 3), Mesh("dp=2")).local_shape(1)
    (4, 3)
    """
    return Layout(mesh, tuple(Dim.of(n) for n in shape))
