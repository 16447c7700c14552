"""A transition is exact, moves what it says, and is never dearer than the known ways; judged on plain index sets."""

import heapq
import itertools
import math
from collections import defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megalith.core.backends.lockstep import ReplicaError, Traffic, apply, apply_step, gather, scatter
from megalith.sharding.layout import Digit, Dim, Layout, Segment, replicated
from megalith.sharding.mesh import Link, Mesh
from megalith.sharding.transition import Step, TransitionError, plan
from megalith.sharding.transport import pack, recipe, unpack

COMBINE = {"sum": np.add, "max": np.maximum, "min": np.minimum}


def cut(size, *factors):
    """The digits of factors, major to minor: an axis and its size, or None and a size, and perhaps "back"."""
    digits, extent = [], size
    for axis, n, *turned in factors:
        extent = max(math.ceil(extent / n), 1)
        digits.append(Digit(axis, n, extent, bool(turned)))
    return Dim.of(size, tuple(digits))


def parts(tensor, layout, rank):
    """The elements of a whole tensor that a rank holds, by index sets."""
    held = [[i for start, stop in ranges for i in range(start, stop)] for ranges in layout.ranges(rank)]
    return tensor[np.ix_(*held)] if held else tensor


@st.composite
def meshes(draw):
    n = draw(st.integers(2, 3))
    sizes = draw(st.lists(st.integers(1, 4), min_size=n, max_size=n).filter(lambda sizes: math.prod(sizes) <= 18))
    return Mesh(" ".join(f"{name}={size}" for name, size in zip("abc", sizes, strict=False)))


@st.composite
def dims(draw, mesh, size, axes):
    """A dim of this size held by these axes: uneven cuts, local digits before them, zigzags, segments."""

    def segment(n, names):
        factors = [(a, mesh.sizes[a], *(["back"] if draw(st.integers(0, 3)) == 0 else [])) for a in names]
        for _ in range(draw(st.integers(0, 2))):
            factors.insert(draw(st.integers(0, len(factors))), (None, draw(st.integers(1, 3))))
        return cut(n, *factors)

    if size > 1 and draw(st.integers(0, 4)) == 0:
        middle = draw(st.integers(1, size - 1))
        some = axes[: draw(st.integers(0, len(axes)))]
        return Dim.join([segment(middle, axes), segment(size - middle, some)])
    return segment(size, axes)


@st.composite
def layouts(draw, mesh, shape, ops=("sum", "max")):
    free = list(draw(st.permutations(mesh.axes)))
    placed = [[free.pop() for _ in range(draw(st.integers(0, min(2, len(free)))))] for _ in shape]
    op = draw(st.sampled_from(ops))
    partial = {axis: op for axis in free if draw(st.booleans())}
    made = tuple(draw(dims(mesh, n, axes)) for n, axes in zip(shape, placed, strict=True))
    return Layout(mesh, made).with_partial(partial)


@st.composite
def pairs(draw, sizes=(0, 1, 2, 3, 4, 5, 6, 8, 12)):
    mesh = draw(meshes())
    shape = tuple(draw(st.lists(st.sampled_from(sizes), min_size=0, max_size=3)))
    return draw(layouts(mesh, shape)), draw(layouts(mesh, shape))


def terms_of(layout):
    """Random terms: shards of every rank, and the whole value."""
    mesh, rng = layout.mesh, np.random.default_rng(0)
    wholes = defaultdict(lambda: rng.integers(-99, 99, layout.shape).astype(np.float64))
    ops = {op for _, op in layout.partial}
    shards = []
    for rank in range(mesh.size):
        here = mesh.coordinates(rank)
        shards.append(torch.tensor(parts(wholes[tuple(here[a] for a in layout.partial_axes)], layout, rank)))
    value = list(wholes.values())
    return shards, COMBINE[ops.pop()].reduce(value) if ops else value[0]


def assert_holds(layout, shards, whole):
    """Each rank holds its elements of the value, reduced along the axes of terms."""
    mesh = layout.mesh
    ops = dict(layout.partial)
    for rank in range(mesh.size):
        assert tuple(shards[rank].shape) == layout.local_shape(rank)
        peers = mesh.peers(rank, layout.partial_axes)
        value = shards[rank].numpy()
        if ops:
            value = COMBINE[next(iter(ops.values()))].reduce([shards[peer].numpy() for peer in peers])
        np.testing.assert_array_equal(value, parts(whole, layout, rank))


