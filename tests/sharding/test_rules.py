"""Every rule is exact: one op under random layouts and shapes gives what it gives on whole tensors.

A row says how the arguments of an op are drawn. A rule without a row fails `test_every_rule_has_a_row`.
"""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import megalith.core.experts
import megalith.core.ops  # noqa: F401  registers ops
from megalith.core.backends.lockstep import gather, scatter
from megalith.core.backends.virtual import run_virtual
from megalith.core.clean import clean
from megalith.core.lower import lower
from megalith.core.trace import trace
from megalith.sharding.aten.pointwise import POINTWISE
from megalith.sharding.graph import Ref, op_name
from megalith.sharding.layout import Digit, Dim, Layout
from megalith.sharding.mesh import Mesh
from megalith.sharding.partition import Input, partition
from megalith.sharding.rule import known_rules

aten = torch.ops.aten
MESHES = [Mesh("tp=2"), Mesh("tp=3"), Mesh("dp=2 tp=2"), Mesh("dp=3 tp=2")]

# --- layouts ------------------------------------------------------------------------------------------------


def cut(size, factors):
    """The dim of these factors, major to minor: `(axis or None, size, back and forth)`."""
    digits, extent = [], size
    for axis, n, turned in factors:
        extent = max(math.ceil(extent / n), 1)
        digits.append(Digit(axis, n, extent, turned))
    return Dim.of(size, tuple(digits))


@st.composite
def dims(draw, mesh, size, axes):
    """A dim held by these axes: in uneven cuts, behind local digits, back and forth, in segments."""

    def segment(n):
        factors = [(a, mesh.sizes[a], draw(st.integers(0, 5)) == 0) for a in axes]
        if draw(st.integers(0, 2)) == 0:
            factors.insert(draw(st.integers(0, len(factors))), (None, draw(st.integers(2, 3)), False))
        return cut(n, factors)

    if axes and size > 1 and draw(st.integers(0, 5)) == 0:
        middle = draw(st.integers(1, size - 1))
        return Dim.join([segment(middle), segment(size - middle)])
    return segment(size)


@st.composite
def layouts(draw, mesh, tensor):
    """A layout of a tensor: each axis holds a dim, terms, or replicas."""
    homes = {a: draw(st.sampled_from(["", "//", *range(tensor.ndim)])) for a in mesh.axes}
    order = draw(st.permutations(mesh.axes))
    held = [draw(dims(mesh, n, [a for a in order if homes[a] == d])) for d, n in enumerate(tensor.shape)]
    terms = [a for a in mesh.axes if homes[a] == "//"] if tensor.dtype == torch.float64 else []
    op = draw(st.sampled_from(["sum", "sum", "max"]))
    return Layout(mesh, tuple(held)).with_partial({a: op for a in terms})


def place(tensor, layout):
    """By rank the shards of a tensor; terms are random."""
    shards = scatter(tensor, layout.without_partial())
    if not layout.partial:
        return shards
    mesh, op = layout.mesh, layout.partial[0][1]
    for rank in range(mesh.size):
        peers = mesh.peers(rank, layout.partial_axes)
        if rank != peers[0]:
            continue
        holder = peers[torch.randint(len(peers), ()).item()]
        for peer in peers:
            if peer != holder:
                noise = torch.randint_like(shards[peer], -9, 9)  # whole numbers: sums of them are exact
                if op == "sum":
                    shards[holder] = shards[holder] - noise
                    shards[peer] = noise
                else:
                    shards[peer] = shards[peer] - noise.abs()
    return shards


# --- the check ----------------------------------------------------------------------------------------------


@dataclass
class Example:
    """A function and the tensors it is called with."""

    fn: object
    tensors: list


def check(data, name, example):
    """The op, traced alone, laid out for random layouts of its operands, agrees with itself."""
    mesh = data.draw(st.sampled_from(MESHES), label="mesh")
    given_layouts = [data.draw(layouts(mesh, t), label=f"layout of {tuple(t.shape)}") for t in example.tensors]
    parameters = [data.draw(st.booleans()) for _ in example.tensors]
    agree(name, example, mesh, given_layouts, parameters)


