"""Patterns mean what einops would make of them, print back as patterns, and explain themselves when they do not fit."""

import itertools
import pickle

import numpy as np
import pytest
from einops import rearrange
from hypothesis import given
from hypothesis import strategies as st
from layouts import cases, indices

from megalith.sharding.grammar import LayoutError, parse_layout, parse_spec, parse_stored_used
from megalith.sharding.layout import Layout
from megalith.sharding.mesh import Mesh
from megalith.sharding.printing import format_layout


def shard(layout, tensor, rank):
    return tensor[np.ix_(*(indices(ranges) for ranges in layout.ranges(rank)))]


def assert_held_as_einops(pattern, shape, mesh, einops_pattern, sizes):
    """`einops_pattern` brings the mesh axes to the front, in the order of its right side."""
    tensor = np.arange(np.prod(shape)).reshape(shape)
    layout = Layout.parse(pattern, shape, mesh, sizes)
    front = einops_pattern.split("->")[1].split("|")[0].split()
    whole = einops_pattern.replace("|", "")
    lengths = {axis: mesh.sizes[axis] for axis in front}
    lengths |= {name: n for name, n in sizes.items() if name in whole.replace("(", " ").replace(")", " ").split()}
    blocks = rearrange(tensor, whole, **lengths)
    for rank in range(mesh.size):
        at = tuple(mesh.coordinates(rank)[axis] for axis in front)
        assert (shard(layout, tensor, rank) == blocks[at]).all()


GRID, CUBE, DEEP = Mesh("row=2 col=2"), Mesh("i=2 j=2 k=2"), Mesh("dep=2 row=2 col=2")
DP_TP = Mesh("dp=2 tp=2")
EXAMPLES = [
    ("column parallel", "(tp o) i", (8, 6), Mesh("tp=4"), "(tp o) i -> tp | o i", {}),
    ("row parallel", "o (tp i)", (6, 8), Mesh("tp=4"), "o (tp i) -> tp | o i", {}),
    ("batch and sequence", "(dp b) (sp s)", (4, 6), Mesh("dp=2 sp=3"), "(dp b) (sp s) -> dp sp | b s", {}),
    ("fused QKV", "(3 tp h d) e", (24, 2), DP_TP, "(c tp x) e -> tp | (c x) e", {"c": 3, "d": 2}),
    ("few KV heads", "(kv h d) e", (12, 2), Mesh("dp=2 tp=(kv=2 rep=2)"), "(kv x) e -> kv | x e", {"d": 3}),
    ("made of two axes", "(tp o) e", (8, 2), Mesh("tp=(kv=2 rep=2)"), "(kv rep o) e -> kv rep | o e", {}),
    ("ZeRO-3 stored", "(tp dp o) i", (8, 2), DP_TP, "(tp dp o) i -> tp dp | o i", {}),
    ("Ulysses before", "b (sp s) h d", (2, 4, 4, 3), Mesh("sp=2"), "b (sp s) h d -> sp | b s h d", {}),
    ("Ulysses after", "b s (sp h) d", (2, 4, 4, 3), Mesh("sp=2"), "b s (sp h) d -> sp | b s h d", {}),
    ("experts", "(ep e) (tp o) i", (4, 4, 3), Mesh("ep=2 tp=2"), "(ep e) (tp o) i -> ep tp | e o i", {}),
    ("2D x", "(row b) (col e)", (4, 6), GRID, "(row b) (col e) -> row col | b e", {}),
    ("2.5D x", "(dep row b) (col e)", (8, 4), DEEP, "(dep row b) (col e) -> dep row col | b e", {}),
    ("2.5D w", "(row e) (col f)", (4, 6), DEEP, "(row e) (col f) -> row col | e f", {}),
    ("3D x", "(i j b) (k e)", (8, 4), CUBE, "(i j b) (k e) -> i j k | b e", {}),
    ("3D w", "(k i e) (j f)", (8, 4), CUBE, "(k i e) (j f) -> k i j | e f", {}),
    ("3D y", "(i k b) (j f)", (8, 4), CUBE, "(i k b) (j f) -> i k j | b f", {}),
    ("pipeline", "(pp l)", (8,), Mesh("pp=2"), "(pp l) -> pp | l", {}),
    ("interleaved", "(v pp l)", (12,), Mesh("pp=2"), "(v pp l) -> pp | (v l)", {"v": 3}),
    ("a number minor to an axis", "(tp 2 dp o)", (16,), DP_TP, "(tp c dp o) -> tp dp | (c o)", {"c": 2}),
]