@settings(max_examples=300, deadline=None)
@given(pairs(), st.booleans())
def test_a_transition_is_exact_and_moves_what_it_says(pair, allow_exchange):
    source, target = pair
    transition = plan(source, target, 8, allow_exchange)
    shards, whole = terms_of(source)
    here, total = source, 0
    for step in transition.steps:
        assert step.source == here
        traffic = Traffic()
        shards = apply_step(step, shards, traffic)
        assert traffic.most_received == step.cost(8).bytes_received
        assert sum(traffic.received.values()) == sum(traffic.sent.values())
        here, total = step.target, total + traffic.most_received
        assert_holds(here, shards, whole)
    assert total == transition.bytes_received
    assert_holds(target, shards, whole)


@settings(max_examples=200, deadline=None)
@given(pairs())
def test_a_plan_is_never_dearer_than_gathering_all_and_slicing(pair):
    source, target = pair
    steps, here = [], source
    for axis, op in source.partial:
        if (axis, op) not in target.partial:
            there = here.with_partial({a: o for a, o in here.partial if a != axis})
            steps.append(Step("all_reduce", (axis,), (), here, there, op))
            here = there
    for axis in source.axes:
        steps.append(Step("all_gather", (axis,), (), here, here.without_axes((axis,))))
        here = steps[-1].target
    assert plan(source, target, 4).seconds <= sum(step.cost(4).seconds for step in steps) + 1e-15


@given(pairs(), st.sampled_from(["sum", "max", "min"]))
def test_scatter_and_gather_are_inverse(pair, op):
    layout = pair[0].with_partial({axis: op for axis in pair[0].partial_axes})
    whole = torch.tensor(np.random.default_rng(1).integers(-9, 9, layout.shape))
    for tensor in (whole, whole.double(), whole > 0):
        if op != "sum" or tensor.dtype is not torch.bool:
            assert torch.equal(gather(scatter(tensor, layout), layout, check=True), tensor)


def test_the_64_cube_matrix_product_moves_the_closed_form_volumes():
    mesh = Mesh("row=4 col=4")
    row, col, whole = cut(64, ("row", 4)), cut(64, ("col", 4)), Dim.of(64)
    block = Layout(mesh, (row, col))
    x = plan(block, Layout(mesh, (row, whole)), 1)
    w = plan(block, Layout(mesh, (whole, col)), 1)
    assert [s.kind for s in (*x.steps, *w.steps)] == ["all_gather", "all_gather"]
    assert x.bytes_received + w.bytes_received == 1536

    mesh = Mesh("dep=2 row=4 col=4")
    x = plan(
        Layout(mesh, (cut(64, ("dep", 2), ("row", 4)), col)),
        Layout(mesh, (cut(64, ("dep", 2), ("row", 4)), whole)),
        1,
    )
    w = plan(Layout(mesh, (row, col)), Layout(mesh, (whole, col)), 1)
    dw = plan(Layout(mesh, (row, col)).with_partial({"dep": "sum"}), Layout(mesh, (row, col)), 1)
    assert (x.bytes_received + w.bytes_received, dw.bytes_received) == (1152, 256)
    assert [s.kind for s in dw.steps] == ["all_reduce"]

    mesh = Mesh("i=4 j=4 k=4")
    i, j, k = (cut(64, (axis, 4)) for axis in "ijk")
    x = plan(Layout(mesh, (cut(64, ("i", 4), ("j", 4)), k)), Layout(mesh, (i, k)), 1)
    w = plan(Layout(mesh, (cut(64, ("k", 4), ("i", 4)), j)), Layout(mesh, (k, j)), 1)
    y = plan(Layout(mesh, (i, j)).with_partial({"k": "sum"}), Layout(mesh, (cut(64, ("i", 4), ("k", 4)), j)), 1)
    assert [s.kind for s in (*x.steps, *w.steps, *y.steps)] == ["all_gather", "all_gather", "reduce_scatter"]
    assert x.bytes_received + w.bytes_received + y.bytes_received == 576


DP, TP = ("dp", 2), ("tp", 4)
PROMPT = Link(1e9, 1e-12)
GRID = Mesh("dp=2 tp=4", {"dp": PROMPT, "tp": PROMPT})