def agree(name, example, mesh, given_layouts, parameters):
    traced = trace(example.fn, tuple(example.tensors))
    graphs = traced.graph, clean(traced.graph)
    assert any(name == node.name for graph in graphs for node in graph.nodes), f"{name} is not among\n{traced.graph}"
    inputs = [Input(layout, is_parameter=p) for layout, p in zip(given_layouts, parameters, strict=True)]
    expected = example.fn(*(t.clone() for t in example.tensors))
    expected = [expected] if isinstance(expected, torch.Tensor) else [e for e in expected if e is not None]
    for graph in graphs:
        laid_out = partition(graph, mesh, inputs)
        programs = [lower(laid_out, rank) for rank in range(mesh.size)]
        shards = [place(t, layout) for t, layout in zip(example.tensors, given_layouts, strict=True)]
        results = run_virtual(programs, [[s[rank] for s in shards] for rank in range(mesh.size)])
        found = [i for i, output in enumerate(graph.outputs) if isinstance(output, Ref)]
        assert len(found) == len(expected)
        for i, whole in zip(found, expected, strict=True):
            layout = programs[0].output_layouts[i]
            for rank in range(mesh.size):
                assert tuple(results[rank][i].shape) == layout.local_shape(rank)
            mine = gather([results[rank][i] for rank in range(mesh.size)], layout)
            torch.testing.assert_close(mine, whole, rtol=1e-10, atol=1e-10, equal_nan=True)


# --- how arguments are drawn --------------------------------------------------------------------------------

ROWS = {}


def row(*names):
    """Registers how an example of these ops is drawn: `draw, op -> Example`."""

    def register(fn):
        for name in names:
            assert name not in ROWS, name
            ROWS[name] = fn
        return fn

    return register


def op_of(name):
    if name == "add_n":
        return None
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


SIZES = st.sampled_from([1, 2, 3, 4, 5, 6, 8])


def shape(draw, low=1, high=3):
    return draw(st.lists(SIZES, min_size=low, max_size=high))


def floats(*sizes):
    return torch.rand(sizes, dtype=torch.float64) * 0.8 + 0.1


def normal(*sizes):
    return torch.randn(sizes, dtype=torch.float64)


def distinct(*sizes):
    n = math.prod(sizes)
    return (torch.randperm(n).double() - n / 3).reshape(sizes)


def integers(*sizes, high=8):
    return torch.randint(0, high, tuple(sizes))


def broadcastable(draw, full):
    """The shape of an operand that is broadcast to `full`."""
    kept = full[draw(st.integers(0, len(full))) :]
    return [1 if draw(st.integers(0, 3)) == 0 else n for n in kept]


INTEGRAL = ("bitwise", "shift")
SPECIAL = {
    "aten._to_copy.default": lambda draw, op: Example(lambda x: op(x, dtype=torch.float32), [normal(*shape(draw))]),
    "aten.where.self": lambda draw, op: _where(draw, op),
    "aten.gelu_backward.default": lambda draw, op: _like(draw, lambda g, x: op(g, x, approximate="tanh"), 2),
    "aten.log_sigmoid_backward.default": lambda draw, op: _like(draw, op, 3),
    "aten.polar.default": lambda draw, op: _like(draw, op, 2),
    "aten.complex.default": lambda draw, op: _like(draw, op, 2),
    "aten.nan_to_num.default": lambda draw, op: _like(draw, op, 1),
    "aten.hardtanh_backward.default": lambda draw, op: _like(draw, lambda g, x: op(g, x, -1.0, 0.5), 2),
    "aten.leaky_relu_backward.default": lambda draw, op: _like(draw, lambda g, x: op(g, x, 0.1, False), 2),
    "aten.elu_backward.default": lambda draw, op: _like(draw, lambda g, x: op(g, 1.0, 1.0, 1.0, False, x), 2),
    "aten.div.Tensor_mode": lambda draw, op: _like(draw, lambda x, y: op(x, y, rounding_mode="floor"), 2),
    "aten.div.Scalar_mode": lambda draw, op: _like(draw, lambda x: op(x, 0.3, rounding_mode="floor"), 1),
    "aten.masked_fill.Scalar": lambda draw, op: _masked(draw, lambda x, m: op(x, m, 0.5), []),
    "aten.masked_fill.Tensor": lambda draw, op: _masked(draw, lambda x, m, v: op(x, m, v), [normal()]),
    "aten.clamp.default": lambda draw, op: _like(draw, lambda x: op(x, -0.5, 0.5), 1),
    "aten.clamp.Tensor": lambda draw, op: _like(draw, lambda x, lo: op(x, lo, None), 2),
}