@pytest.mark.parametrize("pattern, shape, mesh, same, sizes", [e[1:] for e in EXAMPLES], ids=[e[0] for e in EXAMPLES])
def test_the_examples_hold_what_einops_says(pattern, shape, mesh, same, sizes):
    assert_held_as_einops(pattern, shape, mesh, same, sizes)


def test_grouped_query_weights_are_three_segments():
    """Two ranks; 2 query heads and 1 key and 1 value head a rank, of size 2."""
    mesh, sizes = Mesh("tp=2"), {"q": 2, "k": 1}
    layout = Layout.parse("(tp q d + tp k d + tp k d) e", (16, 1), mesh, sizes)
    assert indices(layout.ranges(0)[0]) == [0, 1, 2, 3, 8, 9, 12, 13]
    assert indices(layout.ranges(1)[0]) == [4, 5, 6, 7, 10, 11, 14, 15]
    assert layout == Layout.parse("(tp q d + tp k d + tp k d) e", (16, 1), mesh, {**sizes, "d": 2})
    assert layout == Layout.parse("(tp q d + 2 tp k d) e", (16, 1), mesh, sizes)


def test_segments_all_alike_are_one_with_a_number():
    mesh = Mesh("tp=2")
    assert Layout.parse("(tp h + tp h + tp h) e", (12, 1), mesh) == Layout.parse("(3 tp h) e", (12, 1), mesh)
    assert Layout.parse("(a + 3) e", (12, 1), mesh) == Layout.parse("a e", (12, 1), mesh)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_zigzag_gives_each_rank_a_chunk_from_each_end(n):
    layout = Layout.parse("b (2 ~sp s) h d", (1, 6 * n, 1, 1), Mesh(f"sp={n}"))
    chunks = np.arange(6 * n).reshape(2 * n, 3)
    for rank in range(n):
        assert indices(layout.ranges(rank)[1]) == [*chunks[rank], *chunks[2 * n - 1 - rank]]


def test_whole_heads_stay_on_a_rank():
    heads = [Layout.parse("(tp h d)", (6 * 5,), Mesh("tp=4"), {"d": 5}).local_shape(r)[0] / 5 for r in range(4)]
    assert heads == [2, 2, 2, 0]
    assert [Layout.parse("(tp o)", (6,), Mesh("tp=4")).local_shape(r) for r in range(4)] == [(2,), (2,), (2,), (0,)]


def test_a_dim_of_axes_only_leaves_the_rest_local():
    mesh = Mesh("dp=2 tp=2")
    for pattern in ("tp i", "(tp) i", "(tp o) i"):
        assert Layout.parse(pattern, (7, 2), mesh) == Layout.parse("(tp o) i", (7, 2), mesh)
    assert Layout.parse("(tp dp) i", (7, 2), mesh) == Layout.parse("(tp dp o) i", (7, 2), mesh)


def test_stored_and_used_are_two_layouts_whose_names_are_their_own():
    stored, used = parse_stored_used("(tp dp o) i @host -> (tp o) i", (8, 4), DP_TP, {})
    assert stored == Layout.parse("(tp dp o) i @host", (8, 4), DP_TP) and stored.tier == "host"
    assert used == Layout.parse("(tp o) i", (8, 4), DP_TP) and used.tier == "device"
    assert parse_stored_used("(tp o) i", (8, 4), DP_TP, {})[1] is None


@pytest.mark.parametrize("tier", ["device", "host", "disk", "paged"])
def test_a_tier_says_where_the_bytes_rest(tier):
    assert Layout.parse(f"(dp o) i @{tier}", (4, 2), DP_TP).tier == tier
    assert Layout.parse("(dp o) i", (4, 2), DP_TP).tier == "device"


def test_marks_name_the_axes_over_which_a_value_is_partial():
    mesh = Mesh("dp=2 tp=(kv=2 rep=2) sp=1")
    assert Layout.parse("a // max:tp dp", (4,), mesh).partial == (("dp", "sum"), ("kv", "max"), ("rep", "max"))
    assert Layout.parse("a // sum:sp", (4,), mesh).partial == ()  # a sum over one rank is the value
    assert Layout.parse("// tp", (), mesh).partial_axes == ("kv", "rep")


