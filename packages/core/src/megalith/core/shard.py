"""How does a pure, single-device function run on a mesh? `shard(fn, mesh, specs)` traces it, lays it out, lowers it."""

from __future__ import annotations

import contextlib
import gc
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from megalith.core._compat import WeakIdKeyDictionary, pytree
from megalith.core.backends.backend import Backend, PerRank, choose_backend
from megalith.core.clean import clean
from megalith.core.explain import Explanation, explain
from megalith.core.inputs import Leaf, donated_outputs, global_shape, leaves_of, output_layouts, resolve_leaves
from megalith.core.lower import lower
from megalith.core.memory import MemoryReport, memory
from megalith.core.passes import (
    accumulate,
    arrival,
    blocking,
    bounded,
    bucket,
    delay,
    inplace,
    merge,
    overlap,
    panels,
    prefetch,
)
from megalith.core.price import DEVICES, CostReport, Device, cost
from megalith.core.program import Program
from megalith.core.strict import check_strict
from megalith.core.trace import Traced, current_tracer, trace
from megalith.sharding.layout import Layout
from megalith.sharding.mesh import Mesh
from megalith.sharding.partition import Partition, partition

__all__ = ["Compiled", "Sharded", "ShardedModule", "shard"]

Tree = Any


@dataclass(frozen=True)
class Compiled:
    """A function made into programs for one set of input shapes.

    Args:
        traced: the graph on global tensors.
        partition: the graph laid out.
        programs: by rank, those that this process runs.
        leaves: the inputs with their layouts.
        output_layouts: a tree like the output, of layouts; None where it is not a tensor.
    """

    traced: Traced
    partition: Partition
    programs: Mapping[int, Program]
    leaves: tuple[Leaf, ...]
    output_layouts: Tree
    run: Callable[[Sequence[Any]], list[Any]]


