"""How does code run on local shards, where no rule or layout says what it does? `local_map(fn, in_layouts, out_layouts)`.

A call is one opaque node of the graph. Its function is traced, forward and backward, on shards rather than on whole tensors;
what the backward needs of the forward stays on its rank.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from megalith.core import _compat
from megalith.core._compat import pytree
from megalith.core.blocks import split_joint
from megalith.core.clean import tidy
from megalith.core.trace import (
    CapturedTensor,
    Frame,
    MutationFound,
    TraceError,
    Tracer,
    current_tracer,
    source_line,
)
from megalith.sharding import markers
from megalith.sharding.graph import Graph, Local, Node, Ref, TensorType, map_refs, refs
from megalith.sharding.layout import Digit, Dim, Layout
from megalith.sharding.mesh import Mesh
from megalith.sharding.syntax import LayoutError, parse_spec

__all__ = ["local_map"]

aten = torch.ops.aten
Patterns = str | Sequence[str | None] | None


def local_map(fn: Callable[..., Any], in_layouts: Patterns, out_layouts: Patterns) -> Callable[..., Any]:
    """`fn` on the shards of each rank: for code that no rule covers, or that is faster by hand.

    Within `shard`, operands are brought to `in_layouts`, `fn` runs on each rank's tensors without any communication, and
    its results are taken to be in `out_layouts`, which may be partial: `"b e // tp"` is a sum over `tp` still to be
    made. Elsewhere it is `fn` itself, so write `fn` such that it is right on whole tensors too. It may be
    differentiated once in reverse. The gradient of an operand has the operand's layout, summed over the axes that the
    results have and the operand has not.

    Args:
        fn: a function of pytrees of tensors; other arguments are constants.
        in_layouts: a pattern for each tensor among the arguments, in order; None for a replicated one.
        out_layouts: a pattern for each tensor that `fn` returns.

    Returns:
        a function with the signature of `fn`.

    Raises:
        TraceError: when it is called within `shard`: a function that cannot be traced, layouts that cannot be.
        LayoutError: a pattern that does not fit, or cuts shards of different shapes.

    >>> row_parallel = local_map(lambda x, w: x @ w.T, ["b (tp i)", "o (tp i)"], "b o // tp")
    >>> row_parallel(torch.ones(2, 4), torch.ones(3, 4))
    tensor([[4., 4., 4.],
            [4., 4., 4.]])
    """
    ins, outs = _tuple(in_layouts), _tuple(out_layouts)

    @functools.wraps(fn)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        tracer = current_tracer()
        if tracer is None or tracer.mesh is None:
            return fn(*args, **kwargs)
        return _call(tracer, fn, ins, outs, args, kwargs)

    return mapped


def _tuple(patterns: Patterns) -> tuple[str | None, ...]:
    return (patterns,) if patterns is None or isinstance(patterns, str) else tuple(patterns)


@dataclass
class _LocalCall:
    """One call: what was given, and after tracing the two ops that it becomes.

    `wanted` are the operands to differentiate, `pulled` the results that they reach, `read` the operands that the
    backward reads, after what is saved and before the cotangents.
    """

    fn: Callable[..., Any]
    name: str
    out_patterns: tuple[str | None, ...]
    leaves: list[Any]  # of the arguments; None in the place of tensors
    spec: Any
    names: tuple[str, ...]
    operands: tuple[Layout, ...]
    wanted: tuple[int, ...]
    outs: list[Any] = field(default_factory=list)  # leaves of the output; None in the place of tensors
    out_spec: Any = None
    results: tuple[Layout, ...] = ()
    pulled: tuple[int, ...] = ()
    read: tuple[int, ...] = ()
    forward: Local | None = None
    backward: Local | None = None


def _call(tracer: Tracer, fn: Any, ins: Any, outs: Any, args: Any, kwargs: Any) -> Any:
    leaves, spec = pytree.tree_flatten((args, kwargs))
    where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    tensors = [leaves[i] for i in where]
    name = f"local_map({getattr(fn, '__name__', type(fn).__name__)})"
    if tracer.inside_local_map:
        raise TraceError(f"{name} at {source_line()} is called on shards already: call the function itself")
    if len(tensors) != len(ins) or not tensors:
        raise TraceError(
            f"{name} at {source_line()} is given {len(tensors)} tensors and has {len(ins)} in_layouts; "
            "write one for each tensor, None for a replicated one"
        )
    names = _names(fn, args, kwargs, where)
    operands = tuple(
        _operand(pattern, tensor, tracer, f"{operand} of {name}")
        for pattern, tensor, operand in zip(ins, tensors, names, strict=True)
    )
    for i in where:
        leaves[i] = None
    wanted = [i for i, t in enumerate(tensors) if t.requires_grad and torch.is_grad_enabled()]
    call = _LocalCall(fn, name, outs, [*leaves], spec, names, operands, tuple(wanted))
    made = iter(_Forward.apply(tracer, call, tuple(where), *tensors))
    return pytree.tree_unflatten([next(made) if leaf is None else leaf.value for leaf in call.outs], call.out_spec)


@dataclass(frozen=True)
class _Constant:
    value: Any


def _names(fn: Any, args: Any, kwargs: Any, where: list[int]) -> tuple[str, ...]:
    """What the function itself calls its tensors."""
    try:
        parameters = list(inspect.signature(fn).parameters)
    except (TypeError, ValueError):
        parameters = []
    labels = [parameters[i] if i < len(parameters) else f"argument {i}" for i in range(len(args))]
    found = []
    for label, value in [*zip(labels, args, strict=True), *kwargs.items()]:
        paths = pytree.tree_flatten_with_path(value)[0]
        found += [".".join(p for p in (label, _compat.key_path(path)) if p) for path, _ in paths]
    return tuple(found[i] for i in where)


# --- layouts ------------------------------------------------------------------------------------------


def _operand(pattern: str | None, tensor: torch.Tensor, tracer: Tracer, name: str) -> Layout:
    layout = _parse(pattern, tuple(tensor.shape), tracer, name)
    if layout.partial:
        raise TraceError(f"{name}: {pattern!r} is partial, but an operand is read as it is; write it without '//'")
    _check_equal(layout, name, pattern)
    return layout


def _result(pattern: str | None, shape: tuple[int, ...], tracer: Tracer, name: str) -> Layout:
    """The layout of a result of which each rank makes a shard of this shape."""
    mesh = tracer.mesh
    assert mesh is not None
    if pattern is None:
        return _parse(None, shape, tracer, name)
    dims = list(parse_spec(pattern).stored.dims)
    for i, dim in enumerate(dims):
        if dim.is_ellipsis:
            dims[i : i + 1] = [dim] * max(0, len(shape) - len(dims) + 1)
            break
    whole = tuple(n * (_ranks(dims[i], mesh) if i < len(dims) else 1) for i, n in enumerate(shape))
    layout = _parse(pattern, whole, tracer, name)
    if any(layout.local_shape(rank) != shape for rank in range(mesh.size)):
        raise TraceError(
            f"{name} has shape {shape} on each rank, which is no shard of {pattern!r} on Mesh({mesh.pattern!r}); "
            "write a layout that cuts every segment into equal shards"
        )
    return layout


def _ranks(dim: Any, mesh: Mesh) -> int:
    """Among how many ranks a dim is divided."""
    axes = [f.text for f in dim.words[0].factors if f.text in mesh] if dim.words else []
    return math.prod(mesh.axis_size(axis) for axis in axes)


def _parse(pattern: str | None, shape: tuple[int, ...], tracer: Tracer, name: str) -> Layout:
    assert tracer.mesh is not None
    return Layout.parse("..." if pattern is None else pattern, shape, tracer.mesh, tracer.sizes, name)


def _check_equal(layout: Layout, name: str, pattern: str | None) -> None:
    shapes = [layout.local_shape(rank) for rank in range(layout.mesh.size)]
    uneven = [d for d in range(len(layout.dims)) if len({shape[d] for shape in shapes}) > 1]
    if uneven:
        d, axes = uneven[0], layout.dims[uneven[0]].axes
        ranks = math.prod(layout.mesh.sizes[a] for a in axes)
        raise LayoutError(
            f"local_map needs shards of one shape, but dim {d} of size {layout.shape[d]} has "
            f"{sorted({shape[d] for shape in shapes})} on different ranks",
            pattern or "",
            (0, len(pattern or "")),
            f"give it a size that {ranks} divides, pad it, or write it without {' '.join(axes)} in in_layouts",
            name,
            layout.shape,
            layout.mesh.pattern,
        )


def _axes(layout: Layout) -> set[str]:
    """The axes along which ranks hold different numbers."""
    return {*layout.axes, *layout.partial_axes}


def _own(shape: tuple[int, ...], mesh: Mesh) -> Layout:
    """The layout of a value that every rank has for itself: a dim over all ranks, then its own."""
    digits, stride = [], mesh.size
    for axis, size in mesh.sizes.items():
        stride //= size
        digits.append(Digit(axis, size, stride))
    return Layout(mesh, (Dim.of(mesh.size, tuple(digits)), *(Dim.of(n) for n in shape)))


# --- tracing ------------------------------------------------------------------------------------------


def _trace(tracer: Tracer, call: _LocalCall, where: tuple[int, ...], tensors: Sequence[torch.Tensor]) -> None:
    """Traces the function on shards, and makes its two ops."""
    try:
        joint, inputs, cotangents, n_results = _joint(tracer, call, call.fn, where, tensors)
    except MutationFound:
        try:
            functional = torch.func.functionalize(call.fn)
            joint, inputs, cotangents, n_results = _joint(tracer, call, functional, where, tensors)
        except MutationFound:
            raise TraceError(f"{call.name} writes into its arguments; return the new values instead") from None
    joint = tidy(_without_markers(joint, call))
    shapes = [joint.types[r.id].shape for r in joint.outputs[:n_results]]
    call.results = tuple(
        _result(pattern, shape, tracer, f"result {i} of {call.name}")
        for i, (pattern, shape) in enumerate(zip(call.out_patterns, shapes, strict=True))
    )
    _check_results(joint, call, inputs, n_results)
    _make_ops(tracer, call, joint, inputs, cotangents, n_results)


def _joint(
    tracer: Tracer, call: _LocalCall, fn: Any, where: tuple[int, ...], tensors: Sequence[torch.Tensor]
) -> tuple[Graph, list[int], list[int], int]:
    """The function forward and backward as one graph: its inputs, the cotangents, and how many results come first."""
    depth, raw = tracer.backward_depth, tracer.raw
    tracer.frames.append(Frame())
    tracer.backward_depth, tracer.raw, tracer.inside_local_map = 0, False, True
    try:
        mine = []
        for i, (tensor, layout) in enumerate(zip(tensors, call.operands, strict=True)):
            with tracer.pause(), tracer.fake_mode:
                shard = torch.empty(layout.local_shape(0), dtype=tensor.dtype, device=tensor.device)
            mine.append(shard.requires_grad_(i in call.wanted))
        inputs = [tracer.new_value(shard) for shard in mine]
        leaves = list(call.leaves)
        for i, shard in zip(where, mine, strict=True):
            leaves[i] = shard
        args, kwargs = pytree.tree_unflatten(leaves, call.spec)
        with torch.enable_grad():
            out = fn(*args, **kwargs)
        outs, call.out_spec = pytree.tree_flatten(out)
        results = [o for o in outs if isinstance(o, torch.Tensor)]
        if len(results) != len(call.out_patterns):
            raise TraceError(
                f"{call.name} at {source_line()} returns {len(results)} tensors and has {len(call.out_patterns)} "
                "out_layouts; write one for each tensor"
            )
        call.outs = [None if isinstance(o, torch.Tensor) else _Constant(o) for o in outs]
        values = [Ref(tracer.value_of(o)) for o in results]
        n_forward = len(tracer.frame.nodes)
        call.pulled = tuple(i for i, o in enumerate(results) if o.requires_grad)
        cotangents: list[int] = []
        grads: list[Any] = []
        if call.wanted and call.pulled:
            duals = [tracer.fake(results[i]) for i in call.pulled]
            cotangents = [tracer.new_value(dual) for dual in duals]
            found = torch.autograd.grad(
                [results[i] for i in call.pulled], [mine[i] for i in call.wanted], duals, allow_unused=True
            )
            grads = [None if g is None else Ref(tracer.value_of(g)) for g in found]
        frame = tracer.frame
    except CapturedTensor:
        raise TraceError(
            f"{call.name} at {source_line()} reads a tensor that is not one of its arguments; pass it in as one, "
            "with a layout"
        ) from None
    finally:
        tracer.frames.pop()
        tracer.backward_depth, tracer.raw, tracer.inside_local_map = depth, raw, False
    nodes = tuple(
        replace(node, origin=replace(node.origin, phase="forward" if i < n_forward else "backward"))
        for i, node in enumerate(frame.nodes)
    )
    fed = (*inputs, *cotangents)
    joint = Graph(fed, tuple(map(str, fed)), nodes, (*values, *grads), frame.types, frame.constants)
    return joint, inputs, cotangents, len(values)


def _without_markers(graph: Graph, call: _LocalCall) -> Graph:
    """The graph without the identities that say how a whole tensor lies: there is none."""
    renamed: dict[int, Ref] = {}
    kept = []
    for node in graph.nodes:
        node = replace(node, args=map_refs(node.args, lambda r: renamed.get(r.id, r)))
        if node.op is markers.constrain:
            raise TraceError(f"{call.name} calls constrain(x, {node.args[1]!r}) at {node.origin.source}: remove it")
        if node.op is markers.like:
            renamed[node.outputs[0]] = node.args[0]
        else:
            kept.append(node)
    outputs = tuple(map_refs(graph.outputs, lambda r: renamed.get(r.id, r)))
    return replace(graph, nodes=tuple(kept), outputs=outputs)


def _check_results(joint: Graph, call: _LocalCall, inputs: list[int], n_results: int) -> None:
    """What depends on an operand that differs along an axis differs along that axis."""
    varies: dict[int, set[str]] = {v: _axes(layout) for v, layout in zip(inputs, call.operands, strict=True)}
    for node in joint.nodes:
        found = set().union(*(varies.get(r.id, set()) for r in node.operands))
        varies.update(dict.fromkeys(node.outputs, found))
    for i, (ref, layout) in enumerate(zip(joint.outputs[:n_results], call.results, strict=True)):
        missing = sorted(varies.get(ref.id, set()) - _axes(layout))
        if missing:
            axes = " ".join(missing)
            raise TraceError(
                f"result {i} of {call.name} has layout {str(layout)!r}, but it is computed from shards along {axes}, so "
                f"ranks along {axes} have different values; shard a dim of it by {axes}, or mark it as a sum still to "
                f"be made: '{layout} // {axes}'"
            )
        if i in call.pulled and call.wanted and any(op != "sum" for _, op in layout.partial):
            raise TraceError(
                f"result {i} of {call.name} is a partial {layout.partial[0][1]}, which has no gradient here; "
                "detach its operands, or return a sum"
            )


def _make_ops(
    tracer: Tracer, call: _LocalCall, joint: Graph, inputs: list[int], cotangents: list[int], n_results: int
) -> None:
    mesh = tracer.mesh
    assert mesh is not None
    known = [*inputs, *joint.constants]
    first, second, saved, read = split_joint(joint, call.name, known, cotangents, n_results)
    own = [_own(joint.types[v].shape, mesh) for v in saved]
    forward = _bind_constants(first.graph, joint)
    forward = _pack_saved(forward, n_results)
    call.forward = Local(call.name, _numbered(forward), call.operands, (*call.results, *own))
    if second is None:
        return
    call.read = tuple(i for i in read if i < len(inputs))
    used = set().union(*(_axes(call.results[i]) for i in call.pulled))
    duals = []
    for i in call.pulled:
        layout = call.results[i].without_partial()
        # a result that is the same along an axis is counted once: by one rank
        duals.append(layout.with_partial(dict.fromkeys(used - _axes(call.results[i]), "sum")))
    grads = []
    for i, ref in zip(call.wanted, joint.outputs[n_results:], strict=True):
        if isinstance(ref, Ref):
            layout = call.operands[i]
            grads.append(layout.with_partial(dict.fromkeys(used - _axes(layout), "sum")))
    backward = _unpack_saved(_bind_constants(second.graph, joint), len(saved))
    present = tuple(ref for ref in backward.outputs if isinstance(ref, Ref))
    call.wanted = tuple(
        i for i, ref in zip(call.wanted, joint.outputs[n_results:], strict=True) if isinstance(ref, Ref)
    )
    layouts = (*own, *(call.operands[i] for i in call.read), *duals)
    backward = _numbered(replace(backward, outputs=present))
    call.backward = Local(f"{call.name} backward", backward, layouts, tuple(grads))


def _bind_constants(graph: Graph, joint: Graph) -> Graph:
    """The graph with the constants among its inputs bound."""
    inputs = tuple(v for v in graph.inputs if v not in joint.constants)
    read = {r.id for node in graph.nodes for r in node.operands} | {r.id for r in refs(graph.outputs)}
    constants = {v: t for v, t in joint.constants.items() if v in read}
    return replace(graph, inputs=inputs, names=tuple(map(str, inputs)), constants=constants)


def _pack_saved(graph: Graph, n_results: int) -> Graph:
    """Gives what is saved a first dim of size one, in which ranks lie side by side."""
    types = dict(graph.types)
    nodes, outputs = list(graph.nodes), list(graph.outputs)
    for k in range(n_results, len(outputs)):
        ref, kind = outputs[k], types[outputs[k].id]
        outputs[k] = Ref(_view(nodes, types, ref.id, (1, *kind.shape), "forward"))
    return replace(graph, nodes=tuple(nodes), outputs=tuple(outputs), types=types)


def _unpack_saved(graph: Graph, n_saved: int) -> Graph:
    types = dict(graph.types)
    inputs, nodes = list(graph.inputs), []
    for k in range(n_saved):
        value, kind = inputs[k], types[inputs[k]]
        inputs[k] = max(types) + 1
        types[inputs[k]] = TensorType((1, *kind.shape), kind.dtype)
        _view(nodes, types, inputs[k], kind.shape, "backward", value)
    return replace(graph, inputs=tuple(inputs), nodes=(*nodes, *graph.nodes), types=types)


def _view(nodes: list[Node], types: dict[int, TensorType], x: int, shape: Any, phase: str, out: int = -1) -> int:
    out = max(types) + 1 if out < 0 else out
    types[out] = TensorType(tuple(shape), types[x].dtype)
    nodes.append(Node(aten.reshape.default, (Ref(x), list(shape)), {}, (out,)))
    return out


def _numbered(graph: Graph) -> Graph:
    """The graph with its values counted from zero, so that equal programs are equal texts."""
    number: dict[int, int] = {}

    def n(value: int) -> int:
        return value if value < 0 else number.setdefault(value, len(number))

    def new(ref: Ref) -> Ref:
        return Ref(n(ref.id))

    inputs = tuple(n(v) for v in graph.inputs)
    constants = {n(v): tensor for v, tensor in graph.constants.items()}
    nodes = tuple(
        replace(
            node,
            args=map_refs(node.args, new),
            kwargs=map_refs(node.kwargs, new),
            outputs=tuple(n(o) for o in node.outputs),
        )
        for node in graph.nodes
    )
    outputs = tuple(map_refs(graph.outputs, new))
    types = {number[v]: graph.types[v] for v in number}
    return Graph(inputs, tuple(map(str, inputs)), nodes, outputs, types, constants)


# --- calling ------------------------------------------------------------------------------------------


def _types(layouts: Sequence[Layout], graph: Graph) -> list[TensorType]:
    return [
        TensorType(layout.shape, graph.types[ref.id].dtype) for layout, ref in zip(layouts, graph.outputs, strict=True)
    ]


class _Forward(torch.autograd.Function):
    """One call: a node forward, and in the backward another. Returns the results and what is saved."""

    @staticmethod
    def forward(tracer: Tracer, call: _LocalCall, where: tuple[int, ...], *tensors: torch.Tensor) -> Any:
        _trace(tracer, call, where, tensors)
        assert call.forward is not None
        return tracer.call(call.forward, tensors, _types(call.forward.outputs, call.forward.graph))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        tracer, call, _, *tensors = inputs
        ctx.tracer, ctx.call = tracer, call
        saved = output[len(call.results) :]
        ctx.mark_non_differentiable(*(o for i, o in enumerate(output) if i not in call.pulled))
        ctx.save_for_backward(*saved, *(tensors[i] for i in call.read))
        ctx.n = len(tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> Any:  # type: ignore[override]
        call: _LocalCall = ctx.call
        grads: list[Any] = [None] * ctx.n
        if call.backward is not None:
            duals = [cotangents[i] for i in call.pulled]
            found = _Backward.apply(ctx.tracer, call, *ctx.saved_tensors, *duals)
            for i, g in zip(call.wanted, found, strict=True):
                grads[i] = g
        return None, None, None, *grads

    @staticmethod
    def vmap(info: Any, in_dims: Any, tracer: Any, call: _LocalCall, *_: Any) -> Any:
        raise TraceError(f"{call.name} is called under torch.func.vmap; call vmap within the function instead")

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:  # type: ignore[override]
        raise TraceError(f"{ctx.call.name} is differentiated in forward mode, which it has not; use reverse mode")


class _Backward(torch.autograd.Function):
    """The node of the backward, which has no derivative."""

    @staticmethod
    def forward(tracer: Tracer, call: _LocalCall, *operands: torch.Tensor) -> Any:
        assert call.backward is not None
        return tracer.call(call.backward, operands, _types(call.backward.outputs, call.backward.graph))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.call = inputs[1]

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> Any:  # type: ignore[override]
        raise TraceError(f"{ctx.call.name} is differentiated twice; it has one derivative, in reverse mode")

    @staticmethod
    def vmap(info: Any, in_dims: Any, tracer: Any, call: _LocalCall, *_: Any) -> Any:
        raise TraceError(f"the gradient of {call.name} is taken under torch.func.vmap; call vmap within the function")
