"""A cleaned graph computes the same with fewer nodes."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import close, randn

from megalith.core.clean import clean, tidy
from megalith.core.interpret import run_graph
from megalith.core.trace import trace
from megalith.sharding import markers

UNARY = [
    lambda x: x + x,
    lambda x: x.sin(),
    lambda x: x * 2,
    lambda x: x.t(),
    lambda x: x.reshape(-1).reshape(x.shape),
    lambda x: x.t().reshape(x.shape),
    lambda x: x.unsqueeze(0).expand(2, *x.shape)[0],
    lambda x: x.permute(1, 0).permute(1, 0),
    lambda x: x[:2].repeat(2, 1),
    lambda x: x.clone(),
]
BINARY = [lambda x, y: x + y, lambda x, y: x * y, lambda x, y: y + x.t(), lambda x, y: x @ y]

steps = st.lists(
    st.tuples(st.integers(0, len(UNARY) + len(BINARY) - 1), st.integers(0, 99), st.integers(0, 99)),
    min_size=1,
    max_size=15,
)


def program(plan, n_outputs):
    """A function of two 4 x 4 matrices: each step applies an op to values made before."""

    def fn(x, y):
        values = [x, y]
        for op, a, b in plan:
            if op < len(UNARY):
                values.append(UNARY[op](values[a % len(values)]))
            else:
                values.append(BINARY[op - len(UNARY)](values[a % len(values)], values[b % len(values)]))
        return values[-n_outputs:]

    return fn


def ops(graph):
    return [node.name.removeprefix("aten.").split(".")[0] for node in graph.nodes]


def cleaned(fn, *args):
    """The cleaned graph of a function, which computes what the function does."""
    graph = trace(fn, args).graph
    small = clean(graph)
    close(run_graph(small, args), torch.utils._pytree.tree_leaves(fn(*args)))
    return small


@settings(max_examples=60, deadline=None)
@given(steps, st.integers(1, 3))
def test_it_computes_the_same_and_is_not_larger(plan, n_outputs):
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.rand(4, 4, generator=generator, dtype=torch.float64) for _ in "xy")
    graph = trace(program(plan, n_outputs), (x, y)).graph
    small = clean(graph)
    wanted = run_graph(graph, (x, y))
    for got, want in zip(run_graph(small, (x, y)), wanted, strict=True):
        close(got, want)
    assert len(small.nodes) <= len(graph.nodes)
    assert str(clean(small)) == str(small)


def test_equal_nodes_are_one():
    assert ops(cleaned(lambda x: x.sin() * x.sin() + x.sin(), randn(3))) == ["sin", "mul", "add"]


def test_numbers_of_different_types_are_not_equal():
    def fn(x):
        return torch.full_like(x, 1.0), torch.full_like(x, 1, dtype=torch.int64), torch.full_like(x, True)

    kinds = [node.kwargs.get("dtype") for node in cleaned(fn, randn(3)).nodes if "full" in node.name]
    assert torch.int64 in kinds


def test_a_forward_node_is_not_merged_with_a_backward_one():
    """What the backward computes again is not to be kept from the forward."""
    from torch.utils.checkpoint import checkpoint

    from megalith.core import grad_and_value

    def step(x):
        return grad_and_value(lambda x: checkpoint(lambda x: x.sin().exp(), x, use_reentrant=False).sum())(x)

    graph = clean(trace(step, (randn(3),)).graph)
    assert [node.origin.phase for node in graph.nodes if node.name == "aten.exp.default"] == ["forward", "backward"]


def test_views_of_views_are_one_view():
    assert ops(cleaned(lambda x: x.reshape(6, 4).reshape(2, 12).reshape(3, 8), randn(4, 6))) == ["reshape"]
    assert ops(cleaned(lambda x: x.permute(1, 2, 0).permute(2, 0, 1), randn(2, 3, 4))) == []
    assert ops(cleaned(lambda x: x.t().t().reshape(4, 6), randn(4, 6))) == []


def test_what_no_output_needs_is_dropped():
    def fn(x):
        x.exp().sum()
        return x.sin()

    assert ops(cleaned(fn, randn(3))) == ["sin"]


def test_sums_of_sums_are_one_sum():
    def fn(a, b, c, d):
        return ((a + b) + c) + d

    graph = cleaned(fn, *(randn(3) for _ in range(4)))
    assert [node.op for node in graph.nodes] == [markers.add_n]
    assert len(graph.nodes[0].operands) == 4


def test_a_sum_that_is_used_twice_stays_a_sum():
    def fn(a, b, c):
        s = a + b
        return s + c, s

    assert ops(cleaned(fn, randn(3), randn(3), randn(3))) == ["add", "add"]


def test_a_sum_that_broadcasts_or_converts_is_no_term():
    wide = cleaned(lambda a, b, c: (a + b) + c, randn(3), randn(3), randn(2, 3))
    assert ops(wide) == ["add", "add"]
    mixed = cleaned(lambda a, b, c: (a + b) + c, randn(3).float(), randn(3).float(), randn(3))
    assert markers.add_n not in [node.op for node in mixed.nodes]


def test_tidy_leaves_sums_as_they_are():
    graph = tidy(trace(lambda a: ((a + 1 * a) + a.sin()) + a, (randn(3),)).graph)
    assert markers.add_n not in [node.op for node in graph.nodes]


def test_unused_constants_are_dropped():
    table = randn(3)

    def fn(x):
        x * table
        return x + 1

    assert not cleaned(fn, randn(3)).constants