def _like(draw, fn, n):
    full = shape(draw)
    return Example(fn, [normal(*full) for _ in range(n)])


def _where(draw, op):
    full = shape(draw)
    tensors = [normal(*broadcastable(draw, full)) > 0, normal(*full), normal(*broadcastable(draw, full))]
    return Example(op, tensors)


def _masked(draw, fn, more):
    full = shape(draw)
    return Example(fn, [normal(*full), normal(*broadcastable(draw, full)) > 0, *more])


@row(*(f"aten.{name}" if "." in name else f"aten.{name}.default" for name in POINTWISE))
def pointwise(draw, op):
    """By the schema: tensors that are broadcast, and numbers."""
    special = SPECIAL.get(op_name(op))
    if special is not None:
        return special(draw, op)
    full = shape(draw)
    whole_numbers = any(part in op_name(op) for part in INTEGRAL) or op_name(op).startswith("aten.logical")
    compares = op_name(op).split(".")[1] in ("eq", "ne", "lt", "le", "gt", "ge")
    tensors, numbers = [], []
    for argument in op._schema.arguments:
        kind = str(argument.type)
        if argument.kwarg_only or (argument.has_default_value() and kind != "Tensor"):
            break
        if kind == "Tensor":
            sizes = full if not tensors or "backward" in op_name(op) else broadcastable(draw, full)
            values = integers(*sizes) if whole_numbers else integers(*sizes).double() if compares else floats(*sizes)
            tensors.append(values)
            numbers.append(None)
        elif kind in ("number", "float", "Optional[number]", "Optional[float]"):
            numbers.append(2 if whole_numbers or compares else 0.3)
        elif kind == "bool":
            numbers.append(False)
        else:
            raise NotImplementedError(kind)

    def fn(*given):
        rest = iter(given)
        return op(*(next(rest) if number is None else number for number in numbers))

    return Example(fn, tensors)


@row("add_n")
def add_n(draw, _):
    full, n = shape(draw), draw(st.integers(3, 4))
    return Example(lambda *terms: sum(terms[1:], terms[0]), [normal(*full) for _ in range(n)])


@row("megalith.adamw.default")
def adamw(draw, op):
    full = shape(draw)
    state = [normal(*full), normal(*full), normal(*full), floats(*full)]

    def fn(p, g, m, v):
        step, lr = torch.full([], 3.0), torch.full([], 1e-2, dtype=torch.float64)
        return op(p, g, m, v, step, lr, 0.9, 0.95, 1e-8, 0.1)

    return Example(fn, state)


# --- products -----------------------------------------------------------------------------------------------


def sizes(draw, n):
    return [draw(SIZES) for _ in range(n)]


@row("aten.mm.default", "aten.bmm.default", "aten.mv.default", "aten.dot.default")
def products(draw, op):
    b, m, k, n = sizes(draw, 4)
    shapes = {"mm": [(m, k), (k, n)], "bmm": [(b, m, k), (b, k, n)], "mv": [(m, k), (k,)], "dot": [(k,), (k,)]}
    return Example(op, [normal(*s) for s in shapes[op_name(op).split(".")[1]]])


def _attention(draw):
    b, h, q, k, d = sizes(draw, 5)
    causal = draw(st.booleans())
    mask = None
    if not causal and draw(st.booleans()):
        full = [b, h, q, k]
        size = [1 if draw(st.booleans()) else n for n in full]
        mask = normal(*size) > 0 if draw(st.booleans()) else normal(*size)
        if mask.dtype == torch.bool:
            mask[..., 0] = True
    return [normal(b, h, q, d), normal(b, h, k, d), normal(b, h, k, d)], mask, causal


@row("megalith.sdpa.default")
def sdpa(draw, op):
    qkv, mask, causal = _attention(draw)
    if mask is None:
        return Example(lambda q, k, v: op(q, k, v, None, causal, 0.5), qkv)
    return Example(lambda q, k, v, m: op(q, k, v, m, causal, 0.5), [*qkv, mask])


