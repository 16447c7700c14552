"""How does code run on local shards, where no rule says what it does? `local_map(fn, in_layouts, out_layouts)`.

A call is one opaque node of the graph, and another in the backward; see `local_trace` for what is in them.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megalith.core import _compat
from megalith.core._compat import pytree
from megalith.core.local_trace import LocalCall, parse, trace_on_shards
from megalith.core.trace import TraceError, Tracer, current_tracer, source_line
from megalith.sharding.graph import Graph, TensorType
from megalith.sharding.layout import Layout
from megalith.sharding.syntax import LayoutError

__all__ = ["local_map"]

Patterns = str | Sequence[str | None] | None


def local_map(fn: Callable[..., Any], in_layouts: Patterns, out_layouts: Patterns) -> Callable[..., Any]:
    """`fn` on the shards of each rank: for code that no rule covers, or that is faster by hand.

    Within `shard`, operands are brought to `in_layouts`, `fn` runs on each rank's tensors without any communication,
    and its results are taken to be in `out_layouts`, which may be partial: `"b e // tp"` is a sum over `tp` still to
    be made. Elsewhere it is `fn` itself, so write `fn` such that it is right on whole tensors too. It may be
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
    call = LocalCall(fn, name, outs, [*leaves], spec, names, operands, tuple(wanted))
    made = iter(_Forward.apply(tracer, call, tuple(where), *tensors))
    return pytree.tree_unflatten([next(made) if leaf is None else leaf.value for leaf in call.outs], call.out_spec)


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


def _operand(pattern: str | None, tensor: torch.Tensor, tracer: Tracer, name: str) -> Layout:
    layout = parse(pattern, tuple(tensor.shape), tracer, name)
    if layout.partial:
        raise TraceError(f"{name}: {pattern!r} is partial, but an operand is read as it is; write it without '//'")
    _check_equal(layout, name, pattern)
    return layout


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


# --- calling ------------------------------------------------------------------------------------------


def _types(layouts: Sequence[Layout], graph: Graph) -> list[TensorType]:
    return [
        TensorType(layout.shape, graph.types[ref.id].dtype) for layout, ref in zip(layouts, graph.outputs, strict=True)
    ]


class _Forward(torch.autograd.Function):
    """One call: a node forward, and in the backward another. Returns the results and what is saved."""

    @staticmethod
    def forward(tracer: Tracer, call: LocalCall, where: tuple[int, ...], *tensors: torch.Tensor) -> Any:
        trace_on_shards(tracer, call, where, tensors)
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
    def backward(ctx: Any, *cotangents: torch.Tensor) -> Any:
        call: LocalCall = ctx.call
        grads: list[Any] = [None] * ctx.n
        if call.backward is not None:
            duals = [cotangents[i] for i in call.pulled]
            found = _Backward.apply(ctx.tracer, call, *ctx.saved_tensors, *duals)
            for i, g in zip(call.wanted, found, strict=True):
                grads[i] = g
        return None, None, None, *grads

    @staticmethod
    def vmap(info: Any, in_dims: Any, tracer: Any, call: LocalCall, *_: Any) -> Any:
        raise TraceError(f"{call.name} is called under torch.func.vmap; call vmap within the function instead")

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        raise TraceError(f"{ctx.call.name} is differentiated in forward mode, which it has not; use reverse mode")


class _Backward(torch.autograd.Function):
    """The node of the backward, which has no derivative."""

    @staticmethod
    def forward(tracer: Tracer, call: LocalCall, *operands: torch.Tensor) -> Any:
        assert call.backward is not None
        return tracer.call(call.backward, operands, _types(call.backward.outputs, call.backward.graph))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.call = inputs[1]

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> Any:
        raise TraceError(f"{ctx.call.name} is differentiated twice; it has one derivative, in reverse mode")

    @staticmethod
    def vmap(info: Any, in_dims: Any, tracer: Any, call: LocalCall, *_: Any) -> Any:
        raise TraceError(f"the gradient of {call.name} is taken under torch.func.vmap; call vmap within the function")
