"""Which factor gets which mesh axis? What operands propose, and how rivals for an axis are ranked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megalith.sharding.layout import Digit, Dim
from megalith.sharding.rule import Rule
from megalith.sharding.versions import Version

__all__ = ["Claim", "carried_sums", "contiguous", "extend", "grant", "propose", "ring_of"]


def _common(a: tuple[Digit, ...], b: tuple[Digit, ...]) -> tuple[Digit, ...]:
    """The longest common prefix."""
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return a[:n]


def _is_prefix(a: tuple[Digit, ...], b: tuple[Digit, ...]) -> bool:
    return b[: len(a)] == a


@dataclass
class Claim:
    """What a factor would like to be sharded by, and who asks for it."""

    factor: str
    dim: Dim
    by_parameter: bool
    weight: int  # bytes that would move if it were refused
    wanted: frozenset[str] = frozenset()  # axes that whoever reads the result wants on this factor
    granted: int = 0  # mesh digits granted so far
    closed: bool = False

    @property
    def mesh_digits(self) -> list[Digit]:
        return [d for s in self.dim.segments for d in s.digits if d.axis is not None]

    def result(self) -> Dim:
        if self.granted == len(self.mesh_digits):
            return self.dim
        if len(self.dim.segments) > 1:
            return Dim.of(self.dim.size)
        kept, seen = [], 0
        for digit in self.dim.digits:
            if digit.axis is not None:
                seen += 1
                if seen > self.granted:
                    break
            kept.append(digit)
        return Dim.of(self.dim.size, tuple(kept))


def grant(claims: list[Claim], taken: set[str]) -> None:
    """Gives each mesh axis to at most one factor: by depth, then what is wanted, parameters, weight, order."""
    depth = 0
    while any(not c.closed for c in claims):
        asking: dict[str, list[Claim]] = {}
        for claim in claims:
            if claim.closed:
                continue
            if depth >= len(claim.mesh_digits):
                claim.closed = True
                continue
            axis = claim.mesh_digits[depth].axis
            assert axis is not None
            if axis in taken:
                claim.closed = True
            else:
                asking.setdefault(axis, []).append(claim)
        for axis, rivals in asking.items():
            rivals.sort(key=lambda c: (axis not in c.wanted, not c.by_parameter, -c.weight))
            rivals[0].granted += 1
            taken.add(axis)
            for loser in rivals[1:]:
                loser.closed = True
        depth += 1


def contiguous(dim: Dim) -> bool:
    """Whether every rank holds one run of indices."""
    if len(dim.segments) > 1:
        return False
    return all(d.axis is not None and not d.back_and_forth for d in dim.digits)


def propose(factor: str, held: list[tuple[Dim, bool, int]], contracted: bool) -> Claim:
    """What a factor asks for, from the dims that hold it."""
    weight = sum(nbytes for dim, _, nbytes in held if dim.axes)
    sharded = [h for h in held if h[0].axes]
    size = held[0][0].size
    if not sharded:
        return Claim(factor, Dim.of(size), False, 0)
    if any(len(dim.segments) > 1 for dim, _, _ in held):
        first = sharded[0][0]
        same = all(dim == first or (not dim.axes and not contracted) for dim, _, _ in held)
        chosen = first if same else max(sharded, key=lambda h: (h[1], h[2]))[0] if not contracted else Dim.of(size)
        return Claim(factor, chosen, any(p for d, p, _ in held if d == chosen), weight)
    if contracted:
        digits = held[0][0].digits
        for dim, _, _ in held[1:]:
            digits = _common(digits, dim.digits)
        dim = Dim.of(size, digits)
        return Claim(factor, dim, any(p for _, p, _ in sharded), weight)
    finest = max(sharded, key=lambda h: len(h[0].digits))[0]
    if all(_is_prefix(dim.digits, finest.digits) for dim, _, _ in held):
        chosen = finest
    else:
        chosen = max(sharded, key=lambda h: (h[1], h[2]))[0]
    return Claim(factor, chosen, any(p and d.axes and _is_prefix(d.digits, chosen.digits) for d, p, _ in held), weight)


def extend(dim: Dim, held: list[tuple[Dim, bool, int]], taken: set[str]) -> Dim:
    """A contracted factor as fine as an operand holds it, where the axes are free: slicing the others costs nothing."""
    for other, _, _ in sorted(held, key=lambda h: (not h[1], -h[2])):
        if len(other.segments) > 1 or len(dim.segments) > 1:
            continue
        if _is_prefix(dim.digits, other.digits) and len(other.digits) > len(dim.digits):
            added = [d.axis for d in other.digits[len(dim.digits) :] if d.axis is not None]
            finer = all(len(o.segments) == 1 and _is_prefix(o.digits, other.digits) for o, _, _ in held)
            if finer and not any(a in taken for a in added):
                taken.update(added)
                return other
    return dim


def carried_sums(rule: Rule, versions: tuple[Version, ...]) -> Mapping[str, str]:
    """The partial sums that pass through an op: those that all its linear operands have alike."""
    if not rule.linear or max(rule.linear) >= len(versions):
        return {}
    partials = {versions[i].layout.partial for i in rule.linear}
    if len(partials) != 1:
        return {}
    (partial,) = partials
    others = {a for i, v in enumerate(versions) if i not in rule.linear for a in v.layout.axes}
    if any(op != "sum" and len(rule.linear) > 1 for _, op in partial) or others & {a for a, _ in partial}:
        return {}
    if any(op != "sum" for _, op in partial) and rule.reduce == "sum":
        return {}
    return dict(partial)


def ring_of(rule: Rule, versions: tuple[Version, ...]) -> dict[str, Dim]:
    """The factors whose blocks are passed around: those of the rule's ring, where all its dims are sharded alike."""
    held = {versions[i].layout.dims[d] for i, d in rule.ring}
    if len(held) != 1 or not (dim := held.pop()).axes:
        return {}
    factors = [rule.operands[i][d] for i, d in rule.ring]
    return {factor: dim for factor in factors if factor is not None}
