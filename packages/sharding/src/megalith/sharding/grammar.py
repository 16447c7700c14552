"""What does a pattern mean for a tensor of this shape on this mesh? Syntax tree to layout."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile

from megalith.sharding.layout import Digit, Dim, Layout
from megalith.sharding.mesh import Mesh
from megalith.sharding.syntax import (
    DimExpr,
    Factor,
    LayoutError,
    LayoutExpr,
    Span,
    SpecExpr,
    Word,
    did_you_mean,
    parse_spec,
)

__all__ = ["LayoutError", "parse_layout", "parse_spec", "parse_stored_used"]


def parse_layout(pattern: str, shape: tuple[int, ...], mesh: Mesh, sizes: Mapping[str, int], name: str = "") -> Layout:
    """The layout that a pattern gives a tensor of this (global) shape.

    The factors of a group run major to minor and cut a block that starts as the whole segment: a local factor of
    size k cuts it in k equal parts, a mesh axis of size k in k parts of `ceil(block / unit / k) * unit` indices, of
    which the last may be short or empty; `unit` is the product of the known local sizes minor to the axis. So heads
    stay whole in `(tp h d)` with `d` given, and gathering the minor-most axis of `(tp dp o)` gives `(tp o)`.
    A name's size is known from `sizes` or from a dim that is that bare name; one run of unknown names in a group is
    inferred. A dim of mesh axes only, `tp` or `(tp dp)`, leaves what they do not cut local.

    A name of unknown size that stands one slip away from a mesh axis, which the layout does not use elsewhere, is an
    error. Slips are: another case (`TP`), anywhere; in parentheses also one letter changed, added or dropped or two
    neighbours swapped, where both names have two letters or more and this one no digit (`tq`, `tpp`, `pt`).

    Args:
        pattern: one side of a spec, for example `"(dp b) (sp s) ... // tp @host"`.
        shape: the global shape.
        mesh: the mesh that the pattern's axes are from.
        sizes: sizes of named local factors.
        name: the tensor's name, for errors.

    Raises:
        LayoutError: what does not fit, with the pattern, the tensor, the mesh and what to write instead.

    >>> layout = parse_layout("(tp h d) e", (12, 8), Mesh("tp=4"), {"d": 4})
    >>> [layout.local_shape(rank) for rank in range(4)]
    [(4, 8), (4, 8), (4, 8), (0, 8)]
    """
    where = Where(pattern, shape, mesh, name)
    spec = where.parse()
    if spec.used is not None:
        span = (spec.stored.span[1], spec.used.span[0])
        side = spec.pattern[slice(*spec.stored.span)]
        raise where.error("'->' in a layout that is not a spec", span, f"write one side: {side!r}")
    return _bind(spec.stored, where, sizes)


def parse_stored_used(
    pattern: str, shape: tuple[int, ...], mesh: Mesh, sizes: Mapping[str, int], name: str = ""
) -> tuple[Layout, Layout | None]:
    """The layouts that a spec `stored -> used` gives a tensor; the second is None where the pattern is one layout.

    Args and Raises: as `parse_layout`; a name may have one size on the left and another on the right.

    >>> stored, used = parse_stored_used("(tp dp o) i -> (tp o) i", (8, 4), Mesh("dp=2 tp=2"), {})
    >>> stored.local_shape(0), used.local_shape(0)
    ((2, 4), (4, 4))
    """
    where = Where(pattern, shape, mesh, name)
    spec = where.parse()
    stored = _bind(spec.stored, where, sizes)
    return stored, None if spec.used is None else _bind(spec.used, where, sizes)


@dataclass(frozen=True, slots=True)
class Where:
    """What an error is about."""

    pattern: str
    shape: tuple[int, ...]
    mesh: Mesh
    name: str

    def parse(self) -> SpecExpr:
        try:
            return parse_spec(self.pattern)
        except LayoutError as error:
            raise error.about(self.name, self.shape, self.mesh.pattern) from None

    def error(self, problem: str, span: Span, fix: str) -> LayoutError:
        text = " ".join(self.pattern.split())
        return LayoutError(problem, text, span, fix, self.name, self.shape, self.mesh.pattern)

    def instead(self, span: Span, text: str) -> str:
        """The pattern with this text in place of a part."""
        pattern = " ".join(self.pattern.split())
        return pattern[: span[0]] + text + pattern[span[1] :]


@dataclass(frozen=True, slots=True)
class Part:
    """A factor whose meaning is known: a mesh axis, a local size, or a run of local names of unknown size."""

    span: Span
    axis: str | None = None
    size: int | None = None
    back_and_forth: bool = False
    names: tuple[str, ...] = ()


def _bind(expr: LayoutExpr, where: Where, sizes: Mapping[str, int]) -> Layout:
    dims = _spread(expr, where)
    used = _check_axes(expr, where, sizes)
    known = _known_sizes(dims, where, sizes, used)
    inferred: dict[str, int] = {}
    bound, names = [], []
    for size, dim in zip(where.shape, dims, strict=True):
        if dim is None:
            bound.append(Dim.of(size))
            names.append("")
            continue
        words = [_parts(word, where, known, used, dim.grouped) for word in dim.words]
        if len(words) == 1:
            parts = words[0]
            if all(part.axis is not None for part in parts):  # the axes hold the dim, whatever is left is local
                parts = [*parts, Part(dim.span)]
            names.append(_trailing_names(parts) if dim.grouped or parts[0].names else "")
            bound.append(Dim.of(size, digits_of(size, parts, dim.span, where, inferred)))
        else:
            names.append("")
            bound.append(_bind_segments(size, words, dim.span, where, inferred))
    marks = {axis: mark.op for mark in expr.marks for axis in where.mesh.expand(mark.axis)}
    partial = tuple((a, marks[a]) for a in where.mesh.axes if a in marks and where.mesh.sizes[a] > 1)
    return Layout(where.mesh, tuple(bound), partial, expr.tier, tuple(names))


def _spread(expr: LayoutExpr, where: Where) -> list[DimExpr | None]:
    """Per dim of the tensor its expression, None where `...` covers it."""
    n_named = sum(not dim.is_ellipsis for dim in expr.dims)
    has_ellipsis = n_named < len(expr.dims)
    n_free = len(where.shape) - n_named
    if n_free < 0 or (n_free and not has_ellipsis):
        problem = f"the pattern has {n_named} dim{'s' * (n_named != 1)}, the tensor {len(where.shape)}"
        text = " ".join(where.pattern.split())
        written = [text[slice(*dim.span)] for dim in expr.dims]
        kept = [*written, "..."] if n_free > 0 else written[: len(where.shape)] or ["..."]
        span = (expr.dims[0].span[0], expr.dims[-1].span[1]) if expr.dims else (expr.span[0], expr.span[0])
        raise where.error(problem, span, f"write as many dims as the tensor has, for example {' '.join(kept)!r}")
    dims: list[DimExpr | None] = []
    for dim in expr.dims:
        dims.extend([None] * n_free if dim.is_ellipsis else [dim])
    return dims


def _check_axes(expr: LayoutExpr, where: Where, sizes: Mapping[str, int]) -> frozenset[str]:
    """The mesh axes of a layout, after checking that each stands once (once a segment, in one dim)."""
    mesh = where.mesh
    used: set[str] = set()

    def use(name: str, span: Span, before: set[str]) -> set[str]:
        axes = set(mesh.expand(name))
        if twice := axes & before:
            axis = min(twice)
            part = "" if axis == name else f" (a part of {name!r})"
            fix = "name an axis in one place; along an axis that is not named lie replicas"
            raise where.error(f"mesh axis {axis!r}{part} is used twice", span, fix)
        if sizes.get(name, mesh.axis_size(name)) != mesh.axis_size(name):
            problem = f"{name!r} is a mesh axis of size {mesh.axis_size(name)}, but sizes has {name}={sizes[name]}"
            raise where.error(problem, span, "give the local factor another name than the axis")
        return axes

    for dim in expr.dims:
        held: set[str] = set()
        for word in dim.words:
            in_word: set[str] = set()
            for factor in word.factors:
                if factor.text in mesh:
                    in_word |= use(factor.text, factor.span, used | in_word)
            held |= in_word
        used |= held
    for mark in expr.marks:
        if mark.axis not in mesh:
            known = (*mesh.axes, *mesh.groups)
            fix = f"write one of the axes: {', '.join(known) or 'none'}" + did_you_mean(mark.axis, known)
            raise where.error(f"{mark.axis!r} is not a mesh axis", mark.span, fix)
        used |= use(mark.axis, mark.span, used)
    return frozenset(used)


def _known_sizes(
    dims: Iterable[DimExpr | None], where: Where, sizes: Mapping[str, int], used: frozenset[str]
) -> dict[str, int]:
    """`sizes` and those of the dims that are a bare name, after checking that the two agree."""
    known = dict(sizes)
    for size, dim in zip(where.shape, dims, strict=True):
        if dim is None or dim.grouped:
            continue
        factor = dim.words[0].factors[0]
        if factor.text in where.mesh:
            continue
        if factor.text not in sizes:
            _check_typo(factor, where, used, grouped=False)
        if factor.size is not None and factor.size != size:
            raise where.error(f"the dim is of size {size}, not {factor.size}", dim.span, f"write {size}, or a name")
        if factor.size is None and known.setdefault(factor.text, size) != size:
            problem = f"{factor.text!r} is of size {known[factor.text]} elsewhere, here of size {size}"
            source = "sizes" if factor.text in sizes else "the pattern"
            raise where.error(problem, dim.span, f"{source} gives the name one size: write another name here")
    return known


def _parts(word: Word, where: Where, known: Mapping[str, int], used: frozenset[str], grouped: bool) -> list[Part]:
    """The factors of a word with what is known of them: composite axes expanded, neighbours of unknown size merged."""
    parts: list[Part] = []
    for factor in word.factors:
        name = factor.text
        if name in where.mesh:
            axes = where.mesh.expand(name)
            if factor.back_and_forth and sum(where.mesh.sizes[axis] > 1 for axis in axes) > 1:
                turned = where.instead(factor.span, " ".join("~" + axis for axis in axes))
                fix = f"write {turned!r}: each axis goes back and forth"
                raise where.error(f"{name!r} is made of several axes, '~' turns one", factor.span, fix)
            sizes = where.mesh.sizes
            parts += [Part(factor.span, axis, sizes[axis], factor.back_and_forth) for axis in axes]
            continue
        if factor.back_and_forth:
            known_axes = (*where.mesh.axes, *where.mesh.groups)
            fix = f"write '~' before one of the axes: {', '.join(known_axes)}" + did_you_mean(name, known_axes)
            raise where.error(f"{name!r} is not a mesh axis", factor.span, fix)
        size = factor.size if factor.size is not None else known.get(name)
        if size is None:
            _check_typo(factor, where, used, grouped)
            if parts and parts[-1].axis is None and parts[-1].size is None:
                last = parts.pop()
                if name in last.names:
                    raise where.error(f"{name!r} of unknown size stands twice", factor.span, _give_size(name))
                parts.append(replace(last, span=(last.span[0], factor.span[1]), names=(*last.names, name)))
                continue
        parts.append(Part(factor.span, None, size, names=() if factor.size is not None else (name,)))
    return parts


def _check_typo(factor: Factor, where: Where, used: frozenset[str], grouped: bool) -> None:
    free = [axis for axis in (*where.mesh.axes, *where.mesh.groups) if not used & set(where.mesh.expand(axis))]
    for axis in free:
        if is_near(factor.text, axis, grouped):
            fix = f"write {where.instead(factor.span, axis)!r}, or " + _give_size(factor.text) + " if it is meant"
            raise where.error(f"{factor.text!r} is not a mesh axis but nearly {axis!r}", factor.span, fix)


def is_near(name: str, axis: str, grouped: bool) -> bool:
    if name.casefold() == axis.casefold():
        return True
    if not grouped or len(axis) < 2 or len(name) < 2 or any(letter.isdigit() for letter in name):
        return False
    if len(name) == len(axis):
        differ = [i for i in range(len(name)) if name[i] != axis[i]]
        if len(differ) == 2 and differ[1] == differ[0] + 1:
            i, j = differ
            return name[i] + name[j] == axis[j] + axis[i]
        return len(differ) == 1
    short, long = sorted((name, axis), key=len)
    return len(long) == len(short) + 1 and any(long[:i] + long[i + 1 :] == short for i in range(len(long)))


def digits_of(size: int, parts: list[Part], span: Span, where: Where, inferred: dict[str, int]) -> tuple[Digit, ...]:
    """The digits of a segment of this size; adds the size it infers for a name to `inferred`."""
    unknown = [part for part in parts if part.size is None]
    if len(unknown) > 1:
        first, second = (" ".join(part.names) for part in unknown[:2])
        problem = f"the sizes of {first!r} and {second!r} cannot both be inferred"
        raise where.error(problem, unknown[1].span, _give_size(*unknown[0].names))
    trailing = list(takewhile(lambda part: part.axis is None and part.size is not None, reversed(parts)))
    if size % max(1, _product(trailing)):
        raise _not_divisible(trailing[::-1], size, where)
    block, digits = size, []
    for i, part in enumerate(parts):
        minor = parts[i + 1 :]
        if part.axis is not None:
            unit = max(1, _product(p for p in minor if p.axis is None))
            block = max(1, -(-block // (unit * _size(part)))) * unit
            digits.append(Digit(part.axis, _size(part), block, part.back_and_forth))
            continue
        if part.size is None:
            rest = max(1, _product(minor))
            if block % rest:
                problem = f"{' '.join(part.names)!r} cannot be inferred: {_show(minor)} does not divide {block}"
                raise where.error(problem, part.span, _give_size(*part.names))
            part = replace(part, size=block // rest)
            _infer(part, where, inferred)
        if block % max(1, _size(part)):
            raise _not_divisible([part], block, where)
        block //= max(1, _size(part))
        digits.append(Digit(None, _size(part), block))
    if size and block != 1 and not unknown:
        problem = f"{_show(parts)} is {_product(parts)}, the dim is {size}"
        raise where.error(problem, span, "leave one local factor without a size, or correct the sizes")
    return tuple(digits)


def _bind_segments(size: int, words: list[list[Part]], span: Span, where: Where, inferred: dict[str, int]) -> Dim:
    """The dim of several segments; the one size they may leave open solves `size = sum of the segments`."""
    unknown = [part for parts in words for part in parts if part.size is None]
    names = {part.names for part in unknown}
    if len(names) > 1 or any(sum(part.size is None for part in parts) > 1 for parts in words):
        missing = list(dict.fromkeys(name for part in unknown for name in part.names))
        problem = f"the sizes of {', '.join(missing)} cannot be inferred from one sum"
        raise where.error(problem, span, _give_size(*missing[:-1]))
    constant = sum(_product(parts) for parts in words if all(part.size is not None for part in parts))
    slope = sum(_product(parts) for parts in words if any(part.size is None for part in parts))
    sums = " + ".join(_show(parts) for parts in words)
    if unknown:
        solution, rest = divmod(size - constant, slope)
        if rest or solution < 1:
            problem = f"no size of {' '.join(unknown[0].names)!r} makes {sums} equal {size}"
            raise where.error(problem, span, "correct the sizes, or give them all")
        _infer(replace(unknown[0], size=solution), where, inferred)
        words = [[replace(p, size=solution) if p.size is None else p for p in parts] for parts in words]
    elif constant != size:
        raise where.error(f"the segments {sums} are {constant}, the dim is {size}", span, "correct the sizes")
    totals = [_product(parts) for parts in words]
    digits = [digits_of(n, parts, span, where, inferred) for n, parts in zip(totals, words, strict=True)]
    return Dim.join(map(Dim.of, totals, digits))


def _infer(part: Part, where: Where, inferred: dict[str, int]) -> None:
    if len(part.names) == 1 and inferred.setdefault(part.names[0], _size(part)) != part.size:
        name, size = part.names[0], part.size
        problem = f"{name!r} is of size {inferred[name]} elsewhere, here of size {size}"
        raise where.error(problem, part.span, "a name has one size in a layout: write another name here")


def _size(part: Part) -> int:
    assert part.size is not None
    return part.size


def _product(parts: Iterable[Part]) -> int:
    return math.prod(part.size for part in parts if part.size is not None)


def _show(parts: Iterable[Part]) -> str:
    """`tp=2 * h * 4`."""
    shown = []
    for part in parts:
        label = part.axis or " ".join(part.names)
        shown.append(str(part.size) if not label else label if part.size is None else f"{label}={part.size}")
    return " * ".join(shown)


def _not_divisible(parts: list[Part], block: int, where: Where) -> LayoutError:
    divisors = [k for k in range(1, block + 1) if block % k == 0]
    near = sorted(sorted(divisors, key=lambda k: abs(k - _product(parts)))[:6])
    problem = f"a non-divisible segment: {_show(parts)} does not divide {block}"
    fix = f"only a mesh axis cuts unevenly; sizes that divide {block}: {', '.join(map(str, near))}"
    return where.error(problem, (parts[0].span[0], parts[-1].span[1]), fix)


def _give_size(*names: str) -> str:
    return "give sizes={" + ", ".join(f"{name!r}: ..." for name in names) + "}"


def _trailing_names(parts: list[Part]) -> str:
    """The names behind the last mesh axis, by which the dim is printed."""
    trailing = list(takewhile(lambda part: part.axis is None, reversed(parts)))
    return " ".join(name for part in reversed(trailing) for name in part.names)
