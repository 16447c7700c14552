"""Which parts of a model repeat? A block that repeats is traced once, forward and backward, and called by name.

The members of an `nn.ModuleList` that are of one class, with equal settings and inputs of equal shape, are one block.
Its first two occurrences are traced and compared; the rest only call it. A block's backward is a graph of its own: it
reads the block's inputs, what the forward saved, and the cotangents; views are made again rather than saved.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from megalith.core._compat import pytree
from megalith.core.clean import clean
from megalith.core.markers import constrain
from megalith.core.trace import CapturedTensor, Frame, NoBlocks, Tracer
from megalith.sharding.graph import Block, Call, Graph, Node, Ref, TensorType, refs

__all__ = ["call_module", "split_joint"]


def call_module(tracer: Tracer, original: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Runs `module(*args, **kwargs)` under a tracer, as a block if it is one that repeats."""
    path = tracer.module_names.get(id(module))
    if path is None:
        tracer.learn(module)
        path = tracer.module_names[id(module)]
    out = _run(tracer, original, module, path, args, kwargs)
    pattern = tracer.anchor(path)
    return out if pattern is None else _anchored(out, pattern)


def _anchored(out: Any, pattern: str) -> Any:
    """A module's output, its first tensor laid out by a pattern."""
    leaves, spec = pytree.tree_flatten(out)
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            leaves[i] = constrain(leaf, pattern)
            return pytree.tree_unflatten(leaves, spec)
    return out


def _run(tracer: Tracer, original: Any, module: torch.nn.Module, path: str, args: Any, kwargs: Any) -> Any:
    tracer.modules.append(path)
    try:
        if id(module) in tracer.repeated and tracer.may_use_blocks():
            called = _call_block(tracer, module, path, args, kwargs)
            if called is not _INLINE:
                return called
        return original(module, *args, **kwargs)
    finally:
        tracer.modules.pop()


_INLINE = object()
_PLAIN = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device)


@dataclass(frozen=True)
class _Traced:
    """A block's two graphs.

    The forward gives the outputs and then what is saved; the backward takes saved values, inputs and cotangents, in the
    order that `saved`, `read` and the outputs have, and gives the gradient of each input in `grads`.
    """

    forward: Block
    backward: Block | None
    out_spec: Any
    outputs: tuple[TensorType | None, ...]
    constants: tuple[Any, ...]
    saved: tuple[TensorType, ...]
    read: tuple[int, ...]
    cotangents: tuple[int, ...]
    grads: tuple[int, ...]


@dataclass
class BlockTable:
    """The blocks of one trace by key, which were traced twice alike, and which keys turned out not to repeat."""

    found: dict[Any, _Traced] = field(default_factory=dict)
    verified: set[Any] = field(default_factory=set)
    refused: set[Any] = field(default_factory=set)
    numbered: set[Any] = field(default_factory=set)  # blocks that read their own number: each is another program


def _call_block(tracer: Tracer, module: torch.nn.Module, path: str, args: Any, kwargs: Any) -> Any:
    leaves, spec = pytree.tree_flatten((args, kwargs))
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    if not all(isinstance(leaf, (torch.Tensor, *_PLAIN)) for leaf in leaves):
        return _INLINE
    tensors = [*named.values(), *(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))]
    constants = tuple(None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
    key: Any = (
        _fingerprint(module),
        tuple(named),
        spec,
        constants,
        tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in tensors),
        _aliasing(tensors),
        torch.is_grad_enabled(),
        tuple(tracer.anchor(tracer.module_names.get(id(m), "")) for m in list(module.modules())[1:]),
        tuple(tracer.around_attention(tracer.module_names.get(id(m), "")) for m in module.modules()),
    )
    table: BlockTable = tracer.blocks
    if key in table.numbered:
        key = (key, _numbers(module))
    if key in table.refused:
        return _INLINE
    traced = table.found.get(key)
    if traced is None or key not in table.verified:
        try:
            with _watched(module) as reads:
                again = _trace_block(tracer, module, path, list(named), leaves, spec, tensors)
        except CapturedTensor:
            again = None
        if reads and traced is None:
            table.numbered.add(key)
            key = (key, _numbers(module))
        if again is None or (traced is not None and not _same(traced, again)):
            table.refused.add(key)
            return _INLINE
        if traced is None:
            table.found[key] = traced = again
        else:
            table.verified.add(key)
    outs = _CallBlock.apply(tracer, traced, path, *tensors)
    given = iter(outs if isinstance(outs, tuple) else (outs,))
    merged = [next(given) if t is not None else c for t, c in zip(traced.outputs, traced.constants, strict=True)]
    return pytree.tree_unflatten(merged, traced.out_spec)


