"""What does code on shards compute? Its graph on local shapes, forward and backward, and the layouts at its edges.

What the backward needs of the forward stays on its rank: in the graph it is a tensor with a first dim over all ranks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from megalith.core._compat import pytree
from megalith.core.blocks import split_joint
from megalith.core.clean import tidy
from megalith.core.trace import CapturedTensor, Frame, MutationFound, TraceError, Tracer, functional, source_line
from megalith.sharding import markers
from megalith.sharding.graph import Graph, Local, Node, Origin, Ref, TensorType, map_refs, refs
from megalith.sharding.layout import Digit, Dim, Layout
from megalith.sharding.mesh import Mesh
from megalith.sharding.syntax import parse_spec

__all__ = ["LocalCall", "parse", "trace_on_shards"]

aten = torch.ops.aten


@dataclass
class LocalCall:
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


@dataclass(frozen=True)
class _Constant:
    value: Any


# --- tracing ------------------------------------------------------------------------------------------


def trace_on_shards(
    tracer: Tracer, call: LocalCall, where: tuple[int, ...], tensors: Sequence[torch.Tensor]
) -> None:
    """Traces the function on shards, and makes its two ops."""
    try:
        try:
            joint = _joint(tracer, call, where, tensors, raw=False)
        except MutationFound:
            joint = _functional(tracer, _joint(tracer, call, where, tensors, raw=True))
    except CapturedTensor:
        raise TraceError(
            f"{call.name} at {source_line()} reads a tensor that is not one of its arguments; pass it in as one, "
            "with a layout"
        ) from None
    joint = tidy(_without_markers(joint, call))
    n = len(call.out_patterns)
    shapes = [joint.types[r.id].shape for r in joint.outputs[:n]]
    call.results = tuple(
        _result(pattern, shape, tracer, f"result {i} of {call.name}")
        for i, (pattern, shape) in enumerate(zip(call.out_patterns, shapes, strict=True))
    )
    _check_results(joint, call)
    _make_ops(joint, call, tracer.mesh)


@contextlib.contextmanager
def _apart(tracer: Tracer, raw: bool = False) -> Iterator[Frame]:
    """A frame of its own, in which ops on shards are recorded."""
    before = tracer.backward_depth, tracer.raw, tracer.replayed
    tracer.frames.append(Frame())
    tracer.backward_depth, tracer.raw, tracer.inside_local_map = 0, raw, True
    try:
        yield tracer.frame
    finally:
        tracer.frames.pop()
        tracer.backward_depth, tracer.raw, tracer.replayed = before
        tracer.inside_local_map = False


def _joint(
    tracer: Tracer, call: LocalCall, where: tuple[int, ...], tensors: Sequence[torch.Tensor], raw: bool
) -> Graph:
    """The function forward and backward as one graph, of shards and cotangents to results and gradients."""
    with _apart(tracer, raw) as frame:
        shards = [_shard(tracer, x, layout) for x, layout in zip(tensors, call.operands, strict=True)]
        for i in call.wanted:
            shards[i].requires_grad_()
        inputs = [tracer.new_value(shard) for shard in shards]
        results = _run(call, dict(zip(where, shards, strict=True)))
        if any(shard._version for shard in shards):
            raise TraceError(f"{call.name} writes into its arguments; return the new values instead")
        values = [Ref(tracer.value_of(o)) for o in results]
        n_forward = len(frame.nodes)
        call.pulled = tuple(i for i, o in enumerate(results) if o.requires_grad)
        grads: list[Any] = []
        if call.wanted and call.pulled:
            duals = [tracer.fake(results[i]) for i in call.pulled]
            inputs += [tracer.new_value(dual) for dual in duals]
            found = torch.autograd.grad(
                [results[i] for i in call.pulled], [shards[i] for i in call.wanted], duals, allow_unused=True
            )
            grads = [None if g is None else Ref(tracer.value_of(g)) for g in found]
    nodes = tuple(
        replace(node, origin=Origin("", node.origin.source, "forward" if i < n_forward else "backward"))
        for i, node in enumerate(frame.nodes)
    )
    return Graph(tuple(inputs), tuple(map(str, inputs)), nodes, (*values, *grads), frame.types, frame.constants)


def _shard(tracer: Tracer, x: torch.Tensor, layout: Layout) -> torch.Tensor:
    with tracer.pause(), tracer.fake_mode:
        return torch.empty(layout.local_shape(0), dtype=x.dtype, device=x.device)


def _run(call: LocalCall, shards: dict[int, torch.Tensor]) -> list[torch.Tensor]:
    """Calls the function on shards, and notes the structure of what it returns."""
    args, kwargs = pytree.tree_unflatten([shards.get(i, leaf) for i, leaf in enumerate(call.leaves)], call.spec)
    with torch.enable_grad():
        out = call.fn(*args, **kwargs)
    outs, call.out_spec = pytree.tree_flatten(out)
    call.outs = [None if isinstance(o, torch.Tensor) else _Constant(o) for o in outs]
    results = [o for o in outs if isinstance(o, torch.Tensor)]
    if len(results) != len(call.out_patterns):
        raise TraceError(
            f"{call.name} at {source_line()} returns {len(results)} tensors and has {len(call.out_patterns)} "
            "out_layouts; write one for each tensor"
        )
    return results


def _functional(tracer: Tracer, raw: Graph) -> Graph:
    """The same graph without mutations."""
    with _apart(tracer) as frame:
        with tracer.pause(), tracer.fake_mode:
            fed = [torch.empty(raw.types[v].shape, dtype=raw.types[v].dtype) for v in raw.inputs]
        inputs = tuple(tracer.new_value(x) for x in fed)
        outs = functional(tracer, raw)(*fed)
        outputs = tuple(Ref(tracer.value_of(o)) if isinstance(o, torch.Tensor) else o for o in outs)
    return Graph(inputs, tuple(map(str, inputs)), tuple(frame.nodes), outputs, frame.types, frame.constants)


def _without_markers(graph: Graph, call: LocalCall) -> Graph:
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


# --- layouts ------------------------------------------------------------------------------------------


def parse(pattern: str | None, shape: tuple[int, ...], tracer: Tracer, name: str) -> Layout:
    """The layout that a pattern gives a tensor of this shape; None replicates it."""
    assert tracer.mesh is not None
    return Layout.parse("..." if pattern is None else pattern, shape, tracer.mesh, tracer.sizes, name)


def _result(pattern: str | None, shape: tuple[int, ...], tracer: Tracer, name: str) -> Layout:
    """The layout of a result of which each rank makes a shard of this shape."""
    mesh = tracer.mesh
    assert mesh is not None
    if pattern is None:
        return parse(None, shape, tracer, name)
    dims = list(parse_spec(pattern).stored.dims)
    for i, dim in enumerate(dims):
        if dim.is_ellipsis:
            dims[i : i + 1] = [dim] * max(0, len(shape) - len(dims) + 1)
            break
    whole = tuple(n * (_ranks(dims[i], mesh) if i < len(dims) else 1) for i, n in enumerate(shape))
    layout = parse(pattern, whole, tracer, name)
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


def _axes(layout: Layout) -> set[str]:
    """The axes along which ranks hold different numbers."""
    return {*layout.axes, *layout.partial_axes}


def _check_results(joint: Graph, call: LocalCall) -> None:
    """What depends on an operand that differs along an axis differs along that axis."""
    varies: dict[int, set[str]] = {v: _axes(layout) for v, layout in zip(joint.inputs, call.operands, strict=False)}
    for node in joint.nodes:
        found = set().union(*(varies.get(r.id, set()) for r in node.operands))
        varies.update(dict.fromkeys(node.outputs, found))
    for i, (ref, layout) in enumerate(zip(joint.outputs, call.results, strict=False)):
        missing = sorted(varies.get(ref.id, set()) - _axes(layout))
        if missing:
            axes = " ".join(missing)
            raise TraceError(
                f"result {i} of {call.name} has layout {str(layout)!r}, but it is made of shards along {axes}, so "
                f"ranks along {axes} have different values; shard a dim of it by {axes}, or mark it as a sum still to "
                f"be made: '{layout} // {axes}'"
            )
        if i in call.pulled and call.wanted and any(op != "sum" for _, op in layout.partial):
            raise TraceError(
                f"result {i} of {call.name} is a partial {layout.partial[0][1]}, which has no gradient here; "
                "detach its operands, or return a sum"
            )


# --- the two ops ---------------------------------------------------------------------------------------


def _make_ops(joint: Graph, call: LocalCall, mesh: Mesh | None) -> None:
    """The two ops, each with the layouts of its operands and results."""
    assert mesh is not None
    n_operands, n_results = len(call.operands), len(call.results)
    cotangents = list(joint.inputs[n_operands:])
    known = [*joint.inputs[:n_operands], *joint.constants]
    first, second, saved, read = split_joint(joint, call.name, known, cotangents, n_results)
    own = [_own(joint.types[v].shape, mesh) for v in saved]
    forward = _bind_constants(first.graph, joint)
    forward = _pack_saved(forward, n_results)
    call.forward = Local(call.name, _numbered(forward), call.operands, (*call.results, *own))
    if second is None:
        return
    call.read = tuple(i for i in read if i < n_operands)
    used = set().union(*(_axes(call.results[i]) for i in call.pulled))
    duals = []
    for i in call.pulled:
        layout = call.results[i].without_partial()
        # a result that is the same along an axis is counted once: by one rank
        duals.append(layout.with_partial(dict.fromkeys(used - _axes(call.results[i]), "sum")))
    found = [(i, ref) for i, ref in zip(call.wanted, joint.outputs[n_results:], strict=True) if ref is not None]
    call.wanted = tuple(i for i, _ in found)
    operands = [call.operands[i] for i in call.wanted]
    grads = [layout.with_partial(dict.fromkeys(used - _axes(layout), "sum")) for layout in operands]
    backward = _unpack_saved(_bind_constants(second.graph, joint), len(saved))
    backward = _numbered(replace(backward, outputs=tuple(refs(backward.outputs))))
    layouts = (*own, *(call.operands[i] for i in call.read), *duals)
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
        outputs[k] = Ref(_view(nodes, types, ref.id, (1, *kind.shape)))
    return replace(graph, nodes=tuple(nodes), outputs=tuple(outputs), types=types)


def _unpack_saved(graph: Graph, n_saved: int) -> Graph:
    types = dict(graph.types)
    inputs = list(graph.inputs)
    nodes: list[Node] = []
    for k in range(n_saved):
        value, kind = inputs[k], types[inputs[k]]
        inputs[k] = max(types) + 1
        types[inputs[k]] = TensorType((1, *kind.shape), kind.dtype)
        _view(nodes, types, inputs[k], kind.shape, value)
    return replace(graph, inputs=tuple(inputs), nodes=(*nodes, *graph.nodes), types=types)


def _view(nodes: list[Node], types: dict[int, TensorType], x: int, shape: Any, out: int = -1) -> int:
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


def _own(shape: tuple[int, ...], mesh: Mesh) -> Layout:
    """The layout of a value that every rank has for itself: a dim over all ranks, then its own."""
    digits, stride = [], mesh.size
    for axis, size in mesh.sizes.items():
        stride //= size
        digits.append(Digit(axis, size, stride))
    return Layout(mesh, (Dim.of(mesh.size, tuple(digits)), *(Dim.of(n) for n in shape)))
