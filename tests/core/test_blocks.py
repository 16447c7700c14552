"""A layer that repeats is traced once, and only if it is the same program."""

import pytest
import torch
from oracle import close, randn, same_on_mesh
from torch import nn

from megalith.core import grad_and_value
from megalith.core.clean import clean
from megalith.core.interpret import run_graph
from megalith.core.trace import trace
from megalith.sharding.graph import Call


class Stack(nn.Module):
    """Layers one after the other."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.double()

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Layer(nn.Module):
    def __init__(self, scale=1.0, bias=True):
        super().__init__()
        self.scale = scale
        self.linear = nn.Linear(4, 4, bias=bias)

    def forward(self, x):
        return x + self.scale * torch.tanh(self.linear(x))


def gradients(model):
    """A function of parameters and input: loss and gradients of both."""

    def step(params, x):
        def loss(params, x):
            return torch.func.functional_call(model, params, (x,)).pow(2).mean()

        return grad_and_value(loss, argnums=(0, 1))(params, x)

    return step


def arguments(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}, randn(4, 4)


def calls(graph):
    return [node for node in graph.nodes if isinstance(node.op, Call)]


def exact(model, step=None, args=None):
    """Asserts that the traced step is the step, on one device and on a mesh; returns its graph."""
    step, args = step or gradients(model), args or arguments(model)
    graph = trace(step, args, names=("params", "x"), module=model).graph
    leaves = [x for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, torch.Tensor)]
    wanted = torch.utils._pytree.tree_leaves(step(*args))
    close(run_graph(graph, leaves), wanted)
    close(run_graph(clean(graph), leaves), wanted)
    same_on_mesh(step, *args, mesh="dp=2 tp=2", specs={"x": "(dp b) ..."})
    return graph


def test_a_repeated_block_is_traced_once():
    sizes, blocks = [], []
    for n in (4, 9):
        model = Stack(Layer() for _ in range(n))
        graph = exact(model)
        assert len(calls(graph)) == 2 * n
        blocks.append({id(node.op.block): len(node.op.block.graph.nodes) for node in calls(graph)})
        sizes.append(sum(node.name.startswith("aten.") for node in graph.nodes))
    assert sizes[0] == sizes[1]
    assert sorted(blocks[0].values()) == sorted(blocks[1].values())
    assert len(blocks[0]) == 2  # forward and backward


def test_calls_have_the_path_of_their_layer():
    model = Stack(Layer() for _ in range(3))
    graph = exact(model)
    forward = [node for node in calls(graph) if node.origin.phase == "forward"]
    assert [node.op.prefix for node in forward] == ["layers.0", "layers.1", "layers.2"]
    modules = {node.origin.module for node in forward[0].op.block.graph.nodes}
    assert modules == {"", "linear"}


def test_layers_with_different_settings_are_different_blocks():
    graph = exact(Stack(Layer(scale) for scale in (1.0, 0.5, 1.0, 0.5)))
    assert len({id(node.op.block) for node in calls(graph)}) == 4  # two kinds, forward and backward
    graph = exact(Stack(Layer(bias=bias) for bias in (True, True, False, False)))
    assert len({id(node.op.block) for node in calls(graph)}) == 4


class Numbered(Layer):
    """Uses its own number, as Hugging Face's layers have one; most do not read it."""

    def __init__(self, layer_idx, reads):
        super().__init__()
        self.layer_idx, self.reads = layer_idx, reads

    def forward(self, x):
        return super().forward(x) * (1 + 0.1 * self.layer_idx if self.reads else 1)


def test_a_layer_number_that_is_not_read_is_no_difference():
    graph = exact(Stack(Numbered(i, reads=False) for i in range(4)))
    assert len(calls(graph)) == 8


def test_a_layer_number_that_is_read_is_a_difference():
    exact(Stack(Numbered(i, reads=True) for i in range(4)))


def test_a_layer_number_in_a_child_is_a_difference_too():
    class Parent(nn.Module):
        def __init__(self, i):
            super().__init__()
            self.child = Numbered(i, reads=True)

        def forward(self, x):
            return self.child(x)

    exact(Stack(Parent(i) for i in range(4)))
    assert not hasattr(Numbered, "layer_idx")


def test_a_private_setting_or_a_hook_of_a_late_layer_is_a_difference():
    class Private(Layer):
        def __init__(self, scale):
            super().__init__()
            self._scale = scale

        def forward(self, x):
            return super().forward(x) * self._scale

    exact(Stack(Private(scale) for scale in (1.0, 1.0, 2.0, 1.0)))
    model = Stack(Layer() for _ in range(4))
    model.layers[3].linear.register_forward_hook(lambda module, args, out: out * 3)
    exact(model)


def test_a_layer_number_that_only_late_layers_read_is_a_difference():
    class Late(Layer):
        def __init__(self, layer_idx):
            super().__init__()
            self.layer_idx = layer_idx

        def forward(self, x):
            y = super().forward(x)
            return y * 2 if self.layer_idx >= 3 else y

    exact(Stack(Late(i) for i in range(5)))


