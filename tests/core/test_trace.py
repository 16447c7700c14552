"""A traced graph computes what the function computes, and every node tells where it comes from."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from oracle import close, randn
from torch import nn
from torch.utils.checkpoint import checkpoint

from megalith.core import constrain, grad, grad_and_value
from megalith.core.clean import clean
from megalith.core.interpret import run_graph
from megalith.core.trace import TraceError, trace
from megalith.sharding import markers


def leaves(tree):
    return [x for x in torch.utils._pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


def traced_as_it_is(fn, *args, **kwargs):
    """Asserts that the graph gives what the function gives; returns it."""
    graph = trace(fn, args, kwargs).graph
    close(run_graph(graph, leaves((args, kwargs))), torch.utils._pytree.tree_leaves(fn(*args, **kwargs)))
    return graph


def names(graph, phase=None):
    return [node.name for node in graph.nodes if phase in (None, node.origin.phase)]


def line_of(fn, text):
    source, start = inspect.getsourcelines(fn)
    (offset,) = [i for i, line in enumerate(source) if text in line]
    return f"test_trace.py:{start + offset}"


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 6).double(), nn.Linear(6, 4).double()

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


MODEL = MLP()


def sgd_step(params, x):
    grads, value = grad_and_value(lambda p: torch.func.functional_call(MODEL, p, (x,)).pow(2).mean())(params)
    return {k: p - 0.1 * grads[k] for k, p in params.items()}, value


def parameters():
    return {name: randn(*p.shape) for name, p in MODEL.named_parameters()}


# --- what a node says -------------------------------------------------------------------------------


def test_inputs_are_named_by_their_paths():
    graph = trace(lambda p, x: p["a"]["b"] @ x, ({"a": {"b": randn(2, 3)}}, randn(3)), names=("params", "x")).graph
    assert graph.names == ("params.a.b", "x")
    assert [graph.types[i].shape for i in graph.inputs] == [(2, 3), (3,)]


def test_views_are_reshapes_and_permutations_only():
    def fn(x):
        return x.view(2, 12).t().unsqueeze(0).transpose(0, 2).flatten().unflatten(0, (4, 6)).contiguous().detach()

    graph = traced_as_it_is(fn, randn(2, 3, 4))
    assert set(names(graph)) == {"aten.reshape.default", "aten.permute.default"}


def test_each_phase_of_a_step_is_told_apart():
    graph = trace(sgd_step, (parameters(), randn(5, 4))).graph
    order = [node.origin.phase for node in graph.nodes]
    assert order == sorted(order, key=["forward", "backward", "update"].index)
    assert "aten.gelu.default" in names(graph, "forward")
    assert "aten.gelu_backward.default" in names(graph, "backward")
    assert "aten.sub.Tensor" in names(graph, "update")
    assert names(graph).count("like") == 4  # each gradient is said to be a parameter's


def test_a_backward_node_has_the_module_and_line_of_its_forward():
    graph = trace(sgd_step, (parameters(), randn(5, 4))).graph
    by_name = {node.name: node.origin for node in graph.nodes}
    for name in ("aten.gelu.default", "aten.gelu_backward.default"):
        assert by_name[name].source == line_of(MLP, "F.gelu")
    modules = [node.origin.module for node in graph.nodes if node.name == "aten.mm.default"]
    assert [m for m in modules if m] == modules
    assert {"up", "down"} <= {m.split(".")[-1] for m in modules}


def test_the_values_are_those_of_the_function():
    params, x = parameters(), randn(5, 4)
    graph = traced_as_it_is(sgd_step, params, x)
    close(run_graph(clean(graph), leaves((params, x))), leaves(sgd_step(params, x)))


def test_arguments_that_are_no_tensors_are_constants_of_the_program():
    def fn(x, config, *, scale):
        return {"y": x * config["n"] * scale, "name": config["name"], "none": None}

    traced = trace(fn, (randn(3), {"n": 2, "name": "a"}), {"scale": 0.5})
    assert traced.graph.names == ("0",)
    out = torch.utils._pytree.tree_unflatten(list(traced.graph.outputs), traced.out_spec)
    assert (out["name"], out["none"]) == ("a", None)
    x = randn(3)
    close(run_graph(traced.graph, [x])[0], x)


def test_a_tensor_of_the_program_is_a_constant():
    table = torch.arange(4.0, dtype=torch.float64)
    graph = traced_as_it_is(lambda x: x * table + torch.tensor(2.0), randn(4))
    assert any(constant is table for constant in graph.constants.values())


def test_nothing_is_recorded_but_the_ops_below_autograd():
    graph = trace(lambda x: x.sin().sum(), (randn(3),)).graph
    assert names(graph) == ["aten.sin.default", "aten.sum.default"]


# --- code that writes in place ----------------------------------------------------------------------


def test_writing_into_a_fresh_tensor_needs_no_second_trace():
    def fn(x):
        y = x * 2
        y.add_(1).mul_(x)
        y += x
        return y

    assert names(traced_as_it_is(fn, randn(3))) == [f"aten.{op}.Tensor" for op in ("mul", "add", "mul", "add")]


def test_writing_into_a_view_is_seen_through_the_base():
    def fn(x):
        y = x.clone()
        y[0] += 1
        y[:, 1] = 5
        y.t()[2].mul_(3)
        z = torch.zeros(5, 3, dtype=x.dtype)
        z.diagonal(-1).copy_(x[:, 0])
        torch.zeros(4, 4, 2, dtype=x.dtype).diagonal(1, 1, 0).add_(1)
        return y, y.sum(), x, z

    graph = traced_as_it_is(fn, randn(3, 4))
    assert not any(name.split(".")[1].endswith("_") for name in names(graph))


def test_writing_into_a_copy_leaves_the_argument_alone():
    x = randn(3)
    before = x.clone()

    def fn(x):
        x = x * 1
        x[0] = 7
        return x

    traced_as_it_is(fn, x)
    assert torch.equal(x, before)


def test_a_functionalised_step_keeps_phases_modules_and_markers():
    def step(params, x):
        def loss(p):
            y = x.clone()
            y[0] += 1
            return constrain(torch.func.functional_call(MODEL, p, (y,)), "b e").pow(2).mean()

        grads, value = grad_and_value(loss)(params)
        return {k: p - grads[k] for k, p in params.items()}, value

    graph = traced_as_it_is(step, parameters(), randn(5, 4))
    assert "aten.gelu.default" in names(graph, "forward")
    assert "aten.gelu_backward.default" in names(graph, "backward")
    assert "aten.sub.Tensor" in names(graph, "update")
    assert [node.args[1] for node in graph.nodes if node.op is markers.constrain] == ["b e", "b e"]
    assert names(graph).count("like") == 4
    assert {"up", "down"} <= {node.origin.module for node in graph.nodes if node.name == "aten.mm.default"}


def test_batch_norm_that_updates_its_buffers_traces():
    norm = nn.BatchNorm1d(4).double()
    state = {name: randn(4).abs() for name in ("weight", "bias", "running_mean", "running_var")}
    state["num_batches_tracked"] = torch.tensor(0)

    def fn(state, x):
        mine = {k: v.clone() for k, v in state.items()}
        return torch.func.functional_call(norm, mine, (x,)), mine["running_mean"], mine["running_var"]

    traced_as_it_is(fn, state, randn(8, 4))


# --- transforms -------------------------------------------------------------------------------------


def cubes(w, x):
    return ((x @ w).sin() ** 3).sum()


TRANSFORMS = {
    "grad": lambda w, x: torch.func.grad(cubes)(w, x),
    "grad_and_value": lambda w, x: torch.func.grad_and_value(cubes, argnums=(0, 1))(w, x),
    "vjp": lambda w, x: torch.func.vjp(lambda w: x @ w, w)[1](x @ w),
    "jvp": lambda w, x: torch.func.jvp(lambda w: (x @ w).sin(), (w,), (w,)),
    "vmap": lambda w, x: torch.func.vmap(lambda row: (row @ w).sin().sum())(x),
    "vmap of grad": lambda w, x: torch.func.vmap(torch.func.grad(cubes), in_dims=(None, 0))(w, x),
    "jacrev": lambda w, x: torch.func.jacrev(lambda w: (x @ w).sum(0))(w),
    "hessian": lambda w, x: torch.func.hessian(lambda v: (x @ v).sin().sum())(w[:, 0]),
    "ours": lambda w, x: grad_and_value(cubes)(w, x),
    "ours within ours": lambda w, x: grad(lambda w: grad(cubes)(w, x).pow(2).sum() + w.sum())(w),
    "ours within torch's": lambda w, x: torch.func.grad(lambda w: grad(cubes)(w, x).pow(2).sum() + w.sum())(w),
    "torch's within ours": lambda w, x: grad(lambda w: torch.func.grad(cubes)(w, x).pow(2).sum() + w.sum())(w),
    "autograd": lambda w, x: grad(lambda w: penalty(w, x))(w),
}


def penalty(w, x):
    (g,) = torch.autograd.grad(cubes(w, x), w, create_graph=True)
    return (g**2).sum()


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_within_the_function_trace(name):
    traced_as_it_is(TRANSFORMS[name], randn(3, 2), randn(4, 3))


def test_a_gradient_of_a_gradient_is_not_cut():
    """Also without tracing: the oracle itself."""
    w, x = randn(3, 2), randn(4, 3)
    wanted = torch.func.grad(lambda w: torch.func.grad(cubes)(w, x).pow(2).sum() + w.sum())(w)
    close(TRANSFORMS["ours within ours"](w, x), wanted)


def test_attention_and_cross_entropy_are_one_op_each():
    def fn(q, logits, target):
        def loss(q, logits):
            y = F.scaled_dot_product_attention(q, q, q, is_causal=True)
            return F.cross_entropy(logits, target) + y.sum()

        return grad_and_value(loss, argnums=(0, 1))(q, logits)

    graph = traced_as_it_is(fn, randn(2, 2, 4, 4), randn(5, 7), torch.randint(0, 7, (5,)))
    assert names(graph).count("megalith.sdpa.default") == 1
    assert names(graph).count("megalith.sdpa_backward.default") == 1
    assert "aten.log_softmax.int" not in names(graph)


def test_checkpointed_code_is_computed_again_in_the_backward():
    def fn(w, x):
        def loss(w):
            return checkpoint(lambda x: torch.sin(x @ w).exp(), x, use_reentrant=False).sum()

        return grad_and_value(loss)(w)

    graph = traced_as_it_is(fn, randn(3, 2), randn(4, 3))
    assert "aten.sin.default" in names(graph, "forward")
    assert "aten.sin.default" in names(graph, "backward")


# --- what cannot be traced --------------------------------------------------------------------------


def error_of(fn, *args):
    with pytest.raises(TraceError) as info:
        trace(fn, args)
    return str(info.value)


def test_a_branch_on_data_names_the_line_and_the_way_out():
    def branch(x):
        if x.sum() > 0:
            return x
        return -x

    def number(x):
        return x * float(x.max())

    def shape(x):
        return x[x > 0].sum()

    for fn, text in ((branch, "if x.sum()"), (number, "float("), (shape, "x[x > 0]")):
        message = error_of(fn, randn(3))
        assert f"at {line_of(fn, text)} depends on the data of a tensor" in message
        assert "torch.where, masks" in message


@pytest.mark.parametrize(
    "fn", [lambda x: x + torch.randn(3), lambda x: F.dropout(x, 0.5), torch.bernoulli, lambda x: x.clone().uniform_()]
)
def test_a_random_op_is_an_error_with_the_way_out(fn):
    message = error_of(fn, torch.full((3,), 0.5))
    assert "draws random numbers at" in message
    assert "call model.eval() or set the dropout probability to 0" in message


def test_a_tensor_of_another_trace_is_an_error():
    kept = []

    def leak(x):
        kept.append(x * 2)
        return x

    trace(leak, (randn(3),))

    def use(x):
        return x + kept[0]

    message = error_of(use, randn(3))
    assert f"a tensor of shape (3,) came from outside of the traced function at {line_of(use, 'kept[0]')}" in message
    assert "pass it in as an argument" in message


def test_a_loss_that_is_no_scalar_is_an_error():
    with pytest.raises(TypeError, match="needs a function that returns a scalar"):
        trace(lambda x: grad_and_value(lambda x: x * 2)(x), (randn(3),))
