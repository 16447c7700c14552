"""A sharded sequence changes nothing: attention in a ring, and by all-to-alls, is that of one device, in few bytes."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from cases import CASES, Bound, error
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import close, counts, randn, same_on_mesh
from zoo import reference

from megalith.core import grad_and_value, shard
from megalith.core.memory import memory
from megalith.core.program import Compute, Launch, Wait
from megalith.core.ring import parts
from megalith.models.huggingface import functional
from megalith.sharding import Mesh
from megalith.sharding.graph import op_name
from megalith.sharding.layout import Layout
from megalith.sharding.recipes import data_parallel, sequence_parallel, specs_for, tensor_parallel
from megalith.sharding.specs import SpecError

PLAIN, ZIGZAG = "b h (sp s) d", "b h (2 ~sp s) d"
BOTH = pytest.mark.parametrize("layout", [PLAIN, ZIGZAG])
ULYSSES = f"{PLAIN} -> b (sp h) s d"


def attend(q, k, v, mask=None, causal=False):
    """Gradients of q, k and v, and a loss in which every number of the result has a weight of its own."""

    def loss(tensors, mask):
        q, k, v = tensors
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=True)
        return (out * torch.arange(out.numel(), dtype=out.dtype).reshape(out.shape).sin()).sum()

    return grad_and_value(loss)((q, k, v), mask)


def causally(q, k, v):
    return attend(q, k, v, causal=True)


def heads(b=2, h=4, s=16, d=8, kv=None):
    return randn(b, h, s, d), randn(b, kv or h, s, d), randn(b, kv or h, s, d)


def specs_of(layout, attention=None):
    return {name: layout for name in "qkv"} | ({"*:attention": attention} if attention else {})


# --- the same numbers -------------------------------------------------------------------------------------------------


def padding(b, s):
    """Keys that are not there, in one row from the left, so that queries meet blocks in which they see nothing."""
    hidden = torch.zeros(b, 1, 1, s, dtype=torch.bool)
    hidden[0, ..., : s // 2 + 1] = True
    hidden[-1, ..., s - 3 :] = True
    return ~hidden


def documents(b, s):
    """Two documents in each row, each causal."""
    number = torch.stack([torch.arange(s) >= 5 + row for row in range(b)]).long()
    return ((number[:, :, None] == number[:, None]) & torch.ones(s, s, dtype=torch.bool).tril())[:, None]


def additive(b, s):
    return torch.where(documents(b, s), randn(b, 1, s, s), -torch.inf)


MASKS = {"padding": padding, "documents": documents, "additive": additive}
MESHES = {
    "sp=2": PLAIN,
    "sp=4": PLAIN,
    "dp=2 sp=2": "(dp b) h (sp s) d",
    "tp=2 sp=2": "b (tp h) (sp s) d",
}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("cut", ["sp s", "2 ~sp s"])
@pytest.mark.parametrize("what", ["causal", "full", *MASKS])
def test_a_ring_gives_the_attention_and_the_gradients_of_one_device(what, cut, mesh):
    layout = MESHES[mesh].replace("sp s", cut)
    q, k, v = heads()
    if what in MASKS:
        sharded = same_on_mesh(attend, q, k, v, MASKS[what](2, 16), mesh=mesh, specs=specs_of(layout))
        program = sharded.program(q, k, v, MASKS[what](2, 16))
    else:
        fn = causally if what == "causal" else attend
        sharded = same_on_mesh(fn, q, k, v, mesh=mesh, specs=specs_of(layout))
        program = sharded.program(q, k, v)
    n = Mesh(mesh).sizes["sp"]
    assert counts(program)["exchange sp"] == 3 * (n - 1)
    assert {c.kind for c in program.collectives} == {"exchange", "all_reduce"}  # that of the loss


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_any_shape_is_exact(data):
    n = data.draw(st.integers(2, 4))
    layout = data.draw(st.sampled_from([PLAIN, ZIGZAG]))
    b, h, d, s = (data.draw(st.integers(1, high)) for high in (3, 3, 5, 13))
    s = 2 * s if layout == ZIGZAG else s
    causal = data.draw(st.booleans())
    q, k, v = heads(b, h, s, d)
    same_on_mesh(causally if causal else attend, q, k, v, mesh=f"sp={n}", specs=specs_of(layout))


def test_a_query_that_sees_nothing_gets_nothing():
    mask = torch.ones(2, 1, 16, 16, dtype=torch.bool)
    mask[0, :, 3] = mask[1, :, 12] = False
    q, k, v = heads()
    sharded = same_on_mesh(attend, q, k, v, mask, mesh="sp=4", specs=specs_of(PLAIN))
    assert counts(sharded.program(q, k, v, mask))["exchange sp"] == 9


def test_sums_over_blocks_keep_the_digits_of_half_precision():
    q, k, v = (x.bfloat16() for x in heads(s=64))
    fn = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
    exact = fn(*(x.double() for x in (q, k, v)))
    ring = shard(fn, Mesh("sp=8"), specs_of(ZIGZAG), backend="virtual").whole(q, k, v)
    assert ring.dtype == torch.bfloat16
    assert error(ring.double(), exact) <= 2**-8  # of each block's result half a unit in the last place, and of the sum


# --- who sees whom ----------------------------------------------------------------------------------------------------


def cut(n, s, layout):
    laid_out = Layout.parse(layout, (1, 1, s, 1), Mesh(f"sp={n}"))
    return [laid_out.ranges(rank)[2] for rank in range(n)]


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 5), s=st.integers(1, 40), layout=st.sampled_from([PLAIN, ZIGZAG]), whole=st.booleans())
def test_each_query_sees_each_key_up_to_it_once(n, s, layout, whole):
    s = 2 * s if layout == ZIGZAG else s
    for queries in cut(n, s, layout):
        for keys in [[(0, s)]] if whole else cut(n, s, layout):
            rows, columns = (torch.cat([torch.arange(*r) for r in [*ranges, (0, 0)]]) for ranges in (queries, keys))
            seen = torch.zeros(len(rows), len(columns), dtype=torch.int64)
            for part in parts(queries, keys, causal=True):
                block = seen[slice(*part.rows), slice(*part.columns)]
                block += torch.ones_like(block).tril() if part.causal else 1
            assert torch.equal(seen, (rows[:, None] >= columns[None]).long())


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_causal_work_in_a_zigzag_is_even_and_needs_no_mask(n):
    chunk = 8
    ranks = cut(n, 2 * n * chunk, ZIGZAG)
    for mine, queries in enumerate(ranks):
        for step in range(n):
            found = parts(queries, ranks[(mine - step) % n], causal=True)
            assert len(found) == 1
            (part,) = found
            size = (part.rows[1] - part.rows[0]) * (part.columns[1] - part.columns[0])
            assert (part.causal, size) == ((True, 4 * chunk**2) if step == 0 else (False, 2 * chunk**2))


def test_what_no_query_of_a_rank_sees_is_not_computed():
    q, k, v = heads()
    compiled = shard(causally, Mesh("sp=4"), specs_of(PLAIN), backend="virtual").compiled
    placed = shard(causally, Mesh("sp=4"), specs_of(PLAIN), backend="virtual").place(q, k, v)
    programs = compiled(*placed).programs
    ops = [Counter(op_name(i.fn) for i in programs[r].instructions if isinstance(i, Compute)) for r in range(4)]
    assert [o["megalith.sdpa.default"] for o in ops] == [1, 2, 3, 4]
    assert [o["megalith.sdpa_backward.default"] for o in ops] == [1, 2, 3, 4]


# --- bytes, memory and overlap ----------------------------------------------------------------------------------------


def received(program, phase, kinds):
    return sum(c.bytes_received for c in program.collectives if c.origin.phase == phase and c.kind in kinds)


@BOTH
@pytest.mark.parametrize("n", [2, 4])
def test_a_ring_receives_keys_and_values_twice_and_their_gradients_once(n, layout):
    q, k, v = heads()
    program = shard(causally, Mesh(f"sp={n}"), specs_of(layout), backend="virtual").program(q, k, v)
    local = k.numel() // n * k.itemsize
    assert received(program, "forward", {"exchange"}) == (n - 1) * 2 * local
    assert received(program, "backward", {"exchange"}) == (n - 1) * 4 * local
    said = {c.cause for c in program.collectives if c.kind == "exchange"}
    assert said == {
        "ring attention over sp: the next keys and values",
        "ring attention over sp: gradients of keys and values, on their way home",
    }


@pytest.mark.parametrize(("mesh", "kv", "travel"), [("sp=4", 2, 2), ("tp=2 sp=2", 2, 1), ("tp=4 sp=2", 2, 1)])
def test_of_repeated_heads_one_of_each_group_goes_round(mesh, kv, travel):
    """`travel` heads of keys on each rank; a rank with a part of a group sends what it has."""
    q, k, v = heads(kv=kv)
    layout = "b (tp h) (sp s) d" if "tp" in mesh else PLAIN
    specs = {"q": layout, "[kv]": PLAIN}
    sharded = same_on_mesh(causally, q, k, v, mesh=mesh, specs=specs)
    program, n = sharded.program(q, k, v), Mesh(mesh).sizes["sp"]
    one_head = k.numel() // kv // n * k.itemsize
    assert received(program, "forward", {"exchange"}) == (n - 1) * 2 * travel * one_head
    assert received(program, "backward", {"exchange"}) == (n - 1) * 4 * travel * one_head


def test_gradients_of_repeated_heads_that_are_read_one_by_one_travel_one_by_one():
    def fn(q, k, v):
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        return attend(q, k, v)  # gives the gradients of the repeated heads

    q, k, v = heads(kv=2)
    sharded = same_on_mesh(fn, q, k, v, mesh="sp=2", specs=specs_of(PLAIN))
    local = q.numel() // 2 * q.itemsize
    assert received(sharded.program(q, k, v), "backward", {"exchange"}) == 4 * local


@BOTH
def test_no_rank_holds_all_keys_or_a_mask(layout):
    def fn(q, k, v):
        squares = lambda t: F.scaled_dot_product_attention(*t, is_causal=True).square().sum()  # noqa: E731
        return grad_and_value(squares)((q, k, v))

    q, k, v = heads(s=64)
    n = 4
    program = shard(fn, Mesh(f"sp={n}"), specs_of(layout), backend="virtual").program(q, k, v)
    buffers = memory(program).buffers
    assert max(buffer.bytes for buffer in buffers) == 2 * k.nbytes // n  # keys and values of one rank, packed
    assert not any(buffer.dtype == torch.bool for buffer in buffers)


def test_the_next_block_is_under_way_while_one_is_attended_to():
    q, k, v = heads()
    program = shard(causally, Mesh("sp=4"), specs_of(ZIGZAG), backend="virtual").program(q, k, v)
    order = program.instructions
    moved = [i for i, x in enumerate(order) if isinstance(x, Launch) and x.cause.endswith("next keys and values")]
    assert len(moved) == 6
    for at in moved:
        wait = next(i for i, x in enumerate(order) if isinstance(x, Wait) and x.pending == order[at].pending)
        inside = [op_name(x.fn) for x in order[at:wait] if isinstance(x, Compute)]
        assert any(name.startswith("megalith.sdpa") for name in inside)


# --- all-to-alls ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("causal", [True, False])
def test_ulysses_is_exact_with_four_all_to_alls_each_way(causal, n):
    q, k, v = heads()
    fn = causally if causal else attend
    sharded = same_on_mesh(fn, q, k, v, mesh=f"sp={n}", specs=specs_of(PLAIN, ULYSSES))
    program = sharded.program(q, k, v)
    local = q.numel() // n
    for phase in ("forward", "backward"):
        assert counts(program, phase) == {"all_to_all sp": 4}
        assert received(program, phase, {"all_to_all"}) == 4 * local * (n - 1) // n * q.itemsize


@pytest.mark.parametrize(
    ("mesh", "h", "kv", "moved"),
    [("sp=4", 8, 8, 8), ("sp=4", 8, 4, 4), ("sp=4", 8, 2, 4), ("sp=4", 8, 1, 4), ("sp=2", 6, 3, 6), ("sp=2", 8, 2, 2)],
)
def test_ulysses_moves_no_head_of_keys_to_a_rank_twice(mesh, h, kv, moved):
    """Of fewer key-value heads than ranks each rank gets one: they are repeated as often as ranks share one."""
    q, k, v = heads(h=h, kv=kv)
    sharded = same_on_mesh(causally, q, k, v, mesh=mesh, specs=specs_of(PLAIN, ULYSSES))
    program, n = sharded.program(q, k, v), Mesh(mesh).size
    each = [c.bytes_received for c in program.collectives if c.origin.phase == "forward"]
    of_q, of_kv = ((n - 1) * heads * 2 * 16 * 8 * 8 // n**2 for heads in (h, moved))
    assert sorted(each) == sorted([of_q, of_kv, of_kv, of_q])


@pytest.mark.parametrize(
    ("mesh", "layout", "attention"),
    [
        ("dp=2 sp=2", "(dp b) h (sp s) d", "(dp b) h (sp s) d -> (dp b) (sp h) s d"),
        ("tp=2 sp=2", "b (tp h) (sp s) d", "b (tp h) (sp s) d -> b (tp sp h) s d"),
        ("sp=4", ZIGZAG, f"{ZIGZAG} -> b (sp h) s d"),
    ],
)
def test_ulysses_composes_with_data_and_tensor_parallelism(mesh, layout, attention):
    q, k, v = heads(kv=2)
    sharded = same_on_mesh(causally, q, k, v, mesh=mesh, specs=specs_of(layout, attention))
    assert counts(sharded.program(q, k, v), "forward") == {"all_to_all sp": 4}


def test_one_layout_puts_attention_into_a_ring_in_a_zigzag():
    q, k, v = heads()
    sharded = same_on_mesh(causally, q, k, v, mesh="sp=4", specs=specs_of(PLAIN, ZIGZAG))
    assert counts(sharded.program(q, k, v), "backward")["exchange sp"] >= 6


def test_a_spec_for_an_attention_that_is_not_there_is_an_error():
    q, k, v = heads()
    with pytest.raises(SpecError, match="matches no module that calls attention"):
        shard(causally, Mesh("sp=2"), specs_of(PLAIN) | {"encoder.*:attention": ULYSSES}, backend="virtual").program(
            q, k, v
        )
    with pytest.raises(SpecError, match="matches no module that calls attention\n  there are no names"):
        shard(lambda x: x * 2, Mesh("sp=2"), {"*:attention": ULYSSES}, backend="virtual").program(q)


# --- where there is no ring -------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("keys", [16, 12, 20])
def test_sharded_queries_of_whole_keys_need_no_communication(keys, layout):
    """Each rank masks by the places of its own queries."""

    def fn(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    q, (_, k, v) = heads()[0], heads(s=keys)
    sharded = same_on_mesh(fn, q, k, v, mesh="sp=4", specs={"q": layout})
    assert counts(sharded.program(q, k, v)) == {}
    sharded = same_on_mesh(causally, q, k, v, mesh="sp=4", specs={"q": layout})
    assert set(counts(sharded.program(q, k, v))) == {"all_reduce sp"}  # the gradients of k and v, and the loss


def test_a_cross_attention_gathers_its_keys_and_values():
    q, (_, k, v) = heads()[0], heads(s=12)
    sharded = same_on_mesh(attend, q, k, v, mesh="sp=2", specs=specs_of(PLAIN))
    program = sharded.program(q, k, v)
    assert set(counts(program, "forward")) == {"all_gather sp"}
    assert received(program, "forward", {"all_gather"}) == 2 * k.nbytes // 2


# --- models -----------------------------------------------------------------------------------------------------------


QUICK = {("our_llama_gqa", "sp=4"), ("llama", "dp=2 sp=2"), ("our_llama_gqa", "tp=2 sp=2")}
MODELS = [
    pytest.param(model, mesh, marks=() if (model, mesh) in QUICK else pytest.mark.slow, id=f"{model}-{mesh}")
    for model in ("our_llama_gqa", "llama")
    for mesh in ("sp=4", "dp=2 sp=2", "tp=2 sp=2")
]


@pytest.mark.parametrize(("model", "mesh"), MODELS)
@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_loss_and_gradients_of_a_llama_are_those_of_one_device(model, kind, mesh):
    case = CASES[model]
    fn, params = functional(case.build())
    batch = case.batch()
    recipes = [data_parallel()] * ("dp" in mesh) + [tensor_parallel()] * ("tp" in mesh)

    def step(params, batch):
        return grad_and_value(lambda p, b: case.loss(Bound(fn, p), b))(params, batch)

    run = shard(step, Mesh(mesh), specs_for(params, batch, *recipes, sequence_parallel("sp", kind)), backend="virtual")
    grads, value = run.whole(params, batch)
    loss, expected = reference(case)
    assert error(value, loss) <= 1e-10
    for name, grad in expected.items():
        assert error(grads[name], grad) <= 1e-10, name
    program = run.program(params, batch)
    n, layers = Mesh(mesh).sizes["sp"], 2
    found = counts(program)
    assert found.get("exchange sp", 0) == (layers * 3 * (n - 1) if kind == "ring" else 0)
    assert found.get("all_to_all sp", 0) == (layers * 8 if kind == "ulysses" else 0)
    assert "all_gather sp" not in found


# --- real processes ---------------------------------------------------------------------------------------------------


def on_a_rank(rank, layout, attention, n):
    torch.manual_seed(0)
    q, k, v = heads(kv=2)
    run = shard(causally, Mesh(f"sp={n}"), specs_of(layout, attention), backend="distributed")
    close(run.whole(q, k, v), causally(q, k, v))
    return True


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize(("layout", "attention"), [(ZIGZAG, None), (PLAIN, ULYSSES)])
def test_processes_over_gloo_give_the_attention_of_one_device(ranks, layout, attention, n):
    assert ranks.run(on_a_rank, layout, attention, n, world_size=n, timeout=120) == [True] * n