def test_what_a_layer_captures_is_a_difference():
    class Closed(Layer):
        def __init__(self, fn):
            super().__init__()
            self.fn = fn

        def forward(self, x):
            return self.fn(super().forward(x))

    exact(Stack(Closed(lambda x, k=k: x * k) for k in (1.0, 2.0, 3.0)))
    tensors = [randn(4) for _ in range(3)]
    exact(Stack(Closed(lambda x, t=t: x * t) for t in tensors))


def test_a_method_that_was_replaced_is_a_difference():
    model = Stack(Layer() for _ in range(4))
    model.layers[2].forward = lambda x: x.sin()
    params, x = arguments(model)
    exact(model, args=(params, x))


def test_a_value_of_the_outside_that_layers_read_is_exact():
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(3))
            self.double()
            self.shared = None

        def forward(self, x):
            for layer in self.layers:
                layer.extra = x * 2  # seen through an attribute, not an argument
                x = layer(x) + layer.extra
            return x

    exact(Reader())


def test_a_second_derivative_is_taken_without_blocks():
    model = Stack(Layer() for _ in range(3))

    def step(params, x):
        def penalty(params):
            x_ = x.detach().requires_grad_()
            out = torch.func.functional_call(model, params, (x_,)).pow(2).sum()
            (g,) = torch.autograd.grad(out, x_, create_graph=True)
            return out + (g**2).sum()

        return grad_and_value(penalty)(params)

    assert not calls(exact(model, step))


def test_under_torch_func_no_block_is_called():
    model = Stack(Layer() for _ in range(3))

    def step(params, x):
        return torch.func.grad_and_value(lambda p: torch.func.functional_call(model, p, (x,)).pow(2).mean())(params)

    assert not calls(exact(model, step))


def test_parameters_tied_within_a_block():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)
            self.b = nn.Linear(4, 4)
            self.b.weight = self.a.weight

        def forward(self, x):
            return x + self.b(torch.tanh(self.a(x)))

    assert calls(exact(Stack(Tied() for _ in range(3))))


def test_layers_that_share_a_parameter():
    layers = [Layer() for _ in range(4)]
    for layer in layers[1:]:
        layer.linear.weight = layers[0].linear.weight
    assert calls(exact(Stack(layers)))


def test_the_same_layer_called_again():
    layer = Layer()
    exact(Stack([layer, layer, layer]))


def test_buffers_are_inputs_of_a_block():
    class Buffered(nn.Module):
        def __init__(self, k):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("scale", torch.full((4,), float(k)))

        def forward(self, x):
            return x + self.linear(x) * self.scale

    model = Stack(Buffered(k) for k in (1, 2, 3))
    assert len(calls(exact(model))) == 6


def test_buffers_that_are_written():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("seen", torch.zeros(4))

        def forward(self, x):
            self.seen.add_(x.detach().mean(0))
            return x + self.linear(x) * self.seen

    model = Stack(Counting() for _ in range(3))
    params, x = arguments(model)
    buffers = {name: b.clone() for name, b in model.named_buffers()}

    def step(params, buffers, x):
        mine = {name: b.clone() for name, b in buffers.items()}

        def loss(params):
            return torch.func.functional_call(model, {**params, **mine}, (x,)).pow(2).mean()

        return grad_and_value(loss)(params), mine

    same_on_mesh(step, params, buffers, x, mesh="dp=2", specs={"x": "(dp b) ..."})


def test_an_input_that_needs_no_gradient():
    model = Stack(Layer() for _ in range(3))

    def step(params, x):
        return grad_and_value(lambda p: torch.func.functional_call(model, p, (x,)).pow(2).mean())(params)

    assert len(calls(exact(model, step))) == 6


def test_frozen_parameters():
    model = Stack(Layer() for _ in range(3))

    def step(params, x):
        def loss(last):
            return torch.func.functional_call(model, {**params, **last}, (x,)).pow(2).mean()

        return grad_and_value(loss)({k: v for k, v in params.items() if ".2." in k})

    exact(model, step)


def test_layers_that_return_trees_and_skip_outputs():
    class Pair(Layer):
        def forward(self, x):
            y = super().forward(x)
            return {"y": y, "unused": y.sin(), "none": None}

    class Model(Stack):
        def forward(self, x):
            for layer in self.layers:
                x = layer(x)["y"]
            return x

    assert len(calls(exact(Model(Pair() for _ in range(3))))) == 6


def test_an_output_that_is_an_input():
    class Through(Layer):
        def forward(self, x):
            return super().forward(x), x

    class Model(Stack):
        def forward(self, x):
            for layer in self.layers:
                y, x = layer(x)
                x = x + y
            return x

    exact(Model(Through() for _ in range(3)))


def test_one_layer_is_no_repetition():
    assert not calls(exact(Stack([Layer()])))


@pytest.mark.parametrize("tied", [False, True])
def test_a_llama_is_exact_through_blocks(tied):
    from megalith.models.llama import Llama, LlamaConfig

    config = LlamaConfig(vocab=16, dim=16, hidden=24, n_layers=3, n_heads=4, n_kv_heads=2, tied=tied)
    model = Llama(config).double()
    ids = torch.randint(0, 16, (4, 6))

    def step(params, x):
        def loss(p):
            logits = torch.func.functional_call(model, p, (x,))
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), x.flatten())

        return grad_and_value(loss)(params)

    params = {name: p.detach() for name, p in model.named_parameters()}
    assert len(calls(exact(model, step, (params, ids)))) == 6