@dataclass
class Sharded:
    """A function on a mesh: call it with shards, or ask what it will do. Made by `shard`."""

    fn: Callable[..., Any]
    mesh: Mesh
    specs: Mapping[str, str]
    backend: Backend
    donate: tuple[str, ...] = ()
    strict: bool = False
    sizes: Mapping[str, int] = field(default_factory=dict)
    module: torch.nn.Module | None = None
    overlap: bool = True
    panels: int = 1
    _cache: dict[Any, Compiled] = field(default_factory=dict, repr=False)  # by global shapes
    _seen: dict[Any, Compiled] = field(default_factory=dict, repr=False)  # by shards' shapes
    _last: Compiled | None = field(default=None, repr=False)
    _shapes: dict[tuple[str, tuple[int, ...]], tuple[int, ...]] = field(default_factory=dict, repr=False)
    # Whole shapes of placed shards. An uneven batch may look like another one on some ranks and not on others.
    _placed: Any = field(default_factory=WeakIdKeyDictionary, repr=False)
    _alike: bool = field(default=False, repr=False)  # whether shards of one shape were of different wholes

    def __post_init__(self) -> None:
        try:
            self._signature = inspect.signature(self.fn)
        except ValueError as error:
            raise TypeError(
                f"{self.fn!r} does not tell its arguments' names, which specs match; wrap it: lambda x: fn(x)"
            ) from error
        for name in self.donate:
            if name not in self._signature.parameters:
                known = ", ".join(self._signature.parameters)
                raise ValueError(f"donate names {name!r}, but the function's arguments are {known}")

    # --- running ---

    def __call__(self, *args: Tree, **kwargs: Tree) -> Tree:
        """Runs on this process's shards (on the virtual backend: on those of all ranks), as `place` gives them."""
        tracer = current_tracer()
        if tracer is not None:
            if self.module is not None:
                tracer.learn(self.module)
            return self.fn(*args, **kwargs)
        if kwargs:  # in the order of the signature
            bound = self._signature.bind(*args, **kwargs)
            args, kwargs = bound.args, bound.kwargs
        flat, spec = pytree.tree_flatten((args, kwargs))
        key: Any = spec, tuple([_look(value) for value in flat])
        if self._alike:
            key = key, tuple([self._placed.get(x) for x in flat if isinstance(x, (torch.Tensor, PerRank))])
        compiled = self._seen.get(key)
        if compiled is None:
            compiled = self._seen[key] = self.compiled(*args, **kwargs)
        self._last = compiled
        outputs = compiled.run([value for value in flat if isinstance(value, (torch.Tensor, PerRank))])
        return pytree.tree_unflatten(outputs, compiled.traced.out_spec)

    def place(self, *args: Tree, **kwargs: Tree) -> Any:
        """Whole tensors as the shards that this process holds, by the specs.

        Args:
            args: the function's leading arguments, whole.
            kwargs: arguments by name.

        Returns:
            the same trees of shards: one tree for one argument, a tuple for several.
        """
        bound = self._signature.bind_partial(*args, **kwargs)
        self._place(bound)
        return self._as_given(bound)

    def _place(self, bound: inspect.BoundArguments) -> None:
        for name, tree in bound.arguments.items():
            leaves = leaves_of({name: tree})
            self._resolve(leaves)
            values = []
            for leaf in leaves:
                if leaf.layout is None:
                    values.append(leaf.value)
                    continue
                shards = self.backend.scatter(leaf.value, leaf.layout)
                whole, local = tuple(leaf.value.shape), (leaf.name, self.backend.local_shape(shards))
                self._alike |= self._shapes.setdefault(local, whole) != whole
                self._shapes[local] = self._placed[shards] = whole
                values.append(shards)
            bound.arguments[name] = pytree.tree_unflatten(values, pytree.tree_structure(tree))

    def _as_given(self, bound: inspect.BoundArguments) -> Any:
        """The arguments one after the other, as they are written in a call; a single one alone."""
        values: list[Any] = []
        for name, tree in bound.arguments.items():
            kind = self._signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_POSITIONAL:
                values.extend(tree)
            elif kind is inspect.Parameter.VAR_KEYWORD:
                values.extend(tree.values())
            else:
                values.append(tree)
        return values[0] if len(values) == 1 else tuple(values)

    def gather(self, *args: Tree, **kwargs: Tree) -> Any:
        """Shards of arguments, as `place` gives them, as whole tensors on every process."""
        bound = self._signature.bind_partial(*args, **kwargs)
        for name, tree in bound.arguments.items():
            leaves = leaves_of({name: tree})
            self._resolve([self._global(leaf) for leaf in leaves], leaves)
            values = [
                leaf.value if leaf.layout is None else self.backend.gather(leaf.value, leaf.layout) for leaf in leaves
            ]
            bound.arguments[name] = pytree.tree_unflatten(values, pytree.tree_structure(tree))
        return self._as_given(bound)

    def gather_output(self, output: Tree, *args: Tree, **kwargs: Tree) -> Tree:
        """What a call with these arguments (shards; by default the last call) returned, as whole tensors everywhere."""
        compiled = self.compiled(*args, **kwargs) if args or kwargs else self._last
        if compiled is None:
            raise ValueError("nothing was called yet; pass the arguments of the call whose output this is")
        spec = compiled.traced.out_spec
        layouts = spec.flatten_up_to(compiled.output_layouts)
        values = [
            leaf if layout is None else self.backend.gather(leaf, layout)
            for leaf, layout in zip(spec.flatten_up_to(output), layouts, strict=True)
        ]
        return pytree.tree_unflatten(values, spec)

    def whole(self, *args: Tree, **kwargs: Tree) -> Tree:
        """Places whole arguments, runs, and gathers the output: the function itself, by way of the mesh."""
        bound = self._signature.bind(*args, **kwargs)
        self._place(bound)
        output = self(*bound.args, **bound.kwargs)
        return self.gather_output(output)

    # --- asking ---

    def compiled(self, *args: Tree, **kwargs: Tree) -> Compiled:
        """The programs that a call with these arguments (shards) runs."""
        leaves = self._bind(args, kwargs)
        return self._compiled(tuple(self._global(leaf) for leaf in leaves), args, kwargs)

    def program(self, *args: Tree, **kwargs: Tree) -> Program:
        """The program of this process's rank (rank 0's on other backends) for whole arguments of these shapes.

        Nothing runs: tensors on `meta` will do. What `place` gives on the virtual backend is whole arguments too.
        """
        compiled = self._for_whole(args, kwargs)
        return compiled.programs[min(compiled.programs)]

    def _for_whole(self, args: Any, kwargs: Any) -> Compiled:
        leaves = self._bind(args, kwargs)
        whole = tuple(self._global(leaf) if isinstance(leaf.value, PerRank) else leaf for leaf in leaves)
        return self._compiled(whole, args, kwargs)

    def explain(self, *args: Tree, **kwargs: Tree) -> Explanation:
        """Each collective of a call with these whole arguments: axis, bytes, line, cause, alternative."""
        compiled = self._for_whole(args, kwargs)
        silent = [leaf.name for leaf in compiled.leaves if leaf.parameter is not None and leaf.is_silent]
        return explain(compiled.programs[min(compiled.programs)], replicated=silent)

    def memory(self, *args: Tree, **kwargs: Tree) -> MemoryReport:
        """The peak memory per rank of a call with these whole arguments, and what is alive at it."""
        return memory(self.program(*args, **kwargs))

    def cost(self, *args: Tree, device: str | Device = "H100", **kwargs: Tree) -> CostReport:
        """The predicted seconds of a call with these whole arguments on a device, and what they are made of."""
        chosen = DEVICES[device] if isinstance(device, str) else device
        return cost(self.program(*args, **kwargs), chosen)

    # --- the way there ---

    def _bind(self, args: Any, kwargs: Any) -> list[Leaf]:
        bound = self._signature.bind(*args, **kwargs)
        return leaves_of(dict(bound.arguments), self._signature)

    def _global(self, leaf: Leaf) -> Leaf:
        """The leaf with a shard's shape turned into that of the whole."""
        if not leaf.is_tensor:
            return leaf
        local = self.backend.local_shape(leaf.value)
        known = self._placed.get(leaf.value, self._shapes.get((leaf.name, local)))
        if known is None:
            known = global_shape(leaf, local, self.mesh, self.specs, self.sizes, self.backend)
            self._shapes[leaf.name, local] = known
        return leaf.with_shape(known)

    def _resolve(self, whole: Sequence[Leaf], into: Sequence[Leaf] | None = None) -> None:
        resolve_leaves(whole, self.mesh, self.specs, self.sizes)
        if into is not None:
            for source, target in zip(whole, into, strict=True):
                target.copy_layouts(source)

    def _compiled(self, leaves: Sequence[Leaf], args: Any, kwargs: Any) -> Compiled:
        key = tuple(leaf.key for leaf in leaves), pytree.tree_structure((args, kwargs))
        found = self._cache.get(key)
        if found is None:
            with _collecting_no_garbage():
                found = self._build(leaves, args, kwargs)
            self._cache[key] = found
        return found

    def _build(self, leaves: Sequence[Leaf], args: Any, kwargs: Any) -> Compiled:
        unused = resolve_leaves(leaves, self.mesh, self.specs, self.sizes, whole=True).unused
        anchors = {key: self.specs[key] for key in unused}
        bound = self._signature.bind(*args, **kwargs)
        tree = pytree.tree_unflatten(
            [leaf.abstract() for leaf in leaves], pytree.tree_structure(dict(bound.arguments))
        )
        call = _by_name(self.fn, self._signature)
        device = next((d for d in (leaf.device for leaf in leaves) if d is not None), torch.device("cpu"))
        traced = trace(
            call, (), tree, module=self.module, anchors=anchors, mesh=self.mesh, sizes=self.sizes, device=device
        )
        met = traced.modules, traced.attentions
        resolve_leaves(leaves, self.mesh, self.specs, self.sizes, *met, whole=True, complete=True)
        graph = clean(traced.graph)
        traced = replace(traced, graph=graph)
        tensors = [leaf for leaf in leaves if leaf.is_tensor]
        donated, out_layouts = donated_outputs(traced, leaves, self.donate)
        out_layouts = output_layouts(traced, self.mesh, self.specs, self.sizes, out_layouts)
        laid_out = partition(
            graph, self.mesh, [leaf.as_input() for leaf in tensors], out_layouts, self._parse_marker
        )
        if self.strict:
            check_strict(laid_out)
        programs = {
            rank: scheduled(lower(laid_out, rank, device=device), donated, laid_out.is_even, self.overlap, self.panels)
            for rank in self.backend.ranks
        }
        run = self.backend.load(programs)
        any_program = next(iter(programs.values()))
        layouts = pytree.tree_unflatten(list(any_program.output_layouts), traced.out_spec)
        valueless = tuple(replace(leaf, value=leaf.abstract()) for leaf in leaves)  # lest it outlive the call
        return Compiled(traced, laid_out, programs, valueless, layouts, run)

    def _parse_marker(self, pattern: str, shape: tuple[int, ...]) -> Layout:
        return Layout.parse(pattern, shape, self.mesh, self.sizes, "a constrained value")


