"""`shard` gives the same function: it places, runs and gathers what the specs say, and says what does not fit."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from oracle import close, counts, randn, same_on_mesh
from torch import nn

from megalith.core import AdamW, constrain, grad_and_value, shard
from megalith.core.backends.backend import PerRank
from megalith.models.llama import Llama, LlamaConfig
from megalith.sharding import LayoutError, Mesh
from megalith.sharding.specs import SpecError

MESH = Mesh("dp=2 tp=2")


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8).double(), nn.Linear(8, 6).double()

    def forward(self, x, scale=1.0):
        return self.down(F.gelu(self.up(x))) * scale


TP = {"up.weight": "(tp o) i", "up.bias": "(tp o)", "down.weight": "o (tp i)", "x": "(dp b) e"}


def virtual(fn, specs, mesh=MESH, **kwargs):
    return shard(fn, mesh, specs, backend="virtual", **kwargs)


# --- place, run, gather -----------------------------------------------------------------------------


def test_place_gives_each_rank_its_shard():
    x = torch.arange(12.0).reshape(4, 3)
    step = virtual(lambda x, w: x @ w, {"x": "(dp b) i", "w": "i (tp o)"})
    x_, w_ = step.place(x, torch.ones(3, 4))
    assert [s.shape for s in x_.shards] == [(2, 3)] * 4
    assert torch.equal(x_.shards[0], x[:2]) and torch.equal(x_.shards[3], x[2:])
    assert [s.shape for s in w_.shards] == [(3, 2)] * 4


def test_gather_is_the_inverse_of_place():
    step = virtual(lambda params, x: x, {"params.w": "(tp dp o) i", "x": "(dp b) ..."})
    params, x = {"w": randn(7, 3), "b": randn(5)}, randn(3, 2)
    assert torch.equal(step.gather(params=step.place(params=params))["w"], params["w"])
    p, x_ = step.gather(*step.place(params, x))
    assert torch.equal(p["b"], params["b"]) and torch.equal(x_, x)


def test_shards_do_not_share_memory_with_the_whole():
    x = randn(4, 3)
    before = x.clone()
    placed = virtual(lambda x: x, {}).place(x)
    for s in placed.shards:
        s.add_(1)
    assert torch.equal(x, before)


def test_a_call_takes_and_gives_shards():
    step = virtual(lambda x, w: x @ w, {"x": "(dp b) i", "w": "i (tp o)"})
    x, w = randn(4, 3), randn(3, 4)
    shards = step.place(x, w)
    out = step(*shards)
    assert isinstance(out, PerRank) and out.shards[0].shape == (2, 2)
    close(out.shards[1], (x @ w)[:2, 2:])
    close(step.gather_output(out, *shards), x @ w)


def test_trees_keywords_defaults_and_constants():
    def fn(tree, *rest, flag, scale=2.0, **more):
        y = tree["a"][0] * scale + sum(rest) + more["extra"]
        return {"y": y if flag else -y, "pair": (tree["a"][1], flag), "none": None, "text": "t"}

    args = ({"a": [randn(4, 2), randn(3)]}, randn(4, 2), randn(4, 2))
    specs = {"tree.a.0": "(dp b) e", "rest.1": "(tp b) e", "*extra": "(dp b) e"}
    for flag in (True, False):
        got = virtual(fn, specs).whole(*args, flag=flag, extra=randn(4, 2) * 0)
        wanted = fn(*args, flag=flag, extra=torch.zeros(4, 2, dtype=torch.float64))
        close(got["y"], wanted["y"])
        assert got["pair"][1] is flag and got["none"] is None and got["text"] == "t"


def test_a_constant_of_another_value_is_another_program():
    step = virtual(lambda x, n: x * n, {"x": "(dp b)"})
    x = randn(4)
    close(step.whole(x, 2), x * 2)
    close(step.whole(x, 3), x * 3)
    close(step.whole(x, 3.5), x * 3.5)
    close(step.whole(x, True), x)
    close(step.whole(x, 1), x)


def test_other_shapes_are_another_program():
    step = virtual(lambda x: x.sum(0), {"x": "(dp b) e"})
    for shape in ((4, 3), (2, 3), (8, 1)):
        x = randn(*shape)
        close(step.whole(x), x.sum(0))


def test_a_program_is_built_once_a_shape():
    traced = []

    def fn(x):
        traced.append(x.shape)
        return x * 2

    step = virtual(fn, {"x": "(dp b)"})
    for _ in range(3):
        step.whole(randn(4))
    step.program(torch.empty(4, dtype=torch.float64, device="meta"))
    assert len(traced) == 1


@pytest.mark.parametrize("n", [1, 3, 5, 7])
def test_a_batch_that_does_not_divide(n):
    model = MLP()
    params = {name: p.detach() for name, p in model.named_parameters()}

    def step(params, x):
        return grad_and_value(lambda p: torch.func.functional_call(model, p, (x,)).pow(2).mean())(params)

    same_on_mesh(step, params, randn(n, 6), mesh="dp=4", specs={"x": "(dp b) e"})


def test_uneven_shards_that_were_placed_are_known_again():
    step = virtual(lambda x: x.cumsum(1).sum(0), {"x": "(dp b) e"}, Mesh("dp=2"))
    for n in (5, 6, 5):
        x = randn(n, 3)
        placed = step.place(x)
        close(step.gather_output(step(placed), placed), x.cumsum(1).sum(0))


def test_shards_that_were_not_placed_are_taken_to_be_even():
    step = virtual(lambda x: x.sum(), {"x": "(dp b)"}, Mesh("dp=2"))
    out = step(PerRank((torch.ones(3), torch.ones(3))))
    assert [float(s) for s in out.shards] == [6.0, 6.0]


def test_uneven_shards_that_were_not_placed_are_an_error():
    step = virtual(lambda x: x.sum(), {"x": "(dp b)"}, Mesh("dp=2"))
    with pytest.raises(ValueError, match=r"x: shards of shape .* do not say how large the whole is; place the whole"):
        step(PerRank((torch.ones(1), torch.ones(3))))


# --- modules ----------------------------------------------------------------------------------------


def test_a_module_becomes_a_function_of_its_parameters():
    model = MLP()
    sharded = virtual(model, TP)  # an input has the name that `forward` gives it
    x = randn(4, 6)
    params = {name: p.detach() for name, p in model.named_parameters()}
    close(sharded.whole(params, x, scale=2.0), model(x, scale=2.0).detach())
    assert sharded.params["up.weight"].shards[0].shape == (4, 6)
    close(sharded.gather(params=sharded.params), params)
    x_ = sharded.place(x=x)
    close(sharded.gather_output(sharded(sharded.params, x_), sharded.params, x_), model(x).detach())


def test_a_sharded_module_within_a_sharded_step_is_part_of_it():
    model = virtual(MLP(), {})
    params = {name: p.detach() for name, p in MLP().named_parameters()}

    def step(params, x):
        return grad_and_value(lambda p: model(p, x).pow(2).mean())(params)

    sharded = virtual(step, TP)
    x = randn(4, 6)
    wanted = torch.func.grad_and_value(lambda p: torch.func.functional_call(model.module, p, (x,)).pow(2).mean())(
        params
    )
    close(sharded.whole(params, x), wanted)


def test_tied_parameters_stay_tied():
    model = Llama(LlamaConfig(vocab=16, dim=8, hidden=12, n_layers=1, n_heads=2, n_kv_heads=2, tied=True)).double()
    params = {name: p.detach() for name, p in model.named_parameters()}
    ids = torch.randint(0, 16, (4, 6))

    def step(params, ids):
        def loss(p):
            logits = torch.func.functional_call(model, p, (ids,))
            return F.cross_entropy(logits.flatten(0, 1), ids.flatten())

        return grad_and_value(loss)(params)

    same_on_mesh(step, params, ids, mesh="dp=2 tp=2", specs={"*embed_tokens.weight": "(tp v) e", "ids": "(dp b) s"})


# --- donation ---------------------------------------------------------------------------------------


def training():
    model = MLP()
    params = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = AdamW(lr=1e-2)

    def step(params, opt_state, x):
        grads, value = grad_and_value(lambda p: torch.func.functional_call(model, p, (x,)).pow(2).mean())(params)
        params, opt_state = optimizer.update(grads, opt_state, params)
        return params, opt_state, value

    return step, params, optimizer.init(params)


def pointers(tree):
    return [s.data_ptr() for x in torch.utils._pytree.tree_leaves(tree) for s in x.shards]


def test_donated_state_is_updated_where_it_lies():
    step, params, state = training()
    sharded = virtual(step, TP, donate=("params", "opt_state"))
    p, o = sharded.place(params, state)
    x = randn(4, 6)
    x_ = sharded.place(x=x)
    before = pointers((p, o["mu"], o["nu"]))
    for _ in range(3):
        p, o, _ = sharded(p, o, x_)
        params, state, _ = step(params, state, x)
        assert pointers((p, o["mu"], o["nu"])) == before
    close(sharded.gather(params=p), params)


def test_state_that_is_not_donated_is_left_alone():
    step, params, state = training()
    sharded = virtual(step, TP)
    p, o = sharded.place(params, state)
    before = [s.clone() for x in torch.utils._pytree.tree_leaves((p, o)) for s in x.shards]
    new, *_ = sharded(p, o, sharded.place(x=randn(4, 6)))
    after = [s for x in torch.utils._pytree.tree_leaves((p, o)) for s in x.shards]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert not set(pointers(new)) & set(pointers(p))


def test_a_donated_value_that_is_read_later_keeps_its_old_number():
    def fn(params, x):
        new = {"w": params["w"] - x}
        return new, (params["w"] * new["w"]).sum()

    params, x = {"w": randn(4)}, randn(4)
    got = virtual(fn, {"params.w": "(tp o)"}, donate="params").whole(params, x)
    close(got, fn(params, x))


def test_new_state_lies_as_the_state_that_it_replaces():
    step, params, state = training()
    sharded = virtual(step, TP, donate=("params", "opt_state"))
    program = sharded.program(params, state, randn(4, 6))
    names = dict(zip(program.input_names, program.input_layouts, strict=True))
    for i, o in program.donated:
        assert program.output_layouts[o] == program.input_layouts[i]
    assert str(names["opt_state.mu.up.weight"]) == "(tp o) i"


def test_donating_what_does_not_come_back_is_an_error():
    with pytest.raises(ValueError, match="'x' is donated, but no part of the output has its structure and shapes"):
        virtual(lambda x: x.sum(), {}, donate="x").program(randn(4))
    with pytest.raises(ValueError, match="donate names 'y', but the function's arguments are x"):
        virtual(lambda x: x, {}, donate="y")


# --- where specs say that values are ----------------------------------------------------------------


def test_an_output_is_laid_out_as_its_spec_says():
    def fn(x):
        return {"a": x * 2, "b": [x.sum(0), x + 1]}

    step = virtual(fn, {"x": "(dp b) e", "output.a": "b (tp e)", "output.b.*": "..."})
    x = randn(4, 6)
    program = step.program(x)
    assert [str(layout) for layout in program.output_layouts] == ["b (tp e)", "d0", "d0 d1"]
    close(step.whole(x), fn(x))


def test_the_outputs_of_modules_are_anchored_by_their_paths():
    config = LlamaConfig(vocab=16, dim=8, hidden=12, n_layers=3, n_heads=2, n_kv_heads=2)
    model = Llama(config).double()
    ids = torch.randint(0, 16, (4, 6))
    plain, anchored = virtual(model, {}), virtual(model, {"model.layers.*.mlp": "b (tp s) e"})
    params = {name: p.detach() for name, p in model.named_parameters()}
    close(anchored.whole(params, ids), model(ids).detach())
    assert counts(plain.program(params, ids)) == {}
    moved = anchored.program(params, ids).collectives
    assert {c.kind for c in moved if "self_attn" in c.origin.module} == {"exchange"}  # the split rows meet in a ring


def test_constrain_moves_a_value_and_its_cotangent():
    def fn(x):
        def loss(x):
            y = constrain(x.sin(), "b (tp e)")
            return (y * y).sum()

        return grad_and_value(loss)(x)

    sharded = same_on_mesh(fn, randn(4, 6), mesh="dp=2 tp=2", specs={"x": "(dp b) e"})
    kinds = counts(sharded.program(randn(4, 6)))
    assert any(kind.startswith("all_gather dp") for kind in kinds), kinds


def test_sizes_name_factors_that_patterns_leave_open():
    def fn(w):
        return w * 2

    step = virtual(fn, {"w": "(tp heads d + tp kv d + tp kv d) e"}, sizes={"heads": 2, "kv": 1, "d": 3})
    w = randn((4 + 2 + 2) * 3, 5)
    assert step.place(w).shards[0].shape == (12, 5)
    close(step.whole(w), w * 2)


def test_an_axis_of_size_one_is_no_axis():
    same_on_mesh(
        lambda x, w: x @ w, randn(4, 6), randn(6, 8), mesh="dp=1 tp=1", specs={"x": "(dp b) i", "w": "i (tp o)"}
    )


# --- errors -----------------------------------------------------------------------------------------


def spec_error(specs, error=SpecError, fn=None, args=None):
    with pytest.raises(error) as info:
        step = virtual(fn or (lambda params, x: x @ params["w"]), specs)
        step.program(*(args or ({"w": randn(6, 8)}, randn(4, 6))))
    return str(info.value)


def test_an_entry_that_matches_nothing_names_the_nearest():
    message = spec_error({"params.ww": "i (tp o)"})
    assert "specs['params.ww'] matches no tensor and no module" in message
    assert "the nearest names are 'params.w'" in message


def test_a_typo_in_a_pattern_names_the_nearest_axis():
    message = spec_error({"params.w": "i (tpp o)"})
    assert "specs['params.w'] does not fit 'params.w'" in message
    assert "tp" in message and "(6, 8)" in message and "dp=2 tp=2" in message


def test_a_pattern_of_another_rank_is_an_error():
    message = spec_error({"params.w": "(tp o)"})
    assert "does not fit 'params.w'" in message and "(6, 8)" in message


def test_an_axis_twice_is_an_error():
    assert "tp" in spec_error({"params.w": "(tp i) (tp o)"})


def test_a_wrong_constrain_pattern_says_what_is_constrained():
    message = spec_error({}, LayoutError, lambda x: constrain(x, "(dp b) e f"), (randn(4, 6),))
    assert "a constrained value" in message and "(4, 6)" in message


def test_wrong_arguments_are_those_of_the_function():
    step = virtual(lambda x, w: x @ w, {})
    with pytest.raises(TypeError, match="missing a required argument: 'w'"):
        step.whole(randn(4, 6))
    with pytest.raises(TypeError, match="unexpected keyword argument 'z'"):
        step.whole(randn(4, 6), randn(6, 2), z=1)


def test_shapes_that_do_not_go_together_are_torchs_error():
    with pytest.raises(RuntimeError, match="same reduction dim"):
        virtual(lambda x, w: x @ w, {}).program(randn(4, 6), randn(5, 2))


def test_shards_of_another_shape_are_an_error():
    step = virtual(lambda x: x * 2, {"x": "(dp b) e"}, Mesh("dp=2"))
    with pytest.raises(ValueError, match="x"):
        step(PerRank((torch.ones(2, 3), torch.ones(2, 4))))


def test_an_unknown_backend_is_an_error():
    with pytest.raises(ValueError, match="there is no backend 'cloud'"):
        shard(lambda x: x, MESH, {}, backend="cloud")


def test_the_arguments_of_a_call_do_not_outlive_it():
    step = shard(lambda x, w: x @ w, Mesh("tp=2"), {"w": "i (tp o)"}, backend="virtual")
    x, w = step.place(torch.ones(2, 4), torch.ones(4, 4))
    step(x, w)
    shards = [weakref.ref(shard) for shard in (*x.shards, *w.shards)]
    del x, w
    gc.collect()
    assert [ref() for ref in shards] == [None] * 4