def _aliasing(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Which inputs are the same tensor."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(id(t), i) for i, t in enumerate(tensors))


_OWN_NUMBER = {"layer_idx", "layer_id", "layer_index", "block_idx", "layer_number"}


def _numbers(module: torch.nn.Module) -> Any:
    return tuple(child.__dict__.get(attribute) for child in module.modules() for attribute in sorted(_OWN_NUMBER))


@contextlib.contextmanager
def _watched(module: torch.nn.Module) -> Iterator[list[str]]:
    """Notes each read of a layer's own number while the module runs."""
    reads: list[str] = []

    def property_of(attribute: str) -> property:
        def get(self: torch.nn.Module) -> Any:
            reads.append(attribute)
            if attribute not in self.__dict__:
                raise AttributeError(attribute)
            return self.__dict__[attribute]

        return property(get, lambda self, value: self.__dict__.__setitem__(attribute, value))

    watched = {(type(child), a) for child in module.modules() for a in _OWN_NUMBER & child.__dict__.keys()}
    set_here = [(cls, attribute) for cls, attribute in watched if not hasattr(cls, attribute)]
    reads.extend(attribute for cls, attribute in watched if hasattr(cls, attribute))  # cannot be watched
    for cls, attribute in set_here:
        setattr(cls, attribute, property_of(attribute))
    try:
        yield reads
    finally:
        for cls, attribute in set_here:
            delattr(cls, attribute)


_CONTENTS = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"}


def _fingerprint(module: torch.nn.Module) -> Any:
    """What has to be equal for two modules to be one program: classes and settings, but not a layer's number."""
    parts: list[Any] = []
    for name, child in module.named_modules():
        settings: list[tuple[str, Any]] = []
        for attribute, value in sorted(child.__dict__.items()):
            if attribute in _CONTENTS or attribute in _OWN_NUMBER:
                continue
            if isinstance(value, _PLAIN):
                settings.append((attribute, value))
            elif isinstance(value, (tuple, list)) and all(isinstance(v, _PLAIN) for v in value):
                settings.append((attribute, tuple(value)))
            elif isinstance(value, dict) and attribute.startswith("_"):  # hooks
                settings.append((attribute, tuple(map(id, value.values()))))
            elif not isinstance(value, (torch.Tensor, torch.nn.Module)):
                settings.append((attribute, id(value)))
        parts.append((name, type(child), tuple(settings)))
    return tuple(parts)


def _trace_block(
    tracer: Tracer,
    module: torch.nn.Module,
    path: str,
    names: list[str],
    leaves: list[Any],
    spec: Any,
    tensors: list[torch.Tensor],
) -> _Traced:
    """Traces a module forward and backward in a frame of its own."""
    tracer.frames.append(Frame())
    try:
        fakes: dict[int, torch.Tensor] = {}
        inputs: list[int] = []
        mine: list[torch.Tensor] = []
        for tensor in tensors:
            fake = fakes.get(id(tensor))
            if fake is None:
                fake = tracer.fake(tensor).requires_grad_(tensor.requires_grad)
                fakes[id(tensor)] = fake
                inputs.append(tracer.new_value(fake))
            else:
                inputs.append(tracer.value_of(fake))
            mine.append(fake)
        state = dict(zip(names, mine, strict=False))
        rest = iter(mine[len(names) :])
        new_leaves = [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(new_leaves, spec)
        versions = [fake._version for fake in mine]
        out = torch.func.functional_call(module, state, args, kwargs)
        if versions != [fake._version for fake in mine]:
            raise NoBlocks("a block writes into what it is given")
        outs, out_spec = pytree.tree_flatten(out)
        out_tensors = [o for o in outs if isinstance(o, torch.Tensor)]
        out_values = [tracer.value_of(o) for o in out_tensors]
        first = _aliasing(mine)
        wanted = [i for i, t in enumerate(mine) if t.requires_grad and first[i] == i]
        pulled = [i for i, o in enumerate(out_tensors) if o.requires_grad]
        cotangents: list[int] = []
        grads: list[Any] = []
        if wanted and pulled:
            duals = []
            for i in pulled:
                dual = tracer.fake(out_tensors[i])
                cotangents.append(tracer.new_value(dual))
                duals.append(dual)
            found = torch.autograd.grad(
                [out_tensors[i] for i in pulled], [mine[i] for i in wanted], duals, allow_unused=True
            )
            grads = [None if g is None else Ref(tracer.value_of(g)) for g in found]
        frame = tracer.frame
    finally:
        tracer.frames.pop()
    unique = list(dict.fromkeys(inputs))
    joint = Graph(
        (*unique, *cotangents),
        tuple(str(i) for i in range(len(unique) + len(cotangents))),
        tuple(_relative(node, path) for node in frame.nodes),
        (*(Ref(v) for v in out_values), *grads),
        frame.types,
        frame.constants,
    )
    if frame.constants:
        raise CapturedTensor
    joint = clean(joint)
    types = tuple(frame.types[v] for v in out_values)
    kept: list[TensorType | None] = []
    given = iter(types)
    kept = [next(given) if isinstance(o, torch.Tensor) else None for o in outs]
    constants = tuple(None if isinstance(o, torch.Tensor) else o for o in outs)
    name = type(module).__name__
    forward, backward, saved, read = split_joint(joint, name, unique, cotangents, len(out_values))
    return _Traced(
        forward,
        backward,
        out_spec,
        tuple(kept),
        constants,
        tuple(frame.types[v] for v in saved),
        tuple(inputs.index(unique[i]) for i in read),
        tuple(pulled),
        tuple(wanted),
    )


def _relative(node: Node, path: str) -> Node:
    """The node with its module's path counted from the block."""
    module = node.origin.module
    if module == path or module.startswith(path + "."):
        return replace(node, origin=replace(node.origin, module=module[len(path) + 1 :]))
    return node


_VIEWS = {torch.ops.aten.reshape.default, torch.ops.aten.permute.default, torch.ops.aten.expand.default}


def split_joint(
    joint: Graph, name: str, inputs: list[int], cotangents: list[int], n_outputs: int
) -> tuple[Block, Block | None, list[int], list[int]]:
    """Forward and backward graphs of a joint one, the values saved between them, and the inputs that backward reads."""
    outputs, grads = joint.outputs[:n_outputs], joint.outputs[n_outputs:]
    first = [n for n in joint.nodes if n.origin.phase != "backward"]
    second = [n for n in joint.nodes if n.origin.phase == "backward"]
    producer = {v: n for n in first for v in n.outputs}
    made = {v for n in second for v in n.outputs}
    again: list[Node] = []
    saved: dict[int, None] = {}
    read: dict[int, None] = {}

    def need(value: int) -> None:
        if value in made or value in cotangents:
            return
        if value in inputs:
            read.setdefault(inputs.index(value))
            return
        node = producer[value]
        if node.op in _VIEWS or not node.operands:
            for ref in node.operands:
                need(ref.id)
            again.append(replace(node, origin=replace(node.origin, phase="backward")))
            made.update(node.outputs)
        else:
            saved.setdefault(value)

    for node in second:
        for ref in node.operands:
            need(ref.id)
    for ref in refs(grads):
        need(ref.id)
    keep = list(saved)
    order = sorted(read)
    live = _live(first, {r.id for r in refs(outputs)} | set(keep))
    forward = Graph(
        tuple(inputs), tuple(map(str, inputs)), tuple(live), (*outputs, *(Ref(v) for v in keep)), joint.types
    )
    if not grads:
        return Block(name, forward), None, [], []
    fed = (*keep, *(inputs[i] for i in order), *cotangents)
    backward = Graph(fed, tuple(map(str, fed)), (*again, *second), grads, joint.types)
    return Block(name, forward), Block(f"{name} backward", backward), keep, order


def _live(nodes: list[Node], needed: set[int]) -> list[Node]:
    kept = []
    for node in reversed(nodes):
        if any(v in needed for v in node.outputs):
            kept.append(node)
            needed.update(r.id for r in node.operands)
    return kept[::-1]


def _same(a: _Traced, b: _Traced) -> bool:
    """Whether two traces of a block are one program, up to the numbers of values."""

    def text(block: Block | None) -> Any:
        if block is None:
            return None
        number: dict[int, int] = {}

        def n(value: int) -> int:
            return number.setdefault(value, len(number))

        graph = block.graph
        lines: list[Any] = [tuple(n(v) for v in graph.inputs)]
        for node in graph.nodes:
            args = repr(_numbered((node.args, node.kwargs), n))
            lines.append((str(node.op), args, tuple(n(v) for v in node.outputs), node.origin.phase))
        lines.append(repr(_numbered(graph.outputs, n)))
        return lines

    return text(a.forward) == text(b.forward) and text(a.backward) == text(b.backward) and a.constants == b.constants


def _numbered(tree: Any, n: Any) -> Any:
    if isinstance(tree, Ref):
        return f"%{n(tree.id)}"
    if isinstance(tree, (tuple, list)):
        return [_numbered(item, n) for item in tree]
    if isinstance(tree, dict):
        return {k: _numbered(v, n) for k, v in tree.items()}
    return repr(tree)


class _CallBlock(torch.autograd.Function):
    """One call of a block: a node forward, and in the backward another."""

    @staticmethod
    def forward(ctx: Any, tracer: Tracer, traced: _Traced, path: str, *tensors: torch.Tensor) -> Any:
        types = [t for t in traced.outputs if t is not None]
        made = tracer.call(Call(traced.forward, prefix=path), _unique(tensors), [*types, *traced.saved])
        outs, saved = made[: len(types)], made[len(types) :]
        ctx.tracer, ctx.traced, ctx.path, ctx.tensors, ctx.saved = tracer, traced, path, tensors, saved
        ctx.primals = tuple(Ref(tracer.value_of(outs[i])) for i in traced.cotangents)
        ctx.mark_non_differentiable(*(o for i, o in enumerate(outs) if i not in traced.cotangents))
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            raise NoBlocks("a block's backward is differentiated again")
        tracer, traced = ctx.tracer, ctx.traced
        operands = [*ctx.saved, *(ctx.tensors[i] for i in traced.read), *(cotangents[i] for i in traced.cotangents)]
        first = len(operands) - len(traced.cotangents)
        primals = tuple((first + k, ref) for k, ref in enumerate(ctx.primals))
        outputs = traced.backward.graph.outputs
        types = [traced.backward.graph.types[o.id] for o in outputs if isinstance(o, Ref)]
        made = iter(tracer.call(Call(traced.backward, primals, ctx.path), operands, types))
        grads: list[Any] = [None] * len(ctx.tensors)
        for i, output in zip(traced.grads, outputs, strict=True):
            grads[i] = next(made) if isinstance(output, Ref) else None
        return None, None, None, *grads


def _unique(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return list({id(t): t for t in tensors}.values())