def _look(value: Any) -> Any:
    """What tells one argument from another: shapes and dtypes of tensors, constants themselves."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype
    if isinstance(value, PerRank):
        return tuple([(shard.shape, shard.dtype) for shard in value.shards])
    return type(value), value


@contextlib.contextmanager
def _collecting_no_garbage() -> Iterator[None]:
    """Python's cycle collector would walk the growing program again and again, and find nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def scheduled(
    program: Program, donated: Sequence[tuple[int, int]], even: bool, overlapped: bool = True, n_panels: int = 1
) -> Program:
    """A rank's program after all passes: what can wait waits, memory is reused, collectives overlap or are joined.

    Ranks have to launch in one order. Where shards are not `even` some ranks have other ops than others, for empty
    shards: what could wait is left where it is, each collective travels alone, and operands are gathered whole. Where
    nothing is to be `overlapped`, each collective is awaited at once; the rest is the same, so that results are too, to
    the bit.
    """
    program = panels(merge(program), n_panels if even else 1)
    program = overlap(inplace(delay(accumulate(program)) if even else program, donated), early=even)
    program = bounded(prefetch(arrival(bucket(program))) if even else program)
    return program if overlapped else blocking(program)


def _by_name(fn: Callable[..., Any], signature: inspect.Signature) -> Callable[..., Any]:
    """The function with all its arguments by name, `*args` and `**kwargs` included."""

    def call(**arguments: Any) -> Any:
        bound = signature.bind_partial()
        bound.arguments.update({name: arguments[name] for name in signature.parameters if name in arguments})
        return fn(*bound.args, **bound.kwargs)

    return call


