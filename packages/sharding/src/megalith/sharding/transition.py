"""How does a tensor get from one layout to another? A transition: the cheapest sequence of collective steps."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from megalith.sharding.cost import Cost, collective_cost
from megalith.sharding.layout import Digit, Dim, Layout
from megalith.sharding.mesh import Link, Mesh
from megalith.sharding.overlap import aligned, is_even, keep_axes, largest, largest_overlap, merge, most_missing

__all__ = ["KINDS", "Step", "Transition", "TransitionError", "plan"]

KINDS = ("slice", "zero", "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "exchange")

Dims = tuple[Dim, ...]
State = tuple[str, ...]


class TransitionError(ValueError):
    """Two layouts between which there is no transition."""


@dataclass(frozen=True)
class Step:
    """One collective, or one free local step, of a transition.

    | kind | what happens along `axes` |
    | --- | --- |
    | `slice` | replicas drop what the target does not hold: free |
    | `zero` | replicas or shards become terms of a partial value, the neutral element elsewhere: free |
    | `all_gather` | shards become replicas |
    | `reduce_scatter` | terms are reduced, each rank keeps a shard |
    | `all_reduce` | terms are reduced, each rank keeps all |
    | `all_to_all` | shards of some digits become shards of others, in chunks of equal size |
    | `exchange` | each rank fetches what it lacks, in pieces of any size (an `all_to_all_v`) |

    Args:
        kind: one of `KINDS`.
        axes: the mesh axes that span the group, in the order of the mesh: the ranks of a group ascend.
        dims: the tensor dims whose index sets change.
        source: the layout before.
        target: the layout after.
        op: `"sum"`, `"max"` or `"min"` where terms are made or reduced, else empty.
    """

    kind: str
    axes: tuple[str, ...]
    dims: tuple[int, ...]
    source: Layout
    target: Layout
    op: str = ""

    @cached_property
    def _hash(self) -> int:
        return hash((self.kind, self.axes, self.source, self.target))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def group_size(self) -> int:
        """How many ranks take part."""
        return math.prod(self.source.mesh.sizes[axis] for axis in self.axes)

    def cost(self, itemsize: int) -> Cost:
        """The cost on the busiest rank, for elements of `itemsize` bytes; see `collective_cost`."""
        return _price(self.kind, self.source.mesh, self.axes, self.source.dims, self.target.dims, itemsize)

    def __str__(self) -> str:
        op = f" {self.op}" if self.op else ""
        return f"{self.kind}{op} over {', '.join(self.axes)}: {self.source} -> {self.target}"


@dataclass(frozen=True)
class Transition:
    """The steps from one layout to another, with the bytes that the busiest rank receives and the seconds."""

    steps: tuple[Step, ...]
    bytes_received: int = 0
    seconds: float = 0.0


def plan(source: Layout, target: Layout, itemsize: int, allow_exchange: bool = True) -> Transition:
    """The cheapest transition between two layouts of one tensor.

    The search is over the layouts in which each axis stands where it does in the source, where it does in the target,
    or nowhere, and over the collectives between these; cost is seconds, then bytes, then the number of collectives.
    A value that is partial in the target too stays so; no other shard ever becomes a term. Tiers are ignored.

    Args:
        source: where the elements are.
        target: where they are to be; of the same shape and mesh.
        itemsize: bytes of an element.
        allow_exchange: whether pieces of unequal size may be sent (`exchange`).

    Returns:
        the steps; none where every rank already holds what it needs.

    Raises:
        TransitionError: other shapes or meshes, or a sum and a maximum in one partial value.

    >>> mesh = Mesh("dp=2 tp=2")
    >>> dims = Dim.of(8, (Digit("tp", 2, 4),)), Dim.of(6)
    >>> whole = Layout(mesh, (Dim.of(8), Dim.of(6)))
    >>> [step.kind for step in plan(Layout(mesh, dims), whole, 4).steps]
    ['all_gather']
    >>> [step.kind for step in plan(whole.with_partial({"tp": "sum"}), Layout(mesh, dims), 4).steps]
    ['reduce_scatter']
    >>> plan(whole.with_partial({"tp": "sum"}), whole, 4).bytes_received    # 2 * 48 elements * 1/2 * 4 bytes
    192
    """
    if source == target:
        return _NOTHING
    links = tuple(sorted(source.mesh.links.items())) if source.mesh.links else ()
    return _plan(source, target, itemsize, allow_exchange, links)


_NOTHING = Transition(())


@dataclass(frozen=True, slots=True)
class _Move:
    """An axis that does not stay put: before and after it holds dims (`"dims"`), terms (an op) or replicas (`""`)."""

    axis: str
    before: str
    after: str


@lru_cache(maxsize=65536)
def _plan(
    source: Layout, target: Layout, itemsize: int, allow_exchange: bool, links: tuple[tuple[str, Link], ...]
) -> Transition:
    _check(source, target)
    moves = _moves(source, target)
    if not moves:
        return _NOTHING
    direct = _direct(source, target, moves)
    if direct is None:
        steps = _Search(source, target, moves, itemsize, allow_exchange).run()
    else:
        steps = (_step(direct, tuple(m.axis for m in moves), source, target),)
    cost = sum((step.cost(itemsize) for step in steps), Cost())
    return Transition(steps, cost.bytes_received, cost.seconds)


def _check(source: Layout, target: Layout) -> None:
    if source.mesh != target.mesh:
        raise TransitionError(f"a tensor cannot go from Mesh({source.mesh.pattern!r}) to Mesh({target.mesh.pattern!r})")
    if source.shape != target.shape:
        raise TransitionError(
            f"{source} is of shape {source.shape} and {target} of shape {target.shape}; a transition keeps the shape"
        )
    for layout in (source, target):
        ops = sorted({op for axis, op in layout.partial if layout.mesh.sizes[axis] > 1})
        if len(ops) > 1:
            raise TransitionError(
                f"{layout} mixes {' and '.join(ops)}; a partial value has one op: reduce the axes of the other first"
            )


def _moves(source: Layout, target: Layout) -> list[_Move]:
    """The axes whose digits or terms differ, in the order of the mesh."""
    changed = [(a, b) for a, b in zip(source.dims, target.dims, strict=True) if a != b]
    if source.partial == target.partial and not changed:
        return []
    before, after = dict(source.partial), dict(target.partial)
    holds, will_hold = {x for a, _ in changed for x in a.axes}, {x for _, b in changed for x in b.axes}
    moves = []
    for axis, size in source.mesh.sizes.items():
        was = before.get(axis) or ("dims" if axis in holds else "")
        becomes = after.get(axis) or ("dims" if axis in will_hold else "")
        if size == 1 or (was == becomes and was != "dims"):
            continue
        if was == becomes and all(_same_digit(a, b, axis, size) for a, b in changed):
            continue
        moves.append(_Move(axis, was, becomes))
    return moves


def _same_digit(a: Dim, b: Dim, axis: str, size: int) -> bool:
    only = frozenset((axis,))
    a, b = keep_axes(a, only), keep_axes(b, only)
    return a == b or (
        a.axes == b.axes == (axis,) and all(a.ranges({axis: i}) == b.ranges({axis: i}) for i in range(size))
    )


def _direct(source: Layout, target: Layout, moves: Sequence[_Move]) -> str | None:
    """The kind of the one step that is known to be best, where there is one without a search."""
    if len({(m.before == "dims", m.before, m.after == "dims", m.after) for m in moves}) > 1:
        return None
    before, after = moves[0].before, moves[0].after
    if not before and after == "dims":
        return "slice"
    if after and after != "dims":
        return "zero" if before in ("", "dims") else None
    mesh = source.mesh
    if len(moves) > 1 and len({mesh.link(m.axis) for m in moves}) > 1:
        return None
    if before != "dims" and not after:
        n = math.prod(mesh.sizes[m.axis] for m in moves)
        return "all_reduce" if len(moves) == 1 or math.prod(map(largest, source.dims)) % n == 0 else None
    if not all(is_even(a) and is_even(b) for a, b in zip(source.dims, target.dims, strict=True) if a != b):
        return None
    if before != "dims":
        return "reduce_scatter"
    if not after:
        return "all_gather"
    if len(moves) > 1:
        return None
    old, new = (next(d for d, dim in enumerate(x.dims) if moves[0].axis in dim.axes) for x in (source, target))
    return "all_to_all" if old != new else None


def _step(kind: str, axes: tuple[str, ...], source: Layout, target: Layout) -> Step:
    dims = tuple(i for i, (a, b) in enumerate(zip(source.dims, target.dims, strict=True)) if a != b)
    terms = {"zero": target, "reduce_scatter": source, "all_reduce": source}.get(kind)
    return Step(kind, axes, dims, source, target, dict(terms.partial)[axes[0]] if terms else "")


def _price(kind: str, mesh: Mesh, axes: Sequence[str], before: Dims, after: Dims, itemsize: int) -> Cost:
    """The cost of a step on the busiest rank, padding included."""
    if kind in ("slice", "zero"):
        return Cost()
    if kind == "exchange":
        elements = _missing(before, after)
    elif kind in ("all_gather", "all_reduce"):
        elements = math.prod(map(largest, before))
    else:
        elements = math.prod(mesh.sizes[axis] for axis in axes)
        if kind == "reduce_scatter":
            elements *= math.prod(map(largest, after))
        else:
            free = frozenset(axes)
            elements *= math.prod(
                largest(a) if a == b else largest_overlap(a, b, free) for a, b in zip(before, after, strict=True)
            )
    return collective_cost(kind, mesh, axes, elements, itemsize)


def _missing(before: Dims, after: Dims) -> int:
    pairs = [(a, b) for a, b in zip(before, after, strict=True) if a != b]
    same = math.prod(largest(a) for a, b in zip(before, after, strict=True) if a == b)
    return same * most_missing(tuple(a for a, _ in pairs), tuple(b for _, b in pairs))


class _Search:
    """Dijkstra over states: per moving axis where it is, `"s"` as in the source, `"t"` as in the target, `"f"` free.

    Terms may also be scattered over local indices of dim i (`"0"`, `"1"`, ...) on their way: a reduce-scatter halves an
    all-reduce even where the digits that the target wants are still taken by another axis.
    """

    def __init__(
        self, source: Layout, target: Layout, moves: Sequence[_Move], itemsize: int, allow_exchange: bool
    ) -> None:
        self.source, self.target, self.moves = source, target, moves
        self.itemsize, self.allow_exchange = itemsize, allow_exchange
        moving = {m.axis for m in moves}
        self.fixed = frozenset(axis for axis in (*source.axes, *target.axes) if axis not in moving)
        self.kept_terms = {x: op for x, op in source.partial if x not in moving and source.mesh.sizes[x] > 1}
        self.parking = self._parking()
        self.known: dict[State, tuple[Dims, dict[str, str]] | None] = {}

    def run(self) -> tuple[Step, ...]:
        start = tuple("s" if m.before else "f" for m in self.moves)
        goal = tuple("t" if m.after else "f" for m in self.moves)
        best = {start: (0.0, 0, 0)}
        came: dict[State, tuple[State, str, tuple[str, ...]]] = {}
        heap = [(0.0, 0, 0, start)]
        while heap:
            seconds, size, n, state = heapq.heappop(heap)
            if state == goal:
                break
            if best[state] < (seconds, size, n):
                continue
            for kind, axes, after in self._edges(state):
                reached = self._layout(after)
                if reached is None:
                    continue
                here = self._layout(state)
                assert here is not None
                cost = _price(kind, self.source.mesh, axes, here[0], reached[0], self.itemsize)
                total = (seconds + cost.seconds, size + cost.bytes_received, n + (kind not in ("slice", "zero")))
                if total < best.get(after, (math.inf, 0, 0)) and total <= best.get(goal, (math.inf, 0, 0)):
                    best[after] = total
                    came[after] = (state, kind, axes)
                    heapq.heappush(heap, (*total, after))
        return self._steps(start, goal, came)

    def _steps(
        self, start: State, goal: State, came: dict[State, tuple[State, str, tuple[str, ...]]]
    ) -> tuple[Step, ...]:
        path: list[tuple[str, tuple[str, ...], State]] = []
        state = goal
        while state != start:
            before, kind, axes = came[state]
            if path and kind in ("slice", "zero") and path[-1][0] == kind:
                axes = tuple(a for a in self.source.mesh.axes if a in (*axes, *path[-1][1]))
                path[-1] = (kind, axes, path[-1][2])
            else:
                path.append((kind, axes, state))
            state = before
        steps, here = [], self.source
        for kind, axes, state in reversed(path):
            found = self._layout(state)
            assert found is not None
            there = self.target if state == goal else replace(self.source, dims=found[0]).with_partial(found[1])
            steps.append(_step(kind, axes, here, there))
            here = there
        return tuple(steps)

    def _layout(self, state: State) -> tuple[Dims, dict[str, str]] | None:
        """The dims and terms of a state; None where no digits express it."""
        if state not in self.known:
            self.known[state] = self._make(state)
        return self.known[state]

    def _make(self, state: State) -> tuple[Dims, dict[str, str]] | None:
        terms = dict(self.kept_terms)
        old, new, parked = set(), set(), []
        for move, where in zip(self.moves, state, strict=True):
            if where == "s" and move.before == "dims":
                old.add(move.axis)
            elif where == "t" and move.after == "dims":
                new.add(move.axis)
            elif where in "st":
                terms[move.axis] = move.before if where == "s" else move.after
            elif where != "f":
                parked.append((int(where), move.axis))
        if len(set(terms.values())) > 1:
            return None
        dims: list[Dim] = []
        for i, (a, b) in enumerate(zip(self.source.dims, self.target.dims, strict=True)):
            dim: Dim | None = a
            if a != b:
                stays = not old.isdisjoint(a.axes)
                arrives = not new.isdisjoint(b.axes)
                a, b = keep_axes(a, self.fixed | old), keep_axes(b, self.fixed | new)
                dim = merge(a, b) if stays and arrives else a if stays else b
            for place, axis in parked:
                if dim is not None and place == i:
                    dim = merge(dim, self.parking[axis][i])
            if dim is None:
                return None
            dims.append(dim)
        return tuple(dims), terms

    def _edges(self, state: State) -> Iterator[tuple[str, tuple[str, ...], State]]:
        """The steps out of a state: kind, axes and the state after."""
        holding, terms, mesh = [], [], self.source.mesh
        for i, (move, where) in enumerate(zip(self.moves, state, strict=True)):
            if where == "f" and move.after:
                yield "slice" if move.after == "dims" else "zero", (move.axis,), _put(state, (i,), "t")
            elif where == "s" and move.before != "dims":
                terms.append(i)
            elif where not in "ft":
                holding.append(i)
                if move.after not in ("", "dims"):
                    yield "zero", (move.axis,), _put(state, (i,), "t")
        for some in _subsets(holding):
            axes = tuple(self.moves[i].axis for i in some)
            yield "all_gather", axes, _put(state, some, "f")
            if all(self.moves[i].after == "dims" for i in some):
                yield "all_to_all", axes, _put(state, some, "t")
        for some in _subsets(terms):
            axes = tuple(self.moves[i].axis for i in some)
            yield "all_reduce", axes, _put(state, some, "f")
            if all(self.moves[i].after == "dims" for i in some):
                yield "reduce_scatter", axes, _put(state, some, "t")
        for i in terms:
            for d in self.parking.get(self.moves[i].axis, ()):
                yield "reduce_scatter", (self.moves[i].axis,), _put(state, (i,), str(d))
        if holding and self.allow_exchange:
            after = list(state)
            for i, move in enumerate(self.moves):
                if i not in terms and move.after in ("", "dims"):
                    after[i] = "t" if move.after else "f"
            axes = tuple(m.axis for m, x, y in zip(self.moves, state, after, strict=True) if x != y)
            if axes and math.prod(mesh.sizes[axis] for axis in axes) > 1:
                yield "exchange", axes, tuple(after)

    def _parking(self) -> dict[str, dict[int, Dim]]:
        """Per axis of terms and dim, a digit that is local in source and target, the innermost that divides."""
        terms = [m.axis for m in self.moves if m.before not in ("", "dims")]
        parking: dict[str, dict[int, Dim]] = {axis: {} for axis in terms}
        if len(terms) == len(self.moves):
            return parking
        for i, (a, b) in enumerate(zip(self.source.dims, self.target.dims, strict=True)):
            pairs = aligned(a, b)
            if pairs is None or len(pairs) > 1 or not (is_even(a) and is_even(b)):
                continue
            local = [[x.size, x.stride] for x, y in pairs[0] if not (x.axis or y.axis)]
            local.append([pairs[0][-1][0].stride if pairs[0] else a.size, 1])
            for axis in terms:
                n = self.source.mesh.sizes[axis]
                for place in reversed(local):
                    size, stride = place
                    if size and size % n == 0:
                        extent, step = size * stride, size // n * stride
                        digits = Digit(None, a.size // extent, extent), Digit(axis, n, step)
                        parking[axis][i] = Dim.of(a.size, digits)
                        place[0] = size // n
                        break
        return parking


def _put(state: State, places: Sequence[int], where: str) -> State:
    return tuple(where if i in places else old for i, old in enumerate(state))


def _subsets(places: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All non-empty subsets of few places; of many, single ones and all."""
    if len(places) <= 3:
        for n in range(1, len(places) + 1):
            yield from itertools.combinations(places, n)
    else:
        yield from ((i,) for i in places)
        yield tuple(places)
