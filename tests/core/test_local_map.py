"""Code on local shards, right by its layouts: values and gradients are those of one device."""

import pytest
import torch

from megalith.core import constrain, grad, grad_and_value, local_map, shard
from megalith.core.trace import TraceError, trace
from megalith.sharding import LayoutError, Mesh
from megalith.sharding.graph import Call

MESH = Mesh("dp=2 tp=2")

column = local_map(lambda x, w: x @ w.T, ["(dp b) i", "(tp o) i"], "(dp b) (tp o)")
row = local_map(lambda x, w: x @ w.T, ["(dp b) (tp i)", "o (tp i)"], "(dp b) o // tp")
gelu = local_map(torch.nn.functional.gelu, "(dp b) (tp f)", "(dp b) (tp f)")

SPECS = {"up": "(tp f) e", "down": "e (tp f)", "x": "(dp b) e"}


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def mlp_loss(params, x):
    return (row(gelu(column(x, params["up"])), params["down"]) ** 2).mean()


def close(got, wanted):
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


def same_on_mesh(fn, *args, specs=None, mesh=MESH):
    """The sharded function gives what the function gives; returns it."""
    sharded = shard(fn, mesh, specs or {}, backend="virtual")
    close(sharded.whole(*args), fn(*args))
    return sharded


def kinds(sharded, *args):
    return [(c.kind, c.axes) for c in sharded.program(*args).collectives]


# --- values -----------------------------------------------------------------------------------------


def test_outside_of_shard_the_function_itself_is_called():
    x, w = randn(4, 6), randn(8, 6)
    close(column(x, w), x @ w.T)
    close(grad(lambda w: column(x, w).sum())(w), torch.ones(4, 8, dtype=torch.float64).T @ x)


def test_a_column_parallel_linear_by_hand_moves_nothing():
    x, w = randn(4, 6), randn(8, 6)
    sharded = same_on_mesh(lambda x, w: column(x, w), x, w, specs={"x": "(dp b) i", "w": "(tp o) i"})
    assert kinds(sharded, x, w) == []
    assert str(sharded.program(x, w).output_layouts[0]) == "(dp b) (tp o)"


def test_a_row_parallel_linear_leaves_a_sum_that_is_made_once():
    def fn(x, w):
        return row(x, w)

    sharded = same_on_mesh(fn, randn(4, 6), randn(8, 6), specs={"x": "(dp b) (tp i)", "w": "o (tp i)"})
    assert kinds(sharded, randn(4, 6), randn(8, 6)) == [("all_reduce", ("tp",))]


def test_operands_are_brought_to_their_layouts():
    sharded = same_on_mesh(lambda x: gelu(x), randn(4, 6), specs={"x": "b (dp tp f)"})
    assert kinds(sharded, randn(4, 6))


def test_trees_constants_and_keyword_arguments_pass_through():
    def scale(pair, factor, *, shift):
        return {"sum": pair["a"] * factor + shift, "factor": factor, "b": pair["b"]}

    scaled = local_map(scale, ["(dp b)", None, "(dp b)"], ["(dp b)", None])

    def fn(a, b, shift):
        out = scaled({"a": a, "b": b}, 3, shift=shift)
        assert out["factor"] == 3
        return out["sum"], out["b"]

    # the leaves of the output come in the order of its keys: "sum", then "b"
    same_on_mesh(fn, randn(4), randn(2), randn(4))


def test_the_function_sees_local_shapes():
    seen = []

    def look(x):
        seen.append(tuple(x.shape))
        return x + 0

    same_on_mesh(lambda x: local_map(look, "(dp b) (tp f)", "(dp b) (tp f)")(x), randn(4, 6))
    assert seen[0] == (2, 3)


def test_a_constant_of_the_function_is_the_same_on_all_ranks():
    mask = torch.tensor([1.0, 0.0, 2.0], dtype=torch.float64)
    masked = local_map(lambda x: (x * mask).sin(), "b (dp tp f)", "b (dp tp f)")

    def fn(x):
        return masked(x)

    sharded = shard(fn, MESH, {}, backend="virtual")
    x = randn(2, 12)
    close(sharded.whole(x), (x * mask.repeat(4)).sin())
    g = shard(lambda x: grad(lambda x: masked(x).sum())(x), MESH, {}, backend="virtual").whole(x)
    close(g, (x * mask.repeat(4)).cos() * mask.repeat(4))