def test_the_ellipsis_stands_for_any_number_of_whole_dims():
    for shape in [(4,), (4, 3), (4, 3, 2)]:
        layout = Layout.parse("(tp b) ...", shape, DP_TP)
        assert layout.local_shape(0) == (2, *shape[1:])
    assert Layout.parse("... (tp e)", (3, 4), DP_TP).local_shape(0) == (3, 2)
    assert Layout.parse("...", (), DP_TP).is_replicated


def test_back_and_forth_over_a_composite_axis_needs_but_one_real_part():
    one = Mesh("tp=(kv=1 rep=2)")
    assert Layout.parse("(2 ~tp s)", (8,), one) == Layout.parse("(2 ~rep s)", (8,), one)


def test_a_pattern_is_parsed_once():
    assert parse_spec("(tp o) i -> o i") is parse_spec("(tp o) i -> o i")


# Printing


def begins_with_an_uneven_number(layout):
    """Only behind an axis of one rank, `(tp 2 sp o)`: the axis leaves no digit, but allows what a number may not do."""
    first = [(s.size, s.digits[0]) for dim in layout.dims for s in dim.segments if s.digits]
    return any(digit.axis is None and digit.size * digit.stride != size for size, digit in first)


@given(cases())
def test_a_layout_prints_as_a_pattern_that_parses_to_it(case):
    layout = case.layout()
    if begins_with_an_uneven_number(layout):
        assert ":" in str(layout.without_partial())
        return
    assert Layout.parse(str(layout), case.shape, case.mesh) == layout
    assert str(Layout.parse(str(layout), case.shape, case.mesh)) == str(layout)


@given(cases(even=True), st.data())
def test_so_does_one_with_axes_gathered_or_dims_permuted(case, data):
    layout = case.layout()
    order = data.draw(st.permutations(range(len(layout.dims))))
    layout = layout.with_dims(tuple(layout.dims[i] for i in order))
    layout = layout.without_axes(tuple(axis for axis in layout.axes if data.draw(st.booleans())))
    assert Layout.parse(str(layout), layout.shape, case.mesh) == layout


@pytest.mark.parametrize(
    "pattern, shape, sizes, printed",
    [
        ("(3 tp h d) e", (48, 8), {"d": 4}, "(3 tp h d) e"),
        ("(c tp o) i // sum:dp @host", (12, 2), {"c": 3}, "(3 tp o) i // dp @host"),
        ("(tp h d) e", (20, 1), {"d": 4}, "(tp 4 h d) e"),
        ("(tp o) ...", (4, 3, 2), {}, "(tp o) d1 d2"),
        ("tp 3", (4, 3), {}, "(tp d0) d1"),
        ("(tp a + tp b + b)", (13,), {"a": 2}, "(tp 2 + tp 3 + 3)"),
        ("d d", (3, 3), {}, "d d1"),
        ("(b s) e // max:tp", (6, 2), {}, "(b s) e // max:tp"),
        ("", (), {}, ""),
    ],
)
def test_a_printed_layout_reads_well(pattern, shape, sizes, printed):
    assert str(Layout.parse(pattern, shape, DP_TP, sizes)) == printed


def test_a_composite_axis_prints_as_itself():
    mesh = Mesh("dp=2 tp=(kv=2 rep=2)")
    assert str(Layout.parse("(dp kv rep o) i", (16, 2), mesh)) == "(dp tp o) i"
    assert str(Layout.parse("(rep kv o) i", (16, 2), mesh)) == "(rep kv o) i"
    assert str(Layout.parse("i // kv rep", (2,), mesh)) == "i // tp"


def test_a_printed_name_is_never_taken_for_an_axis():
    mesh = Mesh("head=2 d0=2")
    gathered = Layout.parse("(head 2 heads) (d0 e)", (8, 4), mesh).without_axes(("head", "d0"))
    assert Layout.parse(str(gathered), (8, 4), mesh) == gathered


def test_what_no_pattern_expresses_shows_its_strides():
    mesh = Mesh("tp=3 dp=2 sp=2")
    gathered = Layout.parse("(tp dp sp o)", (9,), mesh).without_axes(("tp", "dp"))
    assert format_layout(gathered) == "(3:3 2:2 sp:1 o)"


# Errors


def error_of(pattern, shape=(8, 6), mesh="dp=2 tp=(kv=2 rep=2)", **sizes):
    with pytest.raises(LayoutError) as caught:
        parse_layout(pattern, shape, Mesh(mesh), sizes, "layers.0.w")
    return caught.value


