"""What is a mesh of devices? Named axes with sizes; pure data, no process group."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

__all__ = ["Link", "Mesh", "MeshError"]

_AXIS = re.compile(r"\s*([A-Za-z_]\w*)\s*=\s*(?:(\d+)|\(([^()]*)\))\s*")


class MeshError(ValueError):
    """A mesh that cannot be, or a name that is not an axis of it."""


@dataclass(frozen=True)
class Link:
    """How fast one axis communicates: `bandwidth` in bytes a second a rank, `latency` in seconds a message."""

    bandwidth: float = 10e9
    latency: float = 10e-6


@dataclass(frozen=True)
class Mesh:
    """Named axes with sizes, major to minor: rank 0 is the origin and the last axis varies fastest.

    An axis may be made of smaller ones, `tp=(kv=2 rep=2)`: layouts may then name `tp`, `kv` or `rep`.

    Args:
        pattern: the axes, `"pp=2 dp=2 tp=4"`.
        links: for each axis that is not the default, its `Link`.

    Raises:
        MeshError: a pattern that does not parse, a size below one, a name used twice.

    >>> mesh = Mesh("dp=2 tp=(kv=2 rep=2)")
    >>> mesh.size, mesh.axes, mesh.expand("tp")
    (8, ('dp', 'kv', 'rep'), ('kv', 'rep'))
    >>> mesh.coordinates(5)
    {'dp': 1, 'kv': 0, 'rep': 1}
    >>> mesh.peers(5, ("dp",))
    (1, 5)
    """

    pattern: str
    links: Mapping[str, Link] = field(default_factory=dict, compare=False)
    sizes: Mapping[str, int] = field(init=False, compare=False, repr=False)
    groups: Mapping[str, tuple[str, ...]] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        sizes, groups = _parse(self.pattern)
        canonical = _text(sizes, groups)
        object.__setattr__(self, "pattern", canonical)
        object.__setattr__(self, "sizes", MappingProxyType(sizes))
        object.__setattr__(self, "groups", MappingProxyType(groups))
        for name in self.links:
            self.expand(name)

    def __reduce__(self) -> tuple[object, ...]:
        return Mesh, (self.pattern, dict(self.links))

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The undivided axes, major to minor."""
        return tuple(self.sizes)

    @cached_property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(self.sizes.values())

    def __contains__(self, name: str) -> bool:
        return name in self.sizes or name in self.groups

    def expand(self, name: str) -> tuple[str, ...]:
        """The undivided axes that `name` stands for, major to minor."""
        if name in self.sizes:
            return (name,)
        if name in self.groups:
            return self.groups[name]
        close = difflib.get_close_matches(name, [*self.sizes, *self.groups], n=1)
        hint = f"; did you mean {close[0]!r}?" if close else f"; its axes are {', '.join(self.sizes) or 'none'}"
        raise MeshError(f"{name!r} is not an axis of Mesh({self.pattern!r}){hint}")

    def axis_size(self, name: str) -> int:
        """How many ranks lie along an axis."""
        return math.prod(self.sizes[a] for a in self.expand(name))

    def link(self, name: str) -> Link:
        """The speed of an axis."""
        if name in self.links:
            return self.links[name]
        for group, members in self.groups.items():
            if name in members and group in self.links:
                return self.links[group]
        return Link()

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank stands along each axis."""
        if not 0 <= rank < self.size:
            raise MeshError(f"rank {rank} is outside Mesh({self.pattern!r}), which has ranks 0 to {self.size - 1}")
        coords = {}
        for name in reversed(self.axes):
            rank, coords[name] = divmod(rank, self.sizes[name])
        return {name: coords[name] for name in self.axes}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """The rank at these coordinates; an axis not given counts as 0."""
        rank = 0
        for name in self.axes:
            rank = rank * self.sizes[name] + coordinates.get(name, 0)
        return rank

    def peers(self, rank: int, axes: Iterable[str]) -> tuple[int, ...]:
        """The ranks that differ from `rank` along `axes` only, the first of `axes` varying slowest."""
        coords = self.coordinates(rank)
        groups = [dict(coords)]
        for axis in axes:
            groups = [{**group, axis: i} for group in groups for i in range(self.sizes[axis])]
        return tuple(self.rank(group) for group in groups)


def _parse(pattern: str) -> tuple[dict[str, int], dict[str, tuple[str, ...]]]:
    sizes: dict[str, int] = {}
    groups: dict[str, tuple[str, ...]] = {}
    rest = pattern
    example = "write axes as 'name=size', such as Mesh('dp=2 tp=4') or Mesh('dp=2 tp=(kv=2 rep=2)')"
    while rest.strip():
        match = _AXIS.match(rest)
        if match is None:
            raise MeshError(f"Mesh({pattern!r}) does not parse at {rest.strip()!r}; {example}")
        name, size, inner = match.groups()
        rest = rest[match.end() :]
        if inner is None:
            members = {name: int(size)}
        else:
            members, nested = _parse(inner)
            if nested or not members:
                raise MeshError(f"Mesh({pattern!r}): axis {name!r} is to be made of plain axes; {example}")
            if name in groups:
                raise MeshError(f"Mesh({pattern!r}) names axis {name!r} twice; give each axis its own name")
            groups[name] = tuple(members)
        for member, member_size in members.items():
            if member in sizes:
                raise MeshError(f"Mesh({pattern!r}) names axis {member!r} twice; give each axis its own name")
            if member_size < 1:
                raise MeshError(f"Mesh({pattern!r}): axis {member!r} has size {member_size}; the least is 1")
            sizes[member] = member_size
    clash = sizes.keys() & groups.keys()
    if clash:
        raise MeshError(f"Mesh({pattern!r}) names axis {min(clash)!r} twice; give each axis its own name")
    return sizes, groups


def _text(sizes: Mapping[str, int], groups: Mapping[str, tuple[str, ...]]) -> str:
    """The pattern of a mesh, spaced in one way: meshes are equal where this is."""
    group_of = {member: group for group, members in groups.items() for member in members}
    text = []
    for name, size in sizes.items():
        group = group_of.get(name)
        opening = f"{group}=(" if group and groups[group][0] == name else ""
        closing = ")" if group and groups[group][-1] == name else ""
        text.append(f"{opening}{name}={size}{closing}")
    return " ".join(text)