@row("megalith.sdpa_backward.default")
def sdpa_backward(draw, op):
    (q, k, v), mask, causal = _attention(draw)
    out, lse = torch.ops.megalith.sdpa(q, k, v, mask, causal, 0.5)
    g = normal(*out.shape)
    if mask is None:
        return Example(lambda g, q, k, v, o, l: op(g, q, k, v, None, o, l, causal, 0.5), [g, q, k, v, out, lse])
    return Example(lambda g, q, k, v, m, o, l: op(g, q, k, v, m, o, l, causal, 0.5), [g, q, k, v, mask, out, lse])


def _experts(draw):
    """Rows, the experts that each goes to, two or three stacked matrices, and an activation."""
    r, k, e, d, f, o = (draw(SIZES) for _ in range(6))
    ins = [normal(e, f, d) for _ in range(draw(st.integers(1, 2)))]
    activation = draw(st.sampled_from(["silu", "gelu", "gelu_tanh", "relu"]))
    return normal(r, d), integers(r, k, high=e), ins, normal(e, o, f), activation


@row("megalith.experts.default")
def experts(draw, op):
    x, ids, ins, out, activation = _experts(draw)
    return Example(lambda x, ids, *w: op(x, ids, list(w[:-1]), w[-1], activation), [x, ids, *ins, out])


@row("megalith.experts_backward.default")
def experts_backward(draw, op):
    x, ids, ins, out, activation = _experts(draw)
    g = normal(*ids.shape, out.shape[1])
    return Example(lambda g, x, ids, *w: op(g, x, ids, list(w[:-1]), w[-1], activation), [g, x, ids, *ins, out])


