"""How does attention run where the sequence is sharded? Blocks of keys are passed around a ring, and joined as met.

Each rank keeps its queries and hands its keys and values to the next one, n - 1 times, while it attends to those at
hand; what it finds is joined by log-sum-exp (Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers",
arXiv:2310.01889). In the backward keys and values travel once more, and their gradients with them until they are home.
Of a causal attention only what a query may see is computed: with a zigzag layout `b h (2 ~sp s) d` that is half of each
block but the own one, on every rank alike (compare "Striped Attention", arXiv:2311.09431), and no mask is made.

| bytes received by a rank | forward | backward |
| --- | --- | --- |
| K and V, as large as a rank holds them | (n - 1) (K + V) | (n - 1) (K + V) + (n - 1) (dK + dV) |

Of heads that are repeated for groups of queries one of each group travels: the graph tells which are equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

import torch

from megalith.core import composites
from megalith.core.localize import Emit
from megalith.sharding.graph import Graph, Node, Ref, refs
from megalith.sharding.layout import Layout, Range

__all__ = ["EXPAND", "Part", "parts"]

aten = torch.ops.aten
_HEADS, _SEQUENCE = 1, 2  # dims of `b h s d`


# --- who sees whom -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """Local rows of queries that all see local columns of keys; or, `causal`, each the columns up to its own place."""

    rows: Range
    columns: Range
    causal: bool = False


def parts(queries: Sequence[Range], keys: Sequence[Range], causal: bool) -> tuple[Part, ...]:
    """The attention of some queries to some keys, in as few parts as need no mask.

    Args:
        queries: the positions of the queries in the sequence, `[start, stop)`, ascending.
        keys: those of the keys.
        causal: whether a query sees only keys at its own position and before.

    Returns:
        the parts, in the order of local indices; nothing where no query sees a key.

    >>> parts([(0, 2), (6, 8)], [(2, 4), (4, 6)], causal=True)        # zigzag over 2: the later half sees all
    (Part(rows=(2, 4), columns=(0, 4), causal=False),)
    >>> parts([(2, 4), (4, 6)], [(0, 2), (6, 8)], causal=True)        # all see the first half
    (Part(rows=(0, 4), columns=(0, 2), causal=False),)
    >>> parts([(4, 8)], [(0, 8)], causal=True)
    (Part(rows=(0, 4), columns=(0, 4), causal=False), Part(rows=(0, 4), columns=(4, 8), causal=True))
    """
    n_rows, n_columns = (sum(stop - start for start, stop in ranges) for ranges in (queries, keys))
    if not n_rows or not n_columns:
        return ()
    if not causal or tuple(queries) == tuple(keys):
        return (Part((0, n_rows), (0, n_columns), causal),)
    edges = sorted({edge for ranges in (queries, keys) for piece in ranges for edge in piece})
    blocks = list(_cut(keys, edges))
    full: list[Part] = []
    own: list[Part] = []
    for (start, stop), rows in _cut(queries, edges):
        n_seen = sum(b - a for (a, b), _ in blocks if b <= start)
        if full and full[-1].columns[1] == n_seen and full[-1].rows[1] == rows[0]:
            full[-1] = Part((full[-1].rows[0], rows[1]), full[-1].columns)
        elif n_seen:
            full.append(Part(rows, (0, n_seen)))
        own += [Part(rows, columns, causal=True) for piece, columns in blocks if piece == (start, stop)]
    return (*full, *own)


def _cut(ranges: Sequence[Range], edges: Sequence[int]) -> Iterator[tuple[Range, Range]]:
    """Ranges cut at edges: each piece, and where it lies among all of them."""
    done = 0
    for start, stop in ranges:
        cuts = [start, *(edge for edge in edges if start < edge < stop), stop]
        for a, b in pairwise(cuts):
            yield (a, b), (done, done + b - a)
            done += b - a


def _within(ranges: Sequence[Range], part: Range) -> list[Range]:
    """The positions that a run of local indices has."""
    found, done = [], 0
    for start, stop in ranges:
        a, b = max(part[0] - done, 0), min(part[1] - done, stop - start)
        if a < b:
            found.append((start + a, start + b))
        done += stop - start
    return found


# --- the ring -------------------------------------------------------------------------------------------


class _Ring:
    """The ranks that pass keys and values on, in the order of a group; a ring of one where nothing is passed."""

    def __init__(self, e: Emit, keys: int) -> None:
        """Of a run about to become instructions, `keys` the number of the operand that keys are; values come next."""
        self.e, self.axes = e, e.run.ring_axes
        self.layouts = tuple(version.layout for version in e.run.operands[keys : keys + 2])
        self.peers = self.layouts[0].mesh.peers(e.rank, self.axes)
        self.n, self.place = len(self.peers), self.peers.index(e.rank)
        self.repeats = _repeats(e, keys, self.layouts) if self.n > 1 else 1

    def owner(self, step: int) -> int:
        """The rank whose block is here at a step."""
        return self.peers[(self.place - step) % self.n]

    def positions(self, step: int) -> tuple[Range, ...]:
        """Where in the sequence the block lies that is here at a step."""
        return self.layouts[0].ranges(self.owner(step))[_SEQUENCE]

    def blocks(self, keys: Ref, values: Ref) -> Iterator[tuple[Ref, Ref]]:
        """Keys and values of each rank in turn, this one's first; the next are under way while a block is worked on."""
        flat = self.pack(self.once(keys), self.once(values)) if self.n > 1 else None
        for step in range(self.n):
            arriving = None
            if flat is not None and step + 1 < self.n:
                arriving = self.hand_on(flat, step, "the next keys and values")
            yield keys, values
            if arriving is not None:
                flat = arriving()
                keys, values = map(self.repeated, self.unpack(flat, step + 1))

    def shapes(self, rank: int) -> list[tuple[int, ...]]:
        """The local shapes of keys and values as they travel."""
        whole = [layout.local_shape(rank) for layout in self.layouts]
        return [(b, h // self.repeats, s, d) for b, h, s, d in whole]

    def hand_on(self, flat: Ref, step: int, what: str) -> Callable[[], Ref]:
        """Gives what belongs to this step's block to the next rank; the result awaits what the one before gives."""
        sizes = {rank: sum(map(math.prod, self.shapes(rank))) for rank in self.peers}
        send, receive = [0] * self.n, [0] * self.n
        send[(self.place + 1) % self.n] = sizes[self.owner(step)]
        receive[(self.place - 1) % self.n] = sizes[self.owner(step + 1)]
        why = f"ring attention over {' '.join(self.axes)}: {what}"
        nbytes = max(sizes.values()) * self.e.types[flat.id].dtype.itemsize
        arriving, layout = (sum(receive),), self.layouts[0]
        return self.e.start(
            "exchange", self.axes, flat, arriving, nbytes, layout, why, send=tuple(send), receive=tuple(receive)
        )

    def pack(self, *tensors: Ref) -> Ref:
        """Tensors flat, one behind the other."""
        return self.e.emit(aten.cat.default, [self.e.emit(aten.reshape.default, t, [-1]) for t in tensors])

    def unpack(self, flat: Ref, step: int) -> tuple[Ref, Ref]:
        """The two tensors that belong to a step's block."""
        found, start = [], 0
        for shape in self.shapes(self.owner(step)):
            piece = self.e.emit(aten.slice.Tensor, flat, 0, start, start + math.prod(shape))
            found.append(self.e.emit(aten.reshape.default, piece, list(shape)))
            start += math.prod(shape)
        return found[0], found[1]

    # Between the heads that a rank computes with and those that travel: `b (g r) s d` and `b g s d`.

    def once(self, x: Ref) -> Ref:
        """One head of each group."""
        h = self.e.shape(x)[_HEADS]
        return x if self.repeats == 1 else self.e.emit(aten.slice.Tensor, x, _HEADS, 0, h, self.repeats)

    def repeated(self, x: Ref) -> Ref:
        """Each head for its whole group."""
        return x if self.repeats == 1 else self.e.emit(aten.repeat_interleave.self_int, x, self.repeats, _HEADS)

    def summed(self, x: Ref) -> Ref:
        """The sum over each group."""
        b, h, s, d = self.e.shape(x)
        groups = [b, h // self.repeats, self.repeats, s, d]
        if self.repeats == 1:
            return x
        return self.e.emit(aten.sum.dim_IntList, self.e.emit(aten.reshape.default, x, groups), [2])

    def spread(self, x: Ref) -> Ref:
        """What has these sums over its groups: the first head of each has it, the others zeros."""
        b, g, s, d = self.e.shape(x)
        h = g * self.repeats
        if self.repeats == 1:
            return x
        return self.e.emit(aten.slice_backward.default, x, [b, h, s, d], _HEADS, 0, h, self.repeats)


# --- equal heads ----------------------------------------------------------------------------------------


def _repeats(e: Emit, keys: int, layouts: Sequence[Layout]) -> int:
    """How many heads of keys, and of values, in a row are equal, and of their gradients only summed; 1 for none."""
    node, graph = e.run.node, e.graph
    found = {_repeated(graph, ref.id) for ref in node.operands[keys : keys + 2]}
    n = found.pop()
    edges = [edge for layout in layouts for piece in layout.ranges(e.rank)[_HEADS] for edge in piece]
    gradients = node.outputs[1:] if node.name == "megalith.sdpa_backward.default" else ()
    told = not found and all(edge % n == 0 for edge in edges)
    return n if told and all(_only_summed(graph, value, n) for value in gradients) else 1


def _maker(graph: Graph, value: int, name: str) -> Node | None:
    """The node that makes a value, if it is of this name."""
    position = graph.producers.get(value)
    node = None if position is None else graph.nodes[position]
    return node if node is not None and node.name == name else None


def _repeated(graph: Graph, value: int) -> int:
    """The r of a value that is made by `b g 1 s d -> b g r s d -> b (g r) s d`; 1 of any other."""
    joined = _maker(graph, value, "aten.reshape.default")
    spread = None if joined is None else _maker(graph, joined.args[0].id, "aten.expand.default")
    if spread is None:
        return 1
    before, after = graph.types[spread.args[0].id].shape, graph.types[spread.outputs[0]].shape
    b, h, s, d = graph.types[value].shape
    same = len(after) == 5 and before == (*after[:2], 1, *after[3:])
    return after[2] if same and after == (b, h // after[2], after[2], s, d) else 1


def _only_summed(graph: Graph, value: int, n: int) -> bool:
    """Whether all that is done with a value is to sum it over groups of n heads."""
    b, h, s, d = graph.types[value].shape
    grouped = [graph.nodes[position] for position in graph.users.get(value, ())]
    sums = [graph.nodes[position] for node in grouped for position in graph.users.get(node.outputs[0], ())]
    seen = {value, *(node.outputs[0] for node in grouped)}
    return (
        not seen & {ref.id for ref in refs(graph.outputs)}
        and all(node.name == "aten.reshape.default" for node in grouped)
        and all(graph.types[node.outputs[0]].shape == (b, h // n, n, s, d) for node in grouped)
        and all(node.name == "aten.sum.dim_IntList" and list(node.args[1]) == [2] for node in sums)
    )


# --- attention ----------------------------------------------------------------------------------------------


def _sdpa(e: Emit) -> tuple[Ref, ...] | None:
    q, k, v, mask, causal, scale = e.args
    ring = _Ring(e, keys=1)
    queries = e.run.operands[0].layout.ranges(e.rank)[_SEQUENCE]
    if ring.n == 1 and parts(queries, ring.positions(0), causal) == _whole(e, q, k, causal):
        return None
    total: tuple[Ref, Ref] | None = None
    for step, (keys, values) in enumerate(ring.blocks(k, v)):
        for part in parts(queries, ring.positions(step), causal):
            columns = [_run_of(e, x, _SEQUENCE, part.columns) for x in (keys, values)]
            seen = _mask(e, mask, part, ring.positions(step))
            rows = _run_of(e, q, _SEQUENCE, part.rows)
            found = e.emit(torch.ops.megalith.sdpa.default, rows, *columns, seen, part.causal, scale)
            if total is None and e.shape(rows) == e.shape(q):
                total = found
            else:
                total = e.emit(torch.ops.megalith.sdpa_merge.default, *(total or _nothing(e, q)), *found, part.rows[0])
    out, lse = total or _nothing(e, q)
    return _as(e, out, q), lse


def _sdpa_backward(e: Emit) -> tuple[Ref, ...] | None:
    g, q, k, v, mask, out, lse, causal, scale = e.args
    ring = _Ring(e, keys=2)
    queries = e.run.operands[1].layout.ranges(e.rank)[_SEQUENCE]
    if ring.n == 1 and parts(queries, ring.positions(0), causal) == _whole(e, q, k, causal):
        return None
    dq: Ref | None = None
    home: tuple[Ref, Ref] | None = None  # gradients of this rank's keys and values, by its own queries
    arriving: Callable[[], Ref] | None = None  # those of the block at hand, by the queries that it has met
    for step, (keys, values) in enumerate(ring.blocks(k, v)):
        dk: Ref | None = None
        dv: Ref | None = None
        for part in parts(queries, ring.positions(step), causal):
            gs, qs, outs, lses = (_run_of(e, x, _SEQUENCE, part.rows) for x in (g, q, out, lse))
            ks, vs = (_run_of(e, x, _SEQUENCE, part.columns) for x in (keys, values))
            seen = _mask(e, mask, part, ring.positions(step))
            found = e.emit(
                torch.ops.megalith.sdpa_backward.default, gs, qs, ks, vs, seen, outs, lses, part.causal, scale
            )
            dq = _plus(e, dq, _placed(e, found[0], part.rows, q))
            dk = _plus(e, dk, _placed(e, found[1], part.columns, keys))
            dv = _plus(e, dv, _placed(e, found[2], part.columns, values))
        if step == 0:
            home = dk or _zeros(e, k), dv or _zeros(e, v)
            continue
        met = arriving() if arriving is not None else None
        mine = ring.pack(ring.summed(dk), ring.summed(dv)) if dk is not None and dv is not None else None
        if mine is None and met is None:
            mine = ring.pack(*(ring.summed(_zeros(e, x)) for x in (keys, values)))
        both = _plus(e, met, mine) if mine is not None else met
        assert both is not None
        arriving = ring.hand_on(both, step, "gradients of keys and values, on their way home")
    assert home is not None
    if arriving is not None:
        met_k, met_v = map(ring.spread, ring.unpack(arriving(), ring.n))
        home = _plus(e, home[0], met_k), _plus(e, home[1], met_v)
    return dq or _zeros(e, q), *home


EXPAND: Mapping[str, Callable[[Emit], tuple[Ref, ...] | None]] = MappingProxyType(
    {"megalith.sdpa.default": _sdpa, "megalith.sdpa_backward.default": _sdpa_backward}
)
"""Ops that become several: each gives what its outputs are, or None where it stays as it is."""


def _whole(e: Emit, q: Ref, k: Ref, causal: bool) -> tuple[Part, ...]:
    """All rows and columns, causal by their places on this rank: what the op does by itself."""
    return (Part((0, e.shape(q)[_SEQUENCE]), (0, e.shape(k)[_SEQUENCE]), causal),)


def _run_of(e: Emit, x: Ref, dim: int, part: Range) -> Ref:
    """A run of one dim's indices."""
    return x if part == (0, e.shape(x)[dim]) else e.emit(aten.slice.Tensor, x, dim, *part)


def _placed(e: Emit, x: Ref, part: Range, like: Ref) -> Ref:
    """What was computed for a run of the sequence, with zeros around it."""
    shape = e.shape(like)
    if part == (0, shape[_SEQUENCE]):
        return x
    return e.emit(aten.slice_backward.default, x, list(shape), _SEQUENCE, *part, 1)


def _mask(e: Emit, mask: Ref | None, part: Part, keys: Sequence[Range]) -> Ref | None:
    """The rows and columns of a mask that a part needs; its own rows are local, its columns those of all keys."""
    if mask is None:
        return None
    rank = len(e.shape(mask))
    if e.shape(mask)[-1] > 1:
        runs = [_run_of(e, mask, rank - 1, run) for run in _within(keys, part.columns)]
        mask = runs[0] if len(runs) == 1 else e.emit(aten.cat.default, runs, rank - 1)
    return mask if rank < 2 or e.shape(mask)[-2] == 1 else _run_of(e, mask, rank - 2, part.rows)


def _plus(e: Emit, total: Ref | None, term: Ref) -> Ref:
    return term if total is None else e.emit(aten.add.Tensor, total, term)


def _zeros(e: Emit, like: Ref) -> Ref:
    return e.emit(aten.full.default, list(e.shape(like)), 0, dtype=e.types[like.id].dtype)


def _nothing(e: Emit, q: Ref) -> tuple[Ref, Ref]:
    """What queries find that see no key yet."""
    dtype = composites.lse_dtype(e.types[q.id].dtype)
    return _zeros(e, q), e.emit(aten.full.default, list(e.shape(q)[:-1]), -math.inf, dtype=dtype)


def _as(e: Emit, x: Ref, like: Ref) -> Ref:
    dtype = e.types[like.id].dtype
    return x if e.types[x.id].dtype == dtype else e.emit(aten._to_copy.default, x, dtype=dtype)
