"""A recipe writes the table that a person would write; recipes compose; each tensor gets exactly its own layout."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from unseen import Unseen

from megalith.sharding import Mesh
from megalith.sharding.grammar import parse_layout, parse_stored_used
from megalith.sharding.recipes import (
    Leaf,
    Specs,
    data_parallel,
    expert_parallel,
    sequence_parallel,
    specs_for,
    tensor_parallel,
    zero,
)
from megalith.sharding.recipes.names import unknown
from megalith.sharding.specs import resolve

LLAMA = {
    "model.embed_tokens.weight": (96, 8),
    **{
        f"model.layers.{n}.{path}.weight": shape
        for n in range(2)
        for path, shape in {
            "input_layernorm": (8,),
            "self_attn.q_proj": (16, 8),
            "self_attn.k_proj": (8, 8),
            "self_attn.v_proj": (8, 8),
            "self_attn.o_proj": (8, 16),
            "mlp.gate_proj": (24, 8),
            "mlp.up_proj": (24, 8),
            "mlp.down_proj": (8, 24),
        }.items()
    },
    "model.norm.weight": (8,),
    "lm_head.weight": (96, 8),
}
BATCH = {"input_ids": (4, 16), "labels": (4, 16)}


def lines(text):
    return [line.split(maxsplit=1) for line in text.strip().splitlines()]


# --- tables -----------------------------------------------------------------------------------------------------------


def test_three_parallelisms_print_as_one_table():
    table = specs_for(LLAMA, BATCH, data_parallel(), tensor_parallel(heads=4, kv_heads=2), zero(3))
    assert lines(str(table)) == lines("""
        model.embed_tokens.weight                (tp dp vocab) embed -> (tp vocab) embed
        model.layers.*.input_layernorm.weight    (dp d0) -> d0
        model.layers.*.self_attn.q_proj.weight   (tp kv_heads 2 4) (dp embed) -> (tp kv_heads 2 4) embed
        model.layers.*.self_attn.k_proj.weight   (tp kv_heads 4) (dp embed) -> (tp kv_heads 4) embed
        model.layers.*.self_attn.v_proj.weight   (tp kv_heads 4) (dp embed) -> (tp kv_heads 4) embed
        model.layers.*.self_attn.o_proj.weight   (dp embed) (tp kv_heads 2 4) -> embed (tp kv_heads 2 4)
        model.layers.*.mlp.gate_proj.weight      (tp dp hidden) embed -> (tp hidden) embed
        model.layers.*.mlp.up_proj.weight        (tp dp hidden) embed -> (tp hidden) embed
        model.layers.*.mlp.down_proj.weight      (dp embed) (tp hidden) -> embed (tp hidden)
        model.norm.weight                        (dp d0) -> d0
        lm_head.weight                           (tp dp vocab) embed -> (tp vocab) embed
        input_ids                                (dp d0) d1
        labels                                   (dp d0) d1
    """)


def test_a_table_is_a_mapping():
    table = specs_for(LLAMA, BATCH, data_parallel())
    assert dict(table) == table.entries and len(table) == len(table.entries)
    assert {**table, "labels": "..."}["labels"] == "..."
    assert table["input_ids"] == "(dp d0) d1"


@pytest.mark.parametrize(
    "options, q, k, o",
    [
        ({}, "(tp heads) embed", "(tp kv_heads) embed", "embed (tp heads)"),
        ({"heads": 4}, "(tp heads 4) embed", "(tp kv_heads 2) embed", "embed (tp heads 4)"),
        ({"heads": 4, "kv_heads": 2}, "(tp kv_heads 2 4) embed", "(tp kv_heads 4) embed", "embed (tp kv_heads 2 4)"),
        (
            {"heads": 4, "kv_heads": 2, "kv_axis": "kv"},
            "(tp heads 4) embed",
            "(kv kv_heads 4) embed",
            "embed (tp heads 4)",
        ),
        ({"heads": 5}, "(tp heads) embed", "(tp kv_heads) embed", "embed (tp heads)"),  # another part's heads
    ],
)
def test_heads_are_whole_where_they_are_known(options, q, k, o):
    table = specs_for(LLAMA, None, tensor_parallel("tp", **options))
    attention = [table[f"model.layers.*.self_attn.{name}_proj.weight"] for name in "qko"]
    assert attention == [q, k, o]


def test_a_fused_projection_is_cut_in_each_of_its_parts():
    shapes = {"h.0.qkv_proj.weight": (64, 32), "h.0.qkv_proj.bias": (64,)}

    def written(**options):
        return list(specs_for(shapes, None, tensor_parallel(**options)).values())

    assert written() == ["d0 d1", "d0"]  # 64 are not three equal parts, nor is it known which they are
    parts = "(tp kv_heads 2 8 + tp kv_heads 8 + tp kv_heads 8)"
    assert written(heads=4, kv_heads=2) == [f"{parts} embed", parts]
    equal = specs_for({"h.0.qkv_proj.weight": (96, 32)}, None, tensor_parallel(heads=4))
    assert list(equal.values()) == ["(3 tp heads 8) embed"]


def test_recipes_that_say_how_to_compute_commute():
    shapes = {"moe.experts.gate_up_proj": (4, 32, 8), "moe.experts.down_proj": (4, 8, 16), **LLAMA}
    experts, tensor = expert_parallel(), tensor_parallel()
    one, other = specs_for(shapes, None, experts, tensor), specs_for(shapes, None, tensor, experts)
    mesh = Mesh("ep=2 tp=2")
    assert one["moe.experts.gate_up_proj"] == "(ep d0) (2 tp hidden) embed"
    for key in one:
        for name, shape in shapes.items():
            if name == key:
                assert parse_layout(one[key], shape, mesh, {}) == parse_layout(other[key], shape, mesh, {})


def test_sequences_and_batches_and_heads_are_cut_in_anchors_in_any_order():
    recipes = {
        "dp": data_parallel(),
        "tp": tensor_parallel(),
        "megatron": sequence_parallel("tp"),
        "ulysses": sequence_parallel("sp", "ulysses"),
        "ring": sequence_parallel("cp", "ring"),
    }
    orders = [list(recipes), list(recipes)[::-1], ["ring", "dp", "ulysses", "megatron", "tp"]]
    for order in orders:
        table = specs_for(LLAMA, BATCH, *(recipes[name] for name in order))
        assert table["input_ids"] == "(dp d0) (2 ~cp sp d1)"
        assert table["model.embed_tokens"] == "(dp batch) (2 ~cp sp tp seq) embed"
        assert table["*:attention"] == (
            "(dp batch) (tp heads) (2 ~cp sp seq) dim -> (dp batch) (tp sp heads) (2 ~cp seq) dim"
        )


def test_stages_of_zero_on_two_axes_compose():
    table = specs_for({"w": (64, 8)}, None, zero(3, "dp"), zero(1, "rep"))
    assert dict(table) == {"w": "(dp d0) d1 -> d0 d1", "w:state": "(dp rep d0) d1"}


@pytest.mark.parametrize(
    "shape, stored",
    [
        ((64, 64), "(dp d0) d1"),
        ((4, 64), "d0 (dp d1)"),  # 4 token types over 8 ranks would leave half of them without
        ((1, 1, 64), "d0 d1 (dp d2)"),
        ((64, 3, 4, 4), "(dp d0) d1 d2 d3"),
        ((7,), "(dp d0)"),
        ((), "..."),
    ],
)
def test_storage_is_split_along_the_first_long_dim(shape, stored):
    assert specs_for({"w": shape}, None, zero(3))["w"].split(" -> ")[0] == stored


# --- models that no table knows ---------------------------------------------------------------------------------------


def test_an_unseen_model_is_split_by_its_shapes():
    model = Unseen(layers=1)
    assert len(unknown({name: tuple(p.shape) for name, p in model.named_parameters()})) == 18
    assert lines(str(specs_for(model, None, tensor_parallel()))) == lines("""
        tok_emb.weight             (tp vocab) embed
        pos_emb.weight             d0 d1
        stack.*.n1.weight          d0
        stack.*.n1.bias            d0
        stack.*.mixer.ask.weight   (tp hidden) embed
        stack.*.mixer.ask.bias     (tp hidden)
        stack.*.mixer.tell.weight  (tp hidden) embed
        stack.*.mixer.tell.bias    (tp hidden)
        stack.*.mixer.say.weight   (tp hidden) embed
        stack.*.mixer.say.bias     (tp hidden)
        stack.*.mixer.mix.weight   embed (tp hidden)
        stack.*.mixer.mix.bias     d0
        stack.0.feed.0.weight      (tp hidden) embed
        stack.0.feed.0.bias        (tp hidden)
        stack.0.feed.2.weight      embed (tp hidden)
        stack.0.feed.2.bias        d0
        [o]utput.weight            (tp vocab) embed
        [o]utput.bias              (tp vocab)
    """)


def test_matrices_that_do_not_lead_back_are_replicated():
    shapes = {"net.0.weight": (32, 64), "net.2.weight": (32, 32), "net.4.weight": (10, 32)}
    assert set(specs_for(shapes, None, tensor_parallel()).values()) == {"d0 d1"}


def test_stacked_experts_are_found_by_name_or_by_shape():
    def split(shapes):
        params = specs_for(shapes, None, expert_parallel()).params
        return {name for name, leaf in params.items() if "ep" in leaf.used[0]}

    named = {"m.experts.up": (4, 8, 32), "m.experts.up_bias": (4, 32), "m.gate.weight": (4, 8)}
    assert split(named) == {"m.experts.up", "m.experts.up_bias"}
    shaped = {"router": (16, 4), "up": (4, 16, 32), "down": (4, 32, 16), "conv": (4, 3, 5)}
    assert split(shaped) == {"up", "down"}


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "recipes, message",
    [
        ([lambda s: zero(4)(s)], r"zero\(4\): there is no such stage; write 1 for optimizer state"),
        ([zero(1), zero(3)], r"zero\(3, 'dp'\) comes after a lower stage.*write zero\(3, 'dp'\) first"),
        ([zero(3), tensor_parallel()], r"split at rest already.*apply zero last"),
        ([lambda s: tensor_parallel(kind="4d")(s)], r"kind='4d': write one of '1d'"),
        ([lambda s: tensor_parallel(heads=4, kv_heads=3)(s)], r"heads=4, kv_heads=3: every head of keys"),
        ([lambda s: sequence_parallel("sp", "star")(s)], r"kind='star': write one of 'megatron', 'ulysses', 'ring'"),
        ([lambda s: sequence_parallel("sp", "ring", at="x")(s)], r"at='x' is for kind='megatron'"),
        ([sequence_parallel("sp", "ring")], r"no input of shape `batch seq` among none; give the inputs by name"),
        ([sequence_parallel("tp")], r"no embedding of tokens among 'h.q_proj.weight'; .* at='path.of.the.module'"),
        ([expert_parallel()], r"no stacked experts among 'h.q_proj.weight'; stack the weights of all experts"),
    ],
)
def test_errors_say_what_to_write_instead(recipes, message):
    with pytest.raises(ValueError, match=message):
        specs_for({"h.q_proj.weight": (16, 16)}, None, *recipes)


def test_a_parameter_called_output_is_not_taken_for_an_output():
    table = specs_for({"output.weight": (8, 4), "outputs": (8,)}, None, zero(3))
    assert list(table) == ["[o]utput.weight", "outputs"]
    leaves = {"params.output.weight": (8, 4), "params.outputs": (8,)}
    tails = {name: [name.removeprefix("params.")] for name in leaves}
    found = resolve(table, leaves, Mesh("dp=2"), aliases=tails).leaves
    assert found["params.output.weight"].key == "[o]utput.weight"


def test_a_parameter_and_an_input_of_one_name_are_an_error():
    with pytest.raises(ValueError, match=r"'x' is a parameter and an input.*name the input by its argument: 'batch.x'"):
        str(specs_for({"x": (4,)}, {"x": (4,)}))


# --- each tensor gets its own layout ----------------------------------------------------------------------------------

MESH = Mesh("a=2 b=2")
PARTS = st.sampled_from(["0", "1", "2", "h", "w", "x.y"])
NAMES = st.lists(PARTS, min_size=1, max_size=4).map(".".join)
LAYOUTS = st.sampled_from([("d0",), ("(a d0)",), ("(b d0)",)])
LEAVES = st.builds(
    Leaf,
    st.just((8,)),
    LAYOUTS,
    st.none() | st.just(("(a b d0)",)),
    st.none() | LAYOUTS,
    st.none() | LAYOUTS,
)


INPUTS = st.dictionaries(NAMES, st.builds(Leaf, st.just((8,)), LAYOUTS), max_size=2)


@given(st.dictionaries(NAMES, LEAVES, max_size=8), INPUTS)
@example({"w": Leaf((8,), ("(a d0)",)), "h.0.w": Leaf((8,), ("d0",)), "h.1.w": Leaf((8,), ("d0",))}, {})
@example({"h.0.w": Leaf((8,), ("(a d0)",)), "h.1.w": Leaf((8,), ("(a d0)",)), "h.w.w": Leaf((8,), ("d0",))}, {})
@example({"w": Leaf((8,), ("d0",), state=("(a d0)",)), "h.w": Leaf((8,), ("d0",))}, {"x.w": Leaf((8,), ("d0",))})
def test_each_leaf_of_a_printed_table_resolves_to_its_own_layout(params, inputs):
    """Stars match dots, and names match by their tails: neither may give a tensor what is meant for another."""
    inputs = {name: leaf for name, leaf in inputs.items() if name not in params}
    table = Specs(params, inputs)
    leaves = {f"params.{name}": leaf for name, leaf in params.items()}
    leaves |= {f"batch.{name}": leaf for name, leaf in inputs.items()}
    tails = {name: [name.split(".", n)[-1] for n in range(1, name.count(".") + 1)] for name in leaves}
    resolved = resolve(table, {name: (8,) for name in leaves}, MESH, aliases=tails).leaves
    for name, leaf in leaves.items():
        stored, used = parse_stored_used(leaf.pattern, (8,), MESH, {})
        assert (resolved[name].stored, resolved[name].used) == (stored, used), (name, str(table))
        rest = " ".join(leaf.rest)
        state = parse_layout(" ".join(leaf.state or ()) or rest, (8,), MESH, {})
        grad = parse_layout(" ".join(leaf.grad or ()), (8,), MESH, {}) if leaf.grad else state
        found = resolved[name]
        assert (found.state.layout if found.state else stored) == state, (name, str(table))
        if name.startswith("params."):
            got = found.grad or found.state
            assert (got.layout if got else stored) == grad, (name, str(table))


@pytest.mark.parametrize("kind", ["ulysses", "ring"])
def test_a_mask_of_keys_stays_whole(kind):
    inputs = {"input_ids": (4, 16), "attention_mask": (4, 16)}
    table = specs_for({}, inputs, sequence_parallel("sp", kind))
    assert "sp" in table["input_ids"] and "sp" not in table["attention_mask"]


def test_a_gate_is_a_router_only_where_it_gates_no_values():
    swiglu = {f"h.0.mlp.{name}.weight": (16, 8) for name in ("gate", "up")} | {"h.0.mlp.down.weight": (8, 16)}
    table = specs_for(swiglu, {}, tensor_parallel("tp"))
    assert [name for name in swiglu if "tp" not in table.params[name].pattern] == []
    router = {"h.0.mlp.gate.weight": (4, 8), "h.0.mlp.experts.down_proj": (4, 8, 16)}
    assert "tp" not in specs_for(router, {}, tensor_parallel("tp")).params["h.0.mlp.gate.weight"].pattern