def test_in_place_code_may_run_on_shards():
    def fill(x):
        y = x.clone()
        y[0] += 1  # row 0 of each rank's block
        return y * x

    filled = local_map(fill, "(dp b) f", "(dp b) f")
    x = randn(4, 6)

    def loss(x):
        return (filled(x) ** 2).sum()

    def oracle(x):
        y = torch.cat([block + torch.tensor([[1.0], [0.0]], dtype=x.dtype) for block in x.split(2)])
        return ((y * x) ** 2).sum()

    got = shard(lambda x: grad_and_value(loss)(x), MESH, {}, backend="virtual").whole(x)
    close(got, grad_and_value(oracle)(x))


def test_a_program_that_writes_into_tensors_keeps_its_code_on_shards():
    def fn(params, x):
        def loss(p):
            y = x.clone()
            y[0] += 1
            return mlp_loss(p, y)

        return grad_and_value(loss)(params)

    same_on_mesh(fn, {"up": randn(8, 6), "down": randn(6, 8)}, randn(4, 6), specs=SPECS)


# --- gradients --------------------------------------------------------------------------------------


@pytest.mark.parametrize("transform", [grad_and_value, torch.func.grad_and_value], ids=["megalith", "torch.func"])
@pytest.mark.parametrize("specs", [SPECS, {}, {"x": "(dp b) e"}], ids=["megatron", "replicated", "dp"])
def test_gradients_are_those_of_one_device(transform, specs):
    params = {"up": randn(8, 6), "down": randn(6, 8)}

    def step(params, x):
        return transform(mlp_loss, argnums=(0, 1))(params, x)

    same_on_mesh(step, params, randn(4, 6), specs=specs)


def test_a_step_by_hand_communicates_as_megatron_does():
    params, x = {"up": randn(8, 6), "down": randn(6, 8)}, randn(4, 6)
    sharded = shard(lambda params, x: grad_and_value(mlp_loss, argnums=1)(params, x), MESH, SPECS, backend="virtual")
    forward = [c.axes for c in sharded.program(params, x).collectives if c.origin.phase == "forward"]
    later = [c.axes for c in sharded.program(params, x).collectives if c.origin.phase != "forward"]
    assert forward == [("tp",)]  # the sum that `row` leaves
    assert ("tp",) in later  # the gradient of x, of which each rank along tp has a part


def test_an_operand_that_needs_no_gradient_gets_none():
    def fn(x, mask):
        return grad(lambda x: local_map(lambda x, m: x.sin() * m, ["(dp b)", "(dp b)"], "(dp b)")(x, mask).sum())(x)

    same_on_mesh(fn, randn(4), torch.tensor([1, 0, 1, 1]))


def test_a_result_that_is_the_same_along_an_axis_is_counted_once():
    def both(x, w):
        return x * w, w.sin()  # sharded over dp; the same on all ranks

    mapped = local_map(both, ["(dp b) f", None], ["(dp b) f", "f"])

    def loss(w, x):
        y, s = mapped(x, w)
        return (y**2).sum() + (s**3).sum()

    same_on_mesh(lambda w, x: grad_and_value(loss)(w, x), randn(6), randn(4, 6))


def test_a_result_nobody_uses_has_no_cotangent():
    mapped = local_map(lambda x: (x.sin(), x.cos()), "(dp b)", ["(dp b)", "(dp b)"])
    same_on_mesh(lambda x: grad(lambda x: mapped(x)[0].sum())(x), randn(4))


def test_integers_have_no_gradient():
    def top(x):
        return x.argmax(-1), x.amax(-1) + x.sum(-1)

    mapped = local_map(top, "(dp b) v", ["(dp b)", "(dp b)"])

    def fn(x):
        return grad_and_value(lambda x: ((out := mapped(x))[1].pow(2).sum(), out[0]), has_aux=True)(x)

    same_on_mesh(fn, randn(4, 6))


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Parameter(randn(8, 6) * 0.3)
        self.down = torch.nn.Parameter(randn(6, 8) * 0.3)

    def forward(self, x):
        return x + row(gelu(column(x, self.up)), self.down)


class Layers(torch.nn.Module):
    def __init__(self, n):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(n))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_it_works_in_a_block_that_repeats():
    model = Layers(4)

    def step(params, x):
        return grad_and_value(lambda p: (torch.func.functional_call(model, p, (x,)) ** 2).mean())(params)

    params = {name: p.detach() for name, p in model.named_parameters()}
    x = randn(4, 6)
    graph = trace(step, (params, x), names=("params", "x"), mesh=MESH).graph
    assert sum(isinstance(node.op, Call) for node in graph.nodes) == 2 * 4
    same_on_mesh(step, params, x, specs={"*.up": "(tp f) e", "*.down": "e (tp f)", "x": "(dp b) e"})


