"""What does a function compute? Its ATen graph, recorded while it runs on fake tensors."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from megalith.core import _compat
from megalith.core._compat import FakeTensorMode, TorchDispatchMode, pytree
from megalith.core.decompose import DECOMPOSITIONS, FACTORIES, IDENTITIES
from megalith.sharding import markers
from megalith.sharding.graph import Call, Graph, Local, Node, Origin, Ref, TensorType
from megalith.sharding.mesh import Mesh
from megalith.sharding.rule import has_rule
from megalith.sharding.specs import resolve
from megalith.sharding.syntax import SpecExpr, parse_spec

__all__ = ["TraceError", "Traced", "Tracer", "current_tracer", "trace"]


class TraceError(RuntimeError):
    """A program that cannot be traced, with the line at fault and the way out."""


class NoBlocks(Exception):
    """The program does with a block what only its single ops can do: trace again without blocks."""


class MutationFound(Exception):
    """A traced op writes into a tensor: the trace has to be functionalised."""


@dataclass
class Frame:
    """What is being recorded: one graph in the making."""

    nodes: list[Node] = field(default_factory=list)
    types: dict[int, TensorType] = field(default_factory=dict)
    constants: dict[int, torch.Tensor] = field(default_factory=dict)
    values: dict[int, int] = field(default_factory=dict)  # id(tensor) -> value
    alive: list[torch.Tensor] = field(default_factory=list)  # keeps the ids above from being reused
    aliases: dict[int, int] = field(default_factory=dict)  # storage -> how many bound tensors share it
    forward_origins: dict[int, Origin] = field(default_factory=dict)  # autograd sequence number -> origin
    seen_backward: bool = False


@dataclass(frozen=True)
class Traced:
    """A graph, how its inputs and outputs hang together as pytrees, and the modules that it met, by path.

    `attentions` are the modules that called attention; of a block that repeats, those of its first calls.
    """

    graph: Graph
    in_spec: Any
    out_spec: Any
    modules: frozenset[str] = frozenset()
    attentions: frozenset[str] = frozenset()


_current: list[Tracer] = []


def current_tracer() -> Tracer | None:
    """The tracer that records now, or None outside of tracing."""
    return _current[-1] if _current else None


class Tracer(TorchDispatchMode):
    """Records every op that reaches the dispatcher below autograd and `torch.func`."""

    def __init__(
        self,
        raw: bool = False,
        use_blocks: bool = True,
        mesh: Mesh | None = None,
        sizes: Mapping[str, int] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.use_blocks = use_blocks and not raw
        self.blocks: Any = None
        self.repeated: set[int] = set()
        self.backward_depth = 0
        self.anchors: dict[str, str] = {}
        self._anchored: dict[str, str | None] = {}
        self._around: dict[str, str | None] = {}
        self.attentions: set[str] = set()
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.device = device  # of the tensors that the caller describes on `meta`
        self.raw = raw  # keep aliases and mutations, to be functionalised by a second trace
        self.frames = [Frame()]
        self.modules: list[str] = []
        self.module_names: dict[int, str] = {}
        self.differentiating = 0
        self.paused = False
        self.mesh = mesh  # what `local_map` cuts shards by; None: a program of one device
        self.sizes = dict(sizes or {})
        self.inside_local_map = False
        self.replayed: Origin | None = None  # of the node that is traced again
        self._next = 0

    @property
    def frame(self) -> Frame:
        return self.frames[-1]

    def learn(self, root: torch.nn.Module) -> None:
        """Notes the paths of a module's children, and which of them repeat."""
        for name, child in root.named_modules():
            self.module_names.setdefault(id(child), name)
            if isinstance(child, torch.nn.ModuleList):
                members = list(child)
                self.repeated.update(id(m) for m in members if sum(type(m) is type(o) for o in members) > 1)

    def anchor(self, path: str) -> str | None:
        """The layout that the specs give the output of the module at this path."""
        if path not in self._anchored:
            found = resolve(self.anchors, {}, _NO_MESH, modules=[path], complete=False).modules if self.anchors else {}
            self._anchored[path] = self.anchors[found[path]] if path in found else None
        return self._anchored[path]

    def around_attention(self, path: str) -> str | None:
        """The key of the spec for attention that the module at this path calls."""
        if path not in self._around:
            known = self.anchors
            found = resolve(known, {}, _NO_MESH, attentions=[path], complete=False).attentions if known else {}
            self._around[path] = found.get(path)
        return self._around[path]

    def meet_attention(self) -> SpecExpr | None:
        """Notes that the innermost module calls attention. Gives the spec for that, if there is one."""
        path = self.modules[-1] if self.modules else ""
        self.attentions.add(path)
        key = self.around_attention(path)
        return None if key is None else parse_spec(self.anchors[key])

    def may_use_blocks(self) -> bool:
        """Whether a block may be called here rather than its ops recorded."""
        return self.use_blocks and len(self.frames) == 1 and not _compat.functorch_levels()

    # --- values -------------------------------------------------------------------------------

    def new_value(self, tensor: torch.Tensor) -> int:
        """A new value of the current frame, held by `tensor`."""
        value = self._next
        self._next += 1
        self.frame.types[value] = TensorType(tuple(tensor.shape), tensor.dtype)
        self.bind(tensor, value)
        return value

    def bind(self, tensor: torch.Tensor, value: int) -> None:
        """From here on `tensor` stands for this value."""
        if id(tensor) not in self.frame.values:
            storage = _compat.storage_id(tensor)
            self.frame.aliases[storage] = self.frame.aliases.get(storage, 0) + 1
        self.frame.values[id(tensor)] = value
        self.frame.alive.append(tensor)

    def value_of(self, tensor: torch.Tensor) -> int:
        """The value that a tensor holds; a tensor never seen before is a constant of the program."""
        value = self.frame.values.get(id(tensor))
        if value is not None:
            return value
        if len(self.frames) > 1 and any(id(tensor) in frame.values for frame in self.frames):
            raise CapturedTensor
        if isinstance(tensor, _compat.FakeTensor):
            raise TraceError(
                f"a tensor of shape {tuple(tensor.shape)} came from outside of the traced function at "
                f"{source_line() or 'an unknown line'}; pass it in as an argument"
            )
        value = self.new_value(tensor)
        self.frame.constants[value] = tensor
        return value

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake tensor of the same shape, dtype and device; nothing is recorded."""
        with self.pause():
            if tensor.device.type == "meta":
                with self.fake_mode:
                    return torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
            return self.fake_mode.from_tensor(tensor.detach(), static_shapes=True)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    # --- nodes --------------------------------------------------------------------------------

    def origin(self) -> Origin:
        if self.replayed is not None:
            return self.replayed
        node = _compat.current_autograd_node()
        if node is not None or self.backward_depth:
            self.frame.seen_backward = True
            known = self.frame.forward_origins.get(node._sequence_nr()) if node is not None else None
            if known is not None:
                return Origin(known.module, known.source, "backward")
            return Origin("", "", "backward")
        forward = self.differentiating or not self.frame.seen_backward or _compat.functorch_levels()
        module = self.modules[-1] if self.modules else ""
        origin = Origin(module, source_line(), "forward" if forward else "update")
        if torch.is_grad_enabled():
            self.frame.forward_origins[_compat.autograd_sequence() - 1] = origin
        return origin

    def emit(self, op: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Records `out = op(*args, **kwargs)`."""

        def ref(item: Any) -> Any:
            return Ref(self.value_of(item)) if isinstance(item, torch.Tensor) else item

        node_args = pytree.tree_map(ref, tuple(args))
        node_kwargs = pytree.tree_map(ref, dict(kwargs))
        if not self.raw:
            op = _RENAMED.get(op, op)
            node_kwargs = {k: v for k, v in node_kwargs.items() if k not in _IGNORED_KWARGS}
        if not isinstance(out, (torch.Tensor, tuple, list)):
            return  # a number that torch asks for on the way, such as whether two sizes agree
        outs = (out,) if isinstance(out, torch.Tensor) else tuple(out)
        values = tuple(self.new_value(o) if isinstance(o, torch.Tensor) else -1 for o in outs)
        self.frame.nodes.append(Node(op, node_args, node_kwargs, values, self.origin()))

    def mark(self, op: Callable[..., Any], tensor: torch.Tensor, *args: Any) -> torch.Tensor:
        """Records a marker: a node that returns its first operand under a new name."""
        with self.pause(), self.fake_mode:
            out = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        self.emit(op, (tensor, *args), {}, out)
        return out

    def call(
        self, op: Call | Local, operands: Sequence[torch.Tensor], outputs: Sequence[TensorType]
    ) -> tuple[torch.Tensor, ...]:
        """Records the call of a block or of code on shards, whose outputs have these types."""
        device = operands[0].device
        with self.pause(), self.fake_mode:
            outs = tuple(torch.empty(t.shape, dtype=t.dtype, device=device) for t in outputs)
        args = tuple(Ref(self.value_of(x)) for x in operands)
        values = tuple(self.new_value(o) for o in outs)
        self.frame.nodes.append(Node(op, args, {}, values, self.origin()))
        return outs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused or func.namespace == "prim":
            return func(*args, **kwargs)
        if self.raw:
            out = self._run(func, args, kwargs)
            self.emit(func, args, kwargs, out)
            return out
        if func in IDENTITIES and isinstance(args[0], torch.Tensor):
            out = func(*args, **kwargs)
            self.bind(out, self.value_of(args[0]))
            return out
        decomposition = DECOMPOSITIONS.get(func)
        if decomposition is not None:
            with self:
                out = decomposition(*args, **kwargs)
            if out is not NotImplemented:
                return out
        elif func not in FACTORIES and _compat.has_composite_implicit(func):
            with self:
                return func.decompose(*args, **kwargs)
        elif func not in FACTORIES and not has_rule(str(func)):
            decomposition = _compat.known_decomposition(func)
            if decomposition is not None:
                with self:
                    return decomposition(*args, **kwargs)
        if _compat.is_mutating(func):
            if self._is_fresh_constant(args[0]):
                with _compat.without_modes():
                    return func(*args, **kwargs)
            functional = _compat.functional_form(func)
            alone = self.frame.aliases.get(_compat.storage_id(args[0])) == 1
            if functional is None or not alone or id(args[0]) not in self.frame.values:
                raise MutationFound(func)
            with self:  # nothing else sees this memory: the tensor merely gets a new value
                out = functional(*args, **kwargs)
                out = out.to(args[0].dtype)
            self.bind(args[0], self.value_of(out))
            return args[0]
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise TraceError(
                f"{func} draws random numbers at {source_line()}: the result would depend on the mesh; "
                "call model.eval() or set the dropout probability to 0"
            )
        out = self._run(func, args, kwargs)
        self.emit(func, args, kwargs, out)
        return out

    def _is_fresh_constant(self, tensor: Any) -> bool:
        """Whether this is a real tensor that the program has not read yet, such as a number that torch wraps."""
        return not isinstance(tensor, _compat.FakeTensor) and id(tensor) not in self.frame.values

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        try:
            return func(*args, **kwargs)
        except (_compat.DataDependentOutputException, _compat.DynamicOutputShapeException) as error:
            raise TraceError(
                f"{func} at {source_line()} depends on the data of a tensor, so there is no one program; "
                "compute with tensors (torch.where, masks) instead of Python numbers and branches"
            ) from error