ERRORS = [
    # pattern, sizes, the part at fault, the problem, what to write
    ("(tq o) i", {}, "tq", "'tq' is not a mesh axis but nearly 'tp'", "write '(tp o) i', or give sizes={'tq': ...}"),
    ("(tpp o) i", {}, "tpp", "nearly 'tp'", "write '(tp o) i'"),
    ("(pt o) i", {}, "pt", "nearly 'tp'", "write '(tp o) i'"),
    ("(dp tpo) i", {}, "tpo", "nearly 'tp'", "write '(dp tp) i'"),
    ("TP i", {}, "TP", "nearly 'tp'", "write 'tp i'"),
    ("(Dp o) i", {}, "Dp", "nearly 'dp'", "write '(dp o) i'"),
    ("(tp o) (tp i)", {}, "tp", "mesh axis 'kv' (a part of 'tp') is used twice", "name an axis in one place"),
    ("(tp o) (kv i)", {}, "kv", "mesh axis 'kv' is used twice", "name an axis in one place"),
    ("(dp o dp) i", {}, "dp", "mesh axis 'dp' is used twice", "name an axis in one place"),
    ("(dp o) i // dp", {}, "dp", "mesh axis 'dp' is used twice", "lie replicas"),
    (
        "(dp o) i // sum:pp",
        {},
        "sum:pp",
        "'pp' is not a mesh axis",
        "write one of the axes: dp, kv, rep, tp; did you mean",
    ),
    ("(dp o) i // avg:dp", {}, "avg:dp", "'avg' is not a reduction", "write one of sum:dp, max:dp, min:dp"),
    ("(dp o) i // ", {}, "", "a mark is to name a mesh axis", "'// sum:tp dp'"),
    (
        "(dp o) i @hots",
        {},
        "hots",
        "'hots' is not a tier",
        "write one of @device, @host, @disk, @paged; did you mean 'host'?",
    ),
    ("(3 dp o) i", {}, "3", "3 does not divide 8", "sizes that divide 8: 1, 2, 4, 8"),
    ("(dp h d) i", {"d": 3}, "d", "d=3 does not divide 8", "sizes that divide 8: 1, 2, 4, 8"),
    ("(dp 2) i", {}, "(dp 2)", "dp=2 * 2 is 4, the dim is 8", "leave one local factor without a size"),
    ("(dp d) d", {}, "d", "d=6 does not divide 8", "sizes that divide 8"),
    ("(h dp 3 d) i", {}, "d", "the sizes of 'h' and 'd' cannot both be inferred", "give sizes={'h': ...}"),
    ("(h dp 3 o) i", {"o": 1}, "3 o", "3 * o=1 does not divide 8", "only a mesh axis cuts unevenly"),
    ("o (h kv rep)", {}, "h", "'h' cannot be inferred: kv=2 * rep=2 does not divide 6", "give sizes={'h': ...}"),
    ("(o dp i) e", {}, "i", "the sizes of 'o' and 'i' cannot both be inferred", "give sizes={'o': ...}"),
    ("(o o) e", {}, "o", "'o' of unknown size stands twice", "give sizes={'o': ...}"),
    ("(a + b) i", {}, "(a + b)", "the sizes of a, b cannot be inferred from one sum", "give sizes={'a': ...}"),
    ("(dp a + 3) i", {}, "(dp a + 3)", "no size of 'a' makes dp=2 * a + 3 equal 8", "correct the sizes"),
    ("(dp 2 + 3) i", {}, "(dp 2 + 3)", "dp=2 * 2 + 3 are 7, the dim is 8", "correct the sizes"),
    ("(~o i) e", {}, "~o", "'o' is not a mesh axis", "write '~' before one of the axes: dp, kv, rep, tp"),
    ("(2 ~tp o) i", {}, "~tp", "made of several axes", "write '(2 ~kv ~rep o) i'"),
    ("~dp i", {}, "~", "'~' stands outside parentheses", "(2 ~sp s)"),
    ("(2 ~ 3) i", {}, "~ 3", "'~' is to stand before a mesh axis", "write ~axis"),
    ("d d", {}, "d", "'d' is of size 8 elsewhere, here of size 6", "the pattern gives the name one size"),
    ("o i", {"o": 4}, "o", "'o' is of size 4 elsewhere, here of size 8", "sizes gives the name one size"),
    ("(dp x) (kv x)", {}, "x", "'x' is of size 4 elsewhere, here of size 3", "write another name here"),
    ("8 7", {}, "7", "the dim is of size 6, not 7", "write 6, or a name"),
    ("(dp o) i", {"dp": 4}, "dp", "'dp' is a mesh axis of size 2, but sizes has dp=4", "another name than the axis"),
    ("(dp o) i j", {}, "(dp o) i j", "the pattern has 3 dims, the tensor 2", "for example '(dp o) i'"),
    ("(dp o)", {}, "(dp o)", "the pattern has 1 dim, the tensor 2", "for example '(dp o) ...'"),
    ("... i ...", {}, "...", "'...' stands twice", "write '...' once"),
    ("(dp ...) i", {}, "...", "'...' does not belong here", "outside the parentheses"),
    ("(dp o i", {}, "(", "this parenthesis is not closed", "write ')'"),
    ("dp o) i", {}, ")", "')' does not belong here", "write '('"),
    ("(dp (o)) i", {}, "(", "'(' does not belong here", "do not nest"),
    ("() i", {}, ")", "a segment without factors", "1 for a dim of size one"),
    ("(dp 0) i", {}, "0", "a factor of size zero", "at least one"),
    ("a + b", {}, "+", "'+' does not belong here", "in parentheses"),
    ("o i sum:dp", {}, ":", "':' does not belong here", "behind '//'"),
    ("o i $", {}, "$", "'$' does not belong here", "(tp o) i // dp @host"),
    ("o i @host // dp", {}, "//", "'//' does not belong here", "(tp o) i // dp @host"),
    ("(dp o) i -> o i", {}, " -> ", "'->' in a layout that is not a spec", "write one side: '(dp o) i'"),
    ("o i -> o i -> o i", {}, "->", "'->' does not belong here", "write '->' once"),
]