# --- errors -----------------------------------------------------------------------------------------


def failing(fn, *args, error=TraceError, mesh=MESH):
    with pytest.raises(error) as info:
        shard(fn, mesh, {}, backend="virtual").program(*args)
    return str(info.value)


def test_shards_of_different_sizes_are_an_error_that_says_what_to_do():
    message = failing(lambda x, w: column(x, w), randn(5, 6), randn(8, 6), error=LayoutError)
    for part in ("x of local_map(<lambda>)", "(5, 6)", "(dp b) i", "dp=2 tp=2", "dim 0 of size 5 has [2, 3]"):
        assert part in message
    assert "give it a size that 2 divides, pad it, or write it without dp in in_layouts" in message


def test_a_layout_for_each_tensor_is_asked_for():
    message = failing(lambda x: column(x), randn(4, 6))
    assert "is given 1 tensors and has 2 in_layouts; write one for each tensor, None for a replicated one" in message
    message = failing(lambda x: local_map(lambda x: (x, x), "b f", "b f")(x), randn(4, 6))
    assert "returns 2 tensors and has 1 out_layouts" in message


def test_a_partial_operand_is_an_error():
    message = failing(lambda x: local_map(lambda x: x, "b f // tp", "b f")(x), randn(4, 6))
    assert "'b f // tp' is partial, but an operand is read as it is" in message


def test_a_result_that_differs_along_an_axis_must_say_so():
    message = failing(lambda x: local_map(lambda x: x.sum(-1), "b (tp f)", "b")(x), randn(4, 6))
    assert "made of shards along tp" in message
    assert "mark it as a sum still to be made: 'b // tp'" in message


def test_a_result_of_another_rank_is_an_error_about_its_pattern():
    message = failing(lambda x: local_map(lambda x: x, "(dp b) f", "(dp b)")(x), randn(4, 6), error=LayoutError)
    assert "result 0 of local_map" in message


def test_a_typo_names_the_nearest_axis():
    message = failing(lambda x: local_map(lambda x: x, "(dpp b) f", "(dp b) f")(x), randn(4, 6), error=LayoutError)
    assert "dp" in message
    assert "x of local_map" in message


def test_a_tensor_from_outside_is_an_error_that_says_how_to_pass_it():
    message = failing(lambda x, w: local_map(lambda x: x * w, "b f", "b f")(x), randn(4, 6), randn(4, 6))
    assert "reads a tensor that is not one of its arguments; pass it in as one, with a layout" in message


def test_constrain_and_local_map_have_no_place_on_shards():
    message = failing(lambda x: local_map(lambda x: constrain(x, "b f"), "b f", "b f")(x), randn(4, 6))
    assert "calls constrain(x, 'b f')" in message
    nested = local_map(lambda x: local_map(torch.sin, "b f", "b f")(x), "b f", "b f")
    assert "is called on shards already: call the function itself" in failing(lambda x: nested(x), randn(4, 6))


def test_writing_into_an_argument_is_an_error():
    def write(x):
        x[0] = 1
        return x * 2

    assert "writes into its arguments" in failing(lambda x: local_map(write, "b f", "b f")(x), randn(4, 6))


def test_what_it_cannot_differentiate_is_an_error():
    sin = local_map(torch.sin, "(dp b)", "(dp b)")
    twice = failing(lambda x: grad(lambda y: (grad(lambda z: sin(z).sum())(y) ** 2).sum())(x), randn(4))
    assert "local_map(sin) is differentiated twice" in twice
    assert "torch.func.vmap" in failing(lambda x: torch.func.vmap(sin)(x), randn(2, 4))
    forward = failing(lambda x: torch.func.jvp(sin, (x,), (x,)), randn(4))
    assert "forward mode" in forward
    peak = local_map(lambda x: x.amax(-1), "b (tp f)", "b // max:tp")
    close(shard(lambda x: peak(x), MESH, {}, backend="virtual").whole(torch.ones(2, 4)), torch.ones(2))
    assert "partial max" in failing(lambda x: grad(lambda x: peak(x).sum())(x), randn(4, 6))