class CapturedTensor(Exception):
    """A block reads a tensor that is not one of its arguments."""


_aten = torch.ops.aten
_RENAMED = {
    _aten.view.default: _aten.reshape.default,  # strides are nobody's business
    _aten._unsafe_view.default: _aten.reshape.default,
    _aten._reshape_alias.default: _aten.reshape.default,
}
_NO_MESH = Mesh("")
_IGNORED_KWARGS = {"device", "layout", "pin_memory", "memory_format", "non_blocking"}
_HERE = os.path.dirname(os.path.abspath(__file__))
_TORCH = os.path.dirname(os.path.abspath(torch.__file__))
_LIBRARIES = (_HERE, _TORCH, "<frozen", "<string", "<eval")
_skipped: dict[str, bool] = {}


def source_line() -> str:
    """The innermost line of user code, `file.py:12`; library frames (torch, einops, this package) are passed over."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        skip = _skipped.get(name)
        if skip is None:
            skip = name.startswith(_LIBRARIES) or f"{os.sep}einops{os.sep}" in name or "contextlib" in name
            _skipped[name] = skip
        if not skip:
            return f"{os.path.basename(name)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def trace(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    names: tuple[str, ...] | None = None,
    module: torch.nn.Module | None = None,
    anchors: Mapping[str, str] | None = None,
    mesh: Mesh | None = None,
    sizes: Mapping[str, int] | None = None,
    device: torch.device | str = "cpu",
) -> Traced:
    """The graph of a pure function of pytrees of tensors.

    Args:
        fn: the function; it may use `grad_and_value` of this package and the transforms of `torch.func`.
        args: pytrees; of the tensors in them only shape, dtype and device count. Other leaves are constants.
        kwargs: likewise.
        names: the names of the positional arguments, for the names of the graph's inputs.
        module: the module whose children's paths name the origins; others are learnt when they are called.
        anchors: spec entries that may be for module outputs: name pattern -> layout.
        mesh, sizes: what the patterns of a `local_map` are read by; without a mesh it is a plain call.
        device: where the arguments are that are given on `meta`.

    Returns:
        The graph with its pytree structures.

    Raises:
        TraceError: data-dependent control flow, random ops, tensors from outside.

    >>> print(trace(lambda x: x.sin().sum(), (torch.ones(2, 3),)).graph)
    %0: float32[2, 3] = input 0
    %1: float32[2, 3] = aten.sin.default(%0)  # forward 
    %2: float32[] = aten.sum.default(%1)  # forward 
    return %2
    """
    kwargs = dict(kwargs or {})

    def record(raw: bool = False, use_blocks: bool = True) -> Traced:
        return _trace(Tracer(raw, use_blocks, mesh, sizes, device), fn, args, kwargs, names, module, anchors)

    try:
        try:
            return record()
        except NoBlocks:
            return record(use_blocks=False)
    except MutationFound:
        return _functionalize(record(raw=True), args, kwargs, device)


def _leaf_names(args: tuple[Any, ...], kwargs: Mapping[str, Any], names: tuple[str, ...] | None) -> list[str]:
    labelled = [(names[i] if names and i < len(names) else str(i), arg) for i, arg in enumerate(args)]
    found = []
    for label, arg in [*labelled, *kwargs.items()]:
        for path, _ in pytree.tree_flatten_with_path(arg)[0]:
            found.append(".".join(p for p in (label, _compat.key_path(path)) if p))
    return found


def _trace(
    tracer: Tracer,
    fn: Any,
    args: Any,
    kwargs: Any,
    names: Any,
    module: torch.nn.Module | None,
    anchors: Mapping[str, str] | None,
) -> Traced:
    from megalith.core.blocks import BlockTable, call_module
    from megalith.core.composites import Intercept

    leaves, in_spec = pytree.tree_flatten((args, kwargs))
    leaf_names = _leaf_names(args, kwargs, names)
    tracer.blocks = BlockTable()
    tracer.anchors = dict(anchors or {})
    if module is not None:
        tracer.learn(module)
    inputs, fakes, input_names = [], [], []
    for leaf, name in zip(leaves, leaf_names, strict=True):
        if isinstance(leaf, torch.Tensor):
            leaf = tracer.fake(leaf)
            inputs.append(tracer.new_value(leaf))
            input_names.append(name)
        fakes.append(leaf)
    fake_args, fake_kwargs = pytree.tree_unflatten(fakes, in_spec)

    def wrapper(original: Any, module: torch.nn.Module, *a: Any, **k: Any) -> Any:
        return call_module(tracer, original, module, *a, **k)

    _current.append(tracer)
    try:
        with (
            _compat.compiling(),
            _compat.module_calls(wrapper),
            torch.autograd.set_multithreading_enabled(False),
            tracer.fake_mode,
            tracer,
            Intercept(),
        ):
            out = fn(*fake_args, **fake_kwargs)
    finally:
        _current.pop()
    out_leaves, out_spec = pytree.tree_flatten(out)
    outputs = tuple(Ref(tracer.value_of(o)) if isinstance(o, torch.Tensor) else o for o in out_leaves)
    frame = tracer.frame
    graph = Graph(tuple(inputs), tuple(input_names), tuple(frame.nodes), outputs, frame.types, frame.constants)
    return Traced(graph, in_spec, out_spec, frozenset(tracer.module_names.values()), frozenset(tracer.attentions))


def _functionalize(raw: Traced, args: Any, kwargs: Any, device: torch.device | str) -> Traced:
    """Traces a graph with mutations once more, through torch's functionalisation."""
    leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    tracer = Tracer(use_blocks=False, device=device)
    graph = _trace(tracer, functional(tracer, raw.graph), tuple(leaves), {}, None, None, None).graph
    return replace(raw, graph=replace(graph, names=raw.graph.names))


def functional(tracer: Tracer, graph: Graph) -> Callable[..., tuple[Any, ...]]:
    """A function that runs a raw graph without its mutations, to be traced by `tracer`.

    Markers and code on shards are recorded as they are; other ops keep their origins.
    """
    from megalith.core.interpret import run_graph

    def special(node: Node, args: tuple[Any, ...]) -> Any:
        tracer.replayed = node.origin
        op = node.op
        if isinstance(op, Local):
            types = [graph.types[o] for o in node.outputs]
            return _compat.below_functionalize(lambda *x: tracer.call(op, x, types), args)
        if op is markers.constrain or op is markers.like:
            return (_compat.below_functionalize(lambda *x: tracer.mark(op, *x), args),)
        return NotImplemented

    return torch.func.functionalize(lambda *tensors: tuple(run_graph(graph, tensors, special)))