@pytest.mark.parametrize("pattern, sizes, fault, problem, fix", ERRORS, ids=[e[0] for e in ERRORS])
def test_an_error_shows_the_part_at_fault_the_tensor_the_mesh_and_the_fix(pattern, sizes, fault, problem, fix):
    error = error_of(pattern, **sizes)
    start, stop = error.span
    assert error.pattern[start:stop] == fault
    assert problem in error.problem and fix in error.fix
    text = str(error).splitlines()
    assert text[1] == "    " + error.pattern
    assert text[2].index("^") == 4 + start and text[2].count("^") == max(1, len(fault))
    assert text[3] == "  for 'layers.0.w' of shape (8, 6) on Mesh('dp=2 tp=(kv=2 rep=2)')"
    assert text[4] == "  " + error.fix


def test_an_error_in_full():
    assert str(error_of("(dp o) (tpp i)")) == (
        "'tpp' is not a mesh axis but nearly 'tp'\n"
        "    (dp o) (tpp i)\n"
        "            ^^^\n"
        "  for 'layers.0.w' of shape (8, 6) on Mesh('dp=2 tp=(kv=2 rep=2)')\n"
        "  write '(dp o) (tp i)', or give sizes={'tpp': ...} if it is meant"
    )


def test_an_error_survives_a_process_boundary():
    error = error_of("(tq o) i")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.parametrize(
    "pattern, mesh, sizes",
    [
        ("(o i) j", "tp=2 p=2", {}),  # a single letter is no slip
        ("(tp t) j", "tp=2", {}),
        ("(head heads dim) j", "head=2", {}),  # the axis is there: nothing else was meant by it
        ("(tp x1) j", "tp=2 xp=2", {}),  # nor is a name with a digit
        ("(tq o) j", "tp=2", {"tq": 2}),  # nor one whose size is given
        ("tq j", "tp=2", {}),  # nor, but for case, a name that is the whole dim
        ("(i I) j", "i=2", {}),
    ],
)
def test_names_that_are_not_slips_are_names(pattern, mesh, sizes):
    assert Layout.parse(pattern, (8, 6), Mesh(mesh), sizes).shape == (8, 6)


def test_an_uneven_pattern_needs_no_size_to_agree_with_itself():
    layout = Layout.parse("(dp b) (tp b)", (7, 7), Mesh("dp=2 tp=2"))
    assert [layout.local_shape(r) for r in range(4)] == list(itertools.product((4, 3), (4, 3)))
