"""A spec table says for each tensor which entry decided, and an entry that does nothing or does not fit is an error."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalith.sharding.layout import Layout, replicated
from megalith.sharding.mesh import Mesh
from megalith.sharding.specs import SpecError, resolve

MESH = Mesh("dp=2 tp=2")
LEAVES = {
    "params.layers.0.attn.q_proj.weight": (8, 4),
    "params.layers.0.attn.k_proj.weight": (8, 4),
    "params.layers.0.attn.o_proj.weight": (4, 8),
    "params.layers.0.norm.weight": (4,),
    "params.layers.1.attn.q_proj.weight": (8, 4),
    "params.embed.weight": (16, 4),
    "batch.input_ids": (4, 6),
}
MODULES = ("layers.0", "layers.0.attn", "layers.0.mlp", "layers.1", "layers.1.mlp")


def keys(specs, leaves=LEAVES, **options):
    """By leaf, the key that decided."""
    return {name: leaf.key for name, leaf in resolve(specs, leaves, MESH, **options).leaves.items() if leaf.key}


def test_the_last_matching_entry_wins():
    general, special = {"*.q_proj.weight": "(tp o) i"}, {"*.1.*": "o (tp i)"}
    later = resolve(general | special, LEAVES, MESH).leaves
    assert later["params.layers.1.attn.q_proj.weight"].pattern == "o (tp i)"
    assert later["params.layers.0.attn.q_proj.weight"].pattern == "(tp o) i"
    earlier = resolve(special | general, LEAVES, MESH).leaves
    assert earlier["params.layers.1.attn.q_proj.weight"].pattern == "(tp o) i"


@pytest.mark.parametrize(
    "key, matched",
    [
        ("*.q_proj.weight", ["layers.0.attn.q_proj", "layers.1.attn.q_proj"]),
        ("*.0.*.?_proj.weight", ["layers.0.attn.q_proj", "layers.0.attn.k_proj", "layers.0.attn.o_proj"]),
        ("*.[qk]_proj.weight", ["layers.0.attn.q_proj", "layers.0.attn.k_proj", "layers.1.attn.q_proj"]),
        ("*.{o,k}_proj.weight", ["layers.0.attn.k_proj", "layers.0.attn.o_proj"]),
        ("*.{0.{*.k,*.o}_proj,embed}.weight", ["layers.0.attn.k_proj", "layers.0.attn.o_proj", "embed"]),
        ("params.embed.weight", ["embed"]),
    ],
)
def test_keys_match_as_file_names_do_dots_included(key, matched):
    assert list(keys({key: "..."})) == [f"params.{name}.weight" for name in matched]


def test_a_key_matches_a_whole_name_or_an_alias():
    aliases = {"batch.input_ids": ["input_ids"]}
    assert keys({"input_ids": "(dp b) s"}, aliases=aliases) == {"batch.input_ids": "input_ids"}
    with pytest.raises(SpecError, match=r"matched against the whole name: write '\*\.input_ids'"):
        resolve({"input_ids": "(dp b) s"}, LEAVES, MESH)


def test_what_no_entry_matches_is_replicated_and_listed():
    found = resolve({"*.q_proj.weight": "(tp o) i", "batch.*": "(dp b) s"}, LEAVES, MESH)
    norm = found.leaves["params.layers.0.norm.weight"]
    assert norm.stored == replicated((4,), MESH) and norm.used is None and norm.key is None and norm.cause == ""
    assert len(found.unmatched()) == 4 and "batch.input_ids" not in found.unmatched()
    assert found.unmatched(["params.embed.weight", "batch.input_ids"]) == ("params.embed.weight",)


def test_an_entry_gives_the_layouts_stored_and_used_with_their_cause():
    found = resolve({"*.q_proj.weight": "(tp dp o) i @host -> (tp o) i"}, LEAVES, MESH)
    leaf = found.leaves["params.layers.0.attn.q_proj.weight"]
    assert leaf.stored == Layout.parse("(tp dp o) i @host", (8, 4), MESH)
    assert leaf.used == Layout.parse("(tp o) i", (8, 4), MESH)
    assert leaf.cause == "'*.q_proj.weight': '(tp dp o) i @host -> (tp o) i'"


def test_sizes_are_the_patterns():
    found = resolve({"*.q_proj.weight": "(tp h d) e"}, {"l.q_proj.weight": (12, 4)}, Mesh("tp=2"), {"d": 4})
    assert found.leaves["l.q_proj.weight"].stored.local_shape(0) == (8, 4)


def test_roles_are_patterns_of_their_own():
    specs = {"*.q_proj.weight": "(tp o) i", "*_proj.weight:state": "(dp o) i", "*.1.*:grad": "o (dp i)"}
    found = resolve(specs, LEAVES, MESH).leaves
    first, second = (found[f"params.layers.{i}.attn.q_proj.weight"] for i in (0, 1))
    assert first.key == second.key == "*.q_proj.weight"
    assert first.grad is None and str(second.grad) == "'*.1.*:grad': 'o (dp i)'"
    assert second.grad.layout == Layout.parse("o (dp i)", (8, 4), MESH)
    assert first.state.layout == second.state.layout == Layout.parse("(dp o) i", (8, 4), MESH)
    other = found["params.layers.0.attn.o_proj.weight"]
    assert other.key is None and other.state.key == "*_proj.weight:state"


def test_an_optimizer_state_lives_as_its_role_says_or_is_stored_as_its_parameter():
    leaves = {"params.w": (8, 4), "opt.mu.w": (8, 4), "opt.mu.v": (8, 4), "opt.step": ()}
    aliases = {name: [name[-1]] for name in leaves}
    specs = {"{w,v}": "(tp dp o) i -> (tp o) i", "w:state": "o (dp i)"}
    states = ["opt.mu.w", "opt.mu.v", "opt.step"]
    found = resolve(specs, leaves, MESH, aliases=aliases, states=states).leaves
    assert found["params.w"].key == "{w,v}"
    assert found["opt.mu.w"].key == "w:state" and found["opt.mu.w"].stored == Layout.parse("o (dp i)", (8, 4), MESH)
    assert found["opt.mu.v"].key == "{w,v}" and found["opt.mu.v"].used is None
    assert found["opt.mu.v"].stored == Layout.parse("(tp dp o) i", (8, 4), MESH)
    assert found["opt.step"].stored.is_replicated


def test_an_entry_that_matches_no_leaf_may_anchor_modules():
    specs = {"layers.*.mlp": "b (tp s) e", "layers.1.mlp": "b s e", "*.q_proj.weight": "(tp o) i"}
    found = resolve(specs, LEAVES, MESH, modules=MODULES)
    assert found.modules == {"layers.0.mlp": "layers.*.mlp", "layers.1.mlp": "layers.1.mlp"}
    assert found.unused == ()


def test_leaves_come_before_modules():
    found = resolve({"*layers.0*": "..."}, LEAVES, MESH, modules=MODULES)
    assert found.modules == {} and len(found.leaves) - len(found.unmatched()) == 4


@pytest.mark.parametrize(
    "key, says",
    [
        ("*.q_prj.weight", "the nearest names are 'params.layers.0.attn.q_proj.weight'"),
        ("*.{q,k}_prj.weight", "the nearest names are 'params.layers.0.attn.q_proj.weight'"),
        ("layers.*.mpl", "'layers.0.mlp'"),
        ("embed.weight", "write '*.embed.weight'"),
        ("embed.weight:grad", "write '*.embed.weight:grad'"),
        ("zzz", "the names are 'params.layers.0.attn.q_proj.weight', "),
        ("layers.0.mlp:grad", "matches no tensor"),
    ],
)
def test_an_entry_that_matches_nothing_is_an_error_that_names_the_nearest(key, says):
    with pytest.raises(SpecError) as error:
        resolve({key: "..."}, LEAVES, MESH, modules=MODULES)
    assert f"specs[{key!r}] matches no tensor" in str(error.value) and says in str(error.value)


def test_unless_these_are_not_all_leaves():
    found = resolve({"*.q_prj.weight": "(tp o) i"}, LEAVES, MESH, complete=False)
    assert found.unused == ("*.q_prj.weight",)


def test_an_entry_that_does_not_fit_shows_the_entry_the_tensor_the_mesh_and_a_pattern():
    with pytest.raises(SpecError) as error:
        resolve({"*.weight": "(tp o) i"}, LEAVES, MESH)
    assert str(error.value) == (
        "specs['*.weight'] does not fit 'params.layers.0.norm.weight': the pattern has 2 dims, the tensor 1\n"
        "    (tp o) i\n"
        "    ^^^^^^^^\n"
        "  for 'params.layers.0.norm.weight' of shape (4,) on Mesh('dp=2 tp=2')\n"
        "  write as many dims as the tensor has, for example '(tp o)'\n"
        "  the last matching entry wins: to lay out 'params.layers.0.norm.weight' apart, "
        "write one for it below '*.weight'"
    )
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)


def test_an_entry_that_another_overrides_need_not_fit():
    specs = {"*.weight": "(tp o) i", "*.norm.weight": "e"}
    assert keys(specs)["params.layers.0.norm.weight"] == "*.norm.weight"


@pytest.mark.parametrize(
    "specs, says",
    [
        ({"*.weight:sate": "..."}, "'sate' is not a role of a parameter\n  write one of *.weight:grad, *.weight:state"),
        ({"*.{q,k": "..."}, "a brace is not closed"),
        ({"*.q_proj.weight:grad": "o i -> o i"}, "'->' in a layout that is not a spec"),
        ({"layers.*.mlp": "b (tp s e"}, "this parenthesis is not closed"),
    ],
)
def test_an_entry_that_cannot_be_is_an_error(specs, says):
    with pytest.raises(SpecError) as error:
        resolve(specs, LEAVES, MESH, modules=MODULES)
    assert says in str(error.value) and repr(next(iter(specs))) in str(error.value)


@given(st.lists(st.sampled_from(["*", "*.weight", "*.0.*", "*q_proj*", "batch.*", "params.*", "*.{norm,embed}.*"])))
def test_every_leaf_is_decided_by_the_last_key_that_matches_it_alone(table):
    specs = {key: "..." for key in table}
    alone = {key: keys({key: "..."}) for key in specs}
    expected = {}
    for key in specs:
        expected.update(dict.fromkeys(alone[key], key))
    assert keys(specs) == expected