class ShardedModule(Sharded):
    """A module on a mesh, as a function `(params, *inputs)` of its parameters; `params` are its own, placed."""

    params: Tree


def shard(
    target: torch.nn.Module | Callable[..., Any],
    mesh: Mesh,
    specs: Mapping[str, str],
    *,
    donate: str | Sequence[str] = (),
    strict: bool = False,
    sizes: Mapping[str, int] | None = None,
    backend: str | Backend | None = None,
    overlap: bool = True,
    panels: int = 1,
) -> Any:
    """The same function on a mesh.

    Args:
        target: a pure function of pytrees of tensors, or a module, which becomes the function `(params, *inputs)`.
        mesh: the mesh.
        specs: name pattern -> layout, for parameters, inputs, outputs and module outputs; what no pattern matches is
            replicated.
        donate: arguments that are not used after the call: the outputs that take their place reuse their memory.
        strict: whether a collective that no spec asked for is an error.
        sizes: sizes of factors that patterns name without saying.
        backend: "virtual" (all ranks in this process), "distributed" (a process a rank), "count" (nothing runs) or a
            backend; by default distributed where torch.distributed is initialised, else virtual.
        overlap: whether collectives run while other ops compute; the result is the same to the bit, so False is for
            finding out what overlap hides.
        panels: in how many panels of the contracted dim the operands of a product are gathered, where all ranks' shards
            are as large: as many bytes, in more messages, for a lower peak (SUMMA).

    Returns:
        a `Sharded`: call it with shards as its `place` gives them.

    Raises:
        LayoutError, SpecError: a pattern that does not fit.
        TraceError: a function that has no one program.
        MissingRule: an op that no rule covers.

    >>> step = shard(lambda x, w: x @ w, Mesh("tp=2"), {"w": "i (tp o)"}, backend="virtual")
    >>> x, w = torch.ones(2, 3), torch.ones(3, 4)
    >>> step.whole(x, w)
    tensor([[3., 3., 3., 3.],
            [3., 3., 3., 3.]])
    """
    names = (donate,) if isinstance(donate, str) else tuple(donate)
    chosen = backend if isinstance(backend, Backend) else choose_backend(backend, mesh)
    if not isinstance(target, torch.nn.Module):
        return Sharded(target, mesh, specs, chosen, names, strict, dict(sizes or {}), None, overlap, panels)
    module = target
    params = {name: p.detach() for name, p in module.named_parameters()}

    def call(params: Tree, *args: Any, **kwargs: Any) -> Any:
        return torch.func.functional_call(module, params, args, kwargs)

    first = inspect.Parameter("params", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [first, *inspect.signature(module.forward).parameters.values()]
    )
    sharded = ShardedModule(call, mesh, specs, chosen, names, strict, dict(sizes or {}), module, overlap, panels)
    sharded.params = sharded.place(params=params)
    return sharded