@pytest.mark.parametrize(
    ("before", "after", "kinds", "elements"),
    [
        (([], []), ([TP], []), ["slice"], 0),
        (([TP], []), ([], []), ["all_gather"], 16 * 3),
        (([TP, DP], []), ([TP], []), ["all_gather"], 8),
        (([TP, DP], []), ([], []), ["all_gather"], 8 * 7),
        (([TP], [DP]), ([], []), ["all_gather"], 8 * 7),
        (([TP], []), ([], [TP]), ["all_to_all"], 16 * 3 // 4),
        (([TP, DP], []), ([DP, TP], []), ["exchange"], 8),
        (([], []), ([TP], [DP]), ["slice"], 0),
        (([TP], []), ([TP, DP], []), ["slice"], 0),
    ],
)
def test_common_transitions_are_one_step_of_the_closed_form_volume(before, after, kinds, elements):
    source, target = (Layout(GRID, (cut(8, *rows), cut(8, *columns))) for rows, columns in (before, after))
    transition = plan(source, target, 1)
    assert [step.kind for step in transition.steps] == kinds
    assert transition.bytes_received == elements


def test_terms_are_reduced_after_what_the_target_drops_is_dropped():
    source = replicated((8, 8), GRID).with_partial({"dp": "sum"})
    transition = plan(source, Layout(GRID, (cut(8, TP), Dim.of(8))), 1)
    assert [(step.kind, step.axes) for step in transition.steps] == [("slice", ("tp",)), ("all_reduce", ("dp",))]
    assert transition.bytes_received == 16


def test_terms_that_stay_terms_are_not_reduced():
    rows = Layout(GRID, (cut(8, TP), Dim.of(8))).with_partial({"dp": "sum"})
    transition = plan(rows, replicated((8, 8), GRID).with_partial({"dp": "sum"}), 1)
    assert [(step.kind, step.axes) for step in transition.steps] == [("all_gather", ("tp",))]


def test_replicas_become_terms_for_free():
    whole = replicated((8, 8), GRID)
    transition = plan(whole, whole.with_partial({"dp": "sum"}), 1)
    assert [(step.kind, step.op) for step in transition.steps] == [("zero", "sum")]
    assert transition.bytes_received == 0 and transition.seconds == 0


def test_a_slow_axis_is_gathered_before_a_fast_one():
    mesh = Mesh("dp=2 tp=4", {"dp": Link(1e9, 1e-5), "tp": Link(1e11, 1e-6)})
    source = Layout(mesh, (cut(1 << 20, TP), cut(64, DP)))
    steps = plan(source, replicated((1 << 20, 64), mesh), 4).steps
    assert [(step.kind, step.axes) for step in steps] == [("all_gather", ("dp",)), ("all_gather", ("tp",))]
    even = Layout(Mesh("dp=2 tp=4"), source.dims)
    assert [step.axes for step in plan(even, replicated((1 << 20, 64), GRID), 4).steps] == [("dp", "tp")]


def test_a_gather_of_contiguous_rows_copies_nothing():
    mesh = Mesh("tp=4")
    for rows in (8, 7):
        source = Layout(mesh, (cut(rows, TP), Dim.of(6)))
        (step,) = plan(source, replicated((rows, 6), mesh), 4).steps
        shard, gathered = torch.zeros(source.local_shape(0)), torch.zeros(4, 2, 6)
        assert recipe(step, 0).pack_is_view and recipe(step, 0).unpack_is_view
        assert pack(step, 0, shard).data_ptr() == shard.data_ptr()
        assert unpack(step, 0, gathered).data_ptr() == gathered.data_ptr()
        assert unpack(step, 0, gathered).is_contiguous()


def test_a_reduce_scatter_of_contiguous_rows_copies_nothing():
    mesh = Mesh("tp=4")
    source = replicated((8, 6), mesh).with_partial({"tp": "sum"})
    (step,) = plan(source, Layout(mesh, (cut(8, TP), Dim.of(6))), 4).steps
    term = torch.zeros(8, 6)
    assert pack(step, 1, term).data_ptr() == term.data_ptr() and pack(step, 1, term).shape == (4, 2, 6)


def test_an_exchange_spreads_over_the_replicas():
    mesh = Mesh("a=2 b=4", {"a": PROMPT, "b": PROMPT})
    source, target = Layout(mesh, (cut(8, ("a", 2)),)), Layout(mesh, (cut(8, ("b", 4)),))
    transition, traffic = plan(source, target, 1), Traffic()
    assert [step.kind for step in transition.steps] == ["exchange"]
    out = apply(transition, scatter(torch.arange(8), source), traffic)
    assert torch.equal(gather(out, target, check=True), torch.arange(8))
    assert max(traffic.sent.values()) == max(traffic.received.values()) == 2 * 8  # not 4: two holders give two each


def test_replicas_that_differ_are_named():
    layout = replicated((2,), Mesh("dp=3"))
    shards = [torch.zeros(2), torch.zeros(2), torch.tensor([0.0, -0.0])]
    with pytest.raises(ReplicaError, match=r"rank 2 .*'dp': 2.* differs from rank 0"):
        gather(shards, layout, check=True)


def test_what_cannot_be_planned_says_why():
    whole = replicated((2,), GRID)
    with pytest.raises(TransitionError, match="keeps the shape"):
        plan(whole, replicated((3,), GRID), 4)
    with pytest.raises(TransitionError, match="dp=3"):
        plan(whole, replicated((2,), Mesh("dp=3")), 4)
    with pytest.raises(TransitionError, match="mixes max and sum"):
        plan(whole, whole.with_partial({"dp": "sum", "tp": "max"}), 4)


# Brute force: all layouts of a tiny tensor on a tiny mesh, all steps between any two of them, priced by counting.

SQUARE = Mesh("x=2 y=2", {"x": Link(1.0, 1e-9), "y": Link(1.0, 1e-9)})
SHAPE = (4, 4)


def all_layouts():
    ways = [[], [("x", 2)], [("y", 2)], [("x", 2), ("y", 2)], [("y", 2), ("x", 2)]]
    ways += [[(None, 2), ("x", 2)], [(None, 2), ("y", 2)]]
    for rows, columns in itertools.product(ways, ways):
        held = {a for a, _ in (*rows, *columns) if a}
        if len(held) < sum(a is not None for a, _ in (*rows, *columns)):
            continue
        layout = Layout(SQUARE, (cut(4, *rows), cut(4, *columns)))
        for n in range(3):
            for terms in itertools.combinations([a for a in "xy" if a not in held], n):
                yield layout.with_partial(dict.fromkeys(terms, "sum"))


def element_sets(layout):
    return [
        frozenset(itertools.product(*([i for r in ranges for i in range(*r)] for ranges in layout.ranges(rank))))
        for rank in range(4)
    ]


def step_bytes(a, b):
    """The bytes of the cheapest single step from a to b, by counting elements; None where none does it."""
    if a.partial == b.partial:  # each fetches what it lacks from ranks that hold the same terms
        if a.partial and any(a.mesh.sizes[x] > 1 for x in set(a.partial_axes) & {*b.axes}):
            return None
        have, need = element_sets(a), element_sets(b)
        return max(len(n - h) for h, n in zip(have, need, strict=True))
    gone = [x for x in a.partial_axes if x not in b.partial_axes]
    if set(b.partial_axes) - set(a.partial_axes):
        free = not gone and b.dims == a.dims
        return 0 if free and all(x in a.replicas for x in set(b.partial_axes) - set(a.partial_axes)) else None
    n, size = 2 ** len(gone), len(element_sets(a)[0])
    if a.dims == b.dims:
        return 2 * -(-size // n) * (n - 1)
    have, need = element_sets(a), element_sets(b)
    kept = b.without_axes(tuple(gone))
    if element_sets(kept) == have and set(gone) <= set(b.axes):
        return len(need[0]) * (n - 1)
    return None


def test_no_sequence_of_steps_through_any_layout_beats_the_plan():
    every = list(all_layouts())
    edges = {a: [(b, c) for b in every if a != b and (c := step_bytes(a, b)) is not None] for a in every}
    for start in every:
        best, heap, tick = {start: 0}, [(0, 0, start)], itertools.count(1)
        while heap:
            cost, _, here = heapq.heappop(heap)
            if cost > best[here]:
                continue
            for there, moved in edges[here]:
                if cost + moved < best.get(there, math.inf):
                    best[there] = cost + moved
                    heapq.heappush(heap, (cost + moved, next(tick), there))
        for goal in every:
            assert plan(start, goal, 1).bytes_received <= best[goal], (
                start.dims,
                start.partial,
                goal.dims,
                goal.partial,
            )


def test_a_segment_that_an_axis_does_not_name_is_counted_once():
    mesh = Mesh("tp=2")
    fused = Layout(mesh, (Dim((Segment(4, (Digit("tp", 2, 2),)), Segment(3))),))
    target = replicated((7,), mesh).with_partial({"tp": "sum"})
    out = apply(plan(fused, target, 8), scatter(torch.arange(7.0), fused))
    assert torch.equal(gather(out, target), torch.arange(7.0))

    mesh = Mesh("a=2 c=2")  # rank (1, 1) holds just the segment that c does not name, before and after
    dim = Dim((Segment(1, (Digit("c", 2, 1), Digit("a", 2, 1))), Segment(1)))
    source = Layout(mesh, (dim,))
    target = Layout(mesh, (Dim((Segment(1, (Digit("a", 2, 1),)), Segment(1))),)).with_partial({"c": "sum"})
    step = Step("zero", ("c",), (0,), source, target, "sum")
    assert torch.equal(gather(apply_step(step, scatter(torch.ones(2), source)), target), torch.ones(2))