def _convolution(draw):
    groups = draw(st.sampled_from([1, 1, 2]))
    b, c, o = draw(SIZES), groups * draw(st.integers(1, 3)), groups * draw(st.integers(1, 3))
    n = draw(st.integers(1, 2))
    transposed = draw(st.booleans())
    x = normal(b, c, *[draw(st.integers(3, 6)) for _ in range(n)])
    w = normal(c, o // groups, *[3] * n) if transposed else normal(o, c // groups, *[3] * n)
    return x, w, ([2] * n, [1] * n, [1] * n, transposed, [0] * n, groups), o


@row("aten.convolution.default")
def convolution(draw, op):
    x, w, rest, o = _convolution(draw)
    return Example(lambda x, w, b: op(x, w, b, *rest), [x, w, normal(o)])


@row("aten.convolution_backward.default")
def convolution_backward(draw, op):
    x, w, rest, o = _convolution(draw)
    g = normal(*aten.convolution(x, w, None, *rest).shape)
    mask = draw(st.sampled_from([[True, True, True], [False, True, True], [True, False, False]]))

    def fn(g, x, w):
        return [t for t in op(g, x, w, [o], *rest, mask) if t is not None]

    return Example(fn, [g, x, w])


@row("aten.max_pool2d_with_indices.default")
def max_pool(draw, op):
    return Example(lambda x: op(x, [2, 2]), [distinct(*sizes(draw, 2), 4, 4)])


@row("aten.max_pool2d_with_indices_backward.default")
def max_pool_backward(draw, op):
    x = distinct(*sizes(draw, 2), 4, 4)
    out, index = aten.max_pool2d_with_indices(x, [2, 2])
    return Example(lambda g, x, i: op(g, x, [2, 2], [2, 2], [0, 0], [1, 1], False, i), [normal(*out.shape), x, index])


@row("aten.avg_pool2d.default")
def avg_pool(draw, op):
    return Example(lambda x: op(x, [2, 2]), [normal(*sizes(draw, 2), 4, 4)])


@row("aten.avg_pool2d_backward.default")
def avg_pool_backward(draw, op):
    b, c = sizes(draw, 2)
    return Example(
        lambda g, x: op(g, x, [2, 2], [2, 2], [0, 0], False, True, None), [normal(b, c, 2, 2), normal(b, c, 4, 4)]
    )


@row("aten._adaptive_avg_pool2d.default")
def adaptive_pool(draw, op):
    return Example(lambda x: op(x, [3, 2]), [normal(*sizes(draw, 2), 5, 4)])


@row("aten._adaptive_avg_pool2d_backward.default")
def adaptive_pool_backward(draw, op):
    b, c = sizes(draw, 2)
    return Example(op, [normal(b, c, 3, 2), normal(b, c, 5, 4)])


# --- norms --------------------------------------------------------------------------------------------------


@row("aten.native_layer_norm.default")
def layer_norm(draw, op):
    full = shape(draw, 1, 4)
    inner = full[draw(st.integers(0, len(full) - 1)) :]
    return Example(lambda x, w, b: op(x, inner, w, b, 1e-5), [normal(*full), normal(*inner), normal(*inner)])


@row("aten.native_layer_norm_backward.default")
def layer_norm_backward(draw, op):
    full = shape(draw, 2, 4)
    inner = full[draw(st.integers(1, len(full) - 1)) :]
    x, w, b = normal(*full), normal(*inner), normal(*inner)
    _, mean, rstd = aten.native_layer_norm(x, inner, w, b, 1e-5)
    mask = draw(st.sampled_from([[True, True, True], [True, False, False], [True, True, False], [False, True, True]]))

    def fn(g, x, mean, rstd, w, b):
        return [t for t in op(g, x, inner, mean, rstd, w, b, mask) if t is not None]

    return Example(fn, [normal(*full), x, mean, rstd, w, b])


# --- reductions ---------------------------------------------------------------------------------------------


def some_dims(draw, rank, least=1):
    return draw(st.lists(st.integers(-rank, rank - 1), min_size=least, max_size=rank, unique_by=lambda d: d % rank))


def one_dim(draw, full):
    return draw(st.integers(-len(full), len(full) - 1))


@row("aten.sum.default", "aten.prod.default")
def reduce_all(draw, op):
    return Example(op, [normal(*shape(draw))])


@row("aten.sum.dim_IntList", "aten.amax.default", "aten.amin.default")
def reduce(draw, op):
    full = shape(draw)
    gone, keep = some_dims(draw, len(full), 0), draw(st.booleans())
    return Example(lambda x: op(x, gone, keep), [normal(*full)])


@row("aten.linalg_vector_norm.default")
def vector_norm(draw, op):
    full = shape(draw)
    gone, keep = some_dims(draw, len(full)), draw(st.booleans())
    return Example(lambda x: op(x, 3, gone, keep), [normal(*full)])


@row("aten._softmax.default", "aten._safe_softmax.default")
def softmax(draw, op):
    full = shape(draw)
    dim = one_dim(draw, full)
    rest = () if "safe" in op_name(op) else (False,)
    return Example(lambda x: op(x, dim, *rest), [normal(*full)])


@row("aten._softmax_backward_data.default")
def softmax_backward(draw, op):
    full = shape(draw)
    dim = one_dim(draw, full)
    return Example(lambda g, y: op(g, y, dim, torch.float64), [normal(*full), normal(*full).softmax(dim)])


@row("aten.cumsum.default", "aten.cumprod.default", "aten.logcumsumexp.default", "aten.prod.dim_int")
def along(draw, op):
    full = shape(draw)
    dim = one_dim(draw, full)
    return Example(lambda x: op(x, dim), [normal(*full)])


@row(
    "aten.sort.default", "aten.max.dim", "aten.min.dim", "aten.median.dim", "aten.argmax.default", "aten.argmin.default"
)
def ordered(draw, op):
    full = shape(draw)
    dim = one_dim(draw, full)
    return Example(lambda x: op(x, dim), [distinct(*full)])


@row("aten.sort.stable")
def sort_stable(draw, op):
    full = shape(draw)
    dim = one_dim(draw, full)
    return Example(lambda x: op(x, stable=True, dim=dim), [integers(*full)])


@row("aten.topk.default", "aten.kthvalue.default")
def chosen(draw, op):
    full = shape(draw)
    dim = one_dim(draw, full)
    k = draw(st.integers(1, full[dim]))
    return Example(lambda x: op(x, k, dim), [distinct(*full)])


@row("aten.flip.default")
def flip(draw, op):
    full = shape(draw)
    turned = some_dims(draw, len(full))
    return Example(lambda x: op(x, turned), [normal(*full)])


@row("aten.roll.default")
def roll(draw, op):
    full = shape(draw)
    turned = some_dims(draw, len(full), 0)
    return Example(lambda x: op(x, [1] * max(len(turned), 1), turned), [normal(*full)])


@row("aten.tril.default", "aten.triu.default")
def triangle(draw, op):
    diagonal = draw(st.integers(-2, 2))
    return Example(lambda x: op(x, diagonal), [normal(*shape(draw, 2, 3))])


# --- shapes -------------------------------------------------------------------------------------------------


@row("aten.permute.default")
def permute(draw, op):
    full = shape(draw, 2, 4)
    order = draw(st.permutations(range(len(full))).filter(lambda order: order != list(range(len(full)))))
    return Example(lambda x: op(x, order), [normal(*full)])


@row("aten.expand.default")
def expand(draw, op):
    full = [2, *shape(draw)]
    old = broadcastable(draw, full[1:])
    return Example(lambda x: op(x, full), [normal(*old)])


@row("aten.slice.Tensor")
def slices(draw, op):
    full = shape(draw)
    dim = one_dim(draw, full)
    n = full[dim]
    full[dim] = n = max(n, 2)
    start = draw(st.integers(-n, n - 1))
    stop = draw(st.integers(-n, n + 2).filter(lambda stop: (start % n, stop) not in [(0, s) for s in range(n, n + 3)]))
    step = draw(st.sampled_from([1, 1, 1, 2]))
    return Example(lambda x: op(x, dim, start, stop, step), [normal(*full)])


@row("aten.slice_backward.default")
def slices_backward(draw, op):
    full = shape(draw)
    dim = draw(st.integers(0, len(full) - 1))
    k = draw(st.integers(1, 3))
    n = full[dim] * k
    start = draw(st.sampled_from([full[dim] * i for i in range(k)] + [0]))
    length = draw(st.sampled_from([full[dim], max(n - start - 1, 1)]))
    whole = [*full[:dim], n, *full[dim + 1 :]]
    full[dim] = length
    return Example(lambda g: op(g, whole, dim, start, start + length, 1), [normal(*full)])


@row("aten.cat.default")
def cat(draw, op):
    full = shape(draw)
    dim = one_dim(draw, full)
    alike = draw(st.booleans())
    pieces = []
    for _ in range(draw(st.integers(2, 3))):
        mine = list(full)
        if not alike:
            mine[dim] = draw(SIZES)
        pieces.append(normal(*mine))
    return Example(lambda *xs: op(list(xs), dim), pieces)


@row("aten.constant_pad_nd.default")
def padding(draw, op):
    full, value = shape(draw), draw(st.sampled_from([0.0, 1.5]))
    pads = [draw(st.integers(0, 2)) for _ in range(2 * draw(st.integers(1, len(full))))]
    return Example(lambda x: op(x, pads, value), [normal(*full)])


@row("aten.diagonal.default")
def diagonal(draw, op):
    full = shape(draw, 2, 3)
    pair = draw(st.permutations(range(len(full))))[:2] if draw(st.booleans()) else []
    offset = draw(st.integers(-1, 1)) if min(full) > 1 else 0
    args = [offset, *pair] if pair else [offset]
    return Example(lambda x: op(x, *args), [normal(*full)])


@row("aten.view_as_real.default")
def view_as_real(draw, op):
    return _like(draw, lambda a, b: op(torch.complex(a, b)), 2)


@row("aten.view_as_complex.default")
def view_as_complex(draw, op):
    return Example(lambda x: op(x.clone(memory_format=torch.contiguous_format)), [normal(*shape(draw), 2)])


@row("aten.full.default", "aten.arange.start_step")
def factories(draw, op):
    n, m = sizes(draw, 2)
    if "full" in op_name(op):
        return Example(lambda x: x + op([n, m], 0.5, dtype=torch.float64), [normal(n, m)])
    return Example(lambda x: x + op(1, n + 1, 1, dtype=torch.float64), [normal(m, n)])


# --- look-ups ----------------------------------------------------------------------------------------


@row("aten.embedding.default")
def embedding(draw, op):
    v, e = sizes(draw, 2)
    return Example(op, [normal(v, e), integers(*shape(draw, 1, 2), high=v)])


@row("aten.embedding_dense_backward.default")
def embedding_backward(draw, op):
    v, e = sizes(draw, 2)
    ids = integers(*shape(draw, 1, 2), high=v)
    padding_idx = draw(st.integers(-1, v - 1))
    scaled = draw(st.booleans())
    return Example(lambda g, i: op(g, i, v, padding_idx, scaled), [normal(*ids.shape, e), ids])


def _gathered(draw):
    full = shape(draw)
    dim = one_dim(draw, full)
    at = [n if draw(st.booleans()) else draw(st.integers(1, n)) for n in full]
    at[dim] = draw(SIZES)
    return normal(*full), dim, integers(*at, high=full[dim])


@row("aten.gather.default")
def gathers(draw, op):
    x, dim, index = _gathered(draw)
    x = x if draw(st.booleans()) else x > 0
    return Example(lambda x, i: op(x, dim, i), [x, index])


@row("aten.scatter_add.default")
def scatter_add(draw, op):
    x, dim, index = _gathered(draw)
    more = [n + draw(st.integers(0, 1)) for n in index.shape]
    return Example(lambda x, i, s: op(x, dim, i, s), [x, index, normal(*more)])


@row("aten.scatter.src", "aten.scatter.value")
def overwrites(draw, op):
    full = shape(draw)
    dim = draw(st.integers(0, len(full) - 1))
    at = [n if draw(st.booleans()) else draw(st.integers(1, n)) for n in full]
    index = normal(*[full[d] if d == dim else n for d, n in enumerate(at)]).argsort(dim)  # none twice
    index = index.narrow(dim, 0, at[dim]).contiguous()
    if "value" in op_name(op):
        return Example(lambda x, i: op(x, dim, i, 0.5), [normal(*full), index])
    more = [n + draw(st.integers(0, 1)) for n in at]
    return Example(lambda x, i, s: op(x, dim, i, s), [normal(*full), index, normal(*more)])


@row("aten.index_select.default")
def index_select(draw, op):
    full = shape(draw)
    dim = one_dim(draw, full)
    return Example(lambda x, i: op(x, dim, i), [normal(*full), integers(draw(SIZES), high=full[dim])])


def _indexed(draw, unique=False):
    """A tensor's shape, its indices (None where a dim is whole), and the shape of what they pick."""
    full = shape(draw, 1, 4)
    chosen = sorted(draw(st.sets(st.integers(0, len(full) - 1), min_size=1, max_size=2)))
    broadcast = shape(draw, 1, 2)
    indices = []
    for d in range(chosen[-1] + 1):
        if d in chosen:
            size = broadcast if d == chosen[0] else broadcastable(draw, broadcast)
            indices.append(integers(*size, high=full[d]) - (full[d] if draw(st.booleans()) else 0))
        else:
            indices.append(None)
    return full, indices


def _filled(indices, given):
    rest = iter(given)
    return [None if index is None else next(rest) for index in indices]


@row("aten.index.Tensor")
def index(draw, op):
    full, indices = _indexed(draw)
    x = normal(*full) if draw(st.booleans()) else integers(*full)
    return Example(lambda x, *given: op(x, _filled(indices, given)), [x, *(i for i in indices if i is not None)])


@row("megalith.index_sum.default")
def index_sum(draw, op):
    full, indices = _indexed(draw)
    picked = aten.index(normal(*full), indices)
    given = [i for i in indices if i is not None]
    if draw(st.booleans()):
        return Example(
            lambda x, values, *given: aten.index_put(x, _filled(indices, given), values, True),
            [normal(*full), normal(*picked.shape), *given],
        )
    return Example(lambda values, *given: op(values, _filled(indices, given), full), [normal(*picked.shape), *given])


@row("aten.index_put.default")
def index_put(draw, op):
    full = shape(draw, 1, 3)
    dim = draw(st.integers(0, len(full) - 1))
    n = draw(st.integers(1, full[dim]))
    picked = [*full[:dim], n, *full[dim + 1 :]]
    values = normal(*broadcastable(draw, picked))
    return Example(lambda x, i, v: op(x, [*[None] * dim, i], v), [normal(*full), torch.randperm(full[dim])[:n], values])


# --- the tests ----------------------------------------------------------------------------------------------


def test_every_rule_has_a_row():
    assert sorted(set(known_rules()) - set(ROWS)) == []


@pytest.mark.parametrize("name", sorted(known_rules()))
@given(data=st.data())
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_rule_is_exact(name, data):
    torch.manual_seed(data.draw(st.integers(0, 99)))
    check(data, name, ROWS[name](data.draw, op_of(name)))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(known_rules()))
@given(data=st.data())
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_rule_is_exact_at_length(name, data):
    torch.manual_seed(data.draw(st.integers(0, 999)))
    check(data, name, ROWS[name](data.draw, op_of(name)))
