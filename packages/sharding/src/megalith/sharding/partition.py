"""Where does every value of a graph live, and what has to move? Local, predictable propagation, node by node.

Takes a graph and the layouts of its inputs. Gives a `Partition`: a straight list of runs (a node on local shards) and
moves (a value from one layout to another). After this, every operand of every run has the layout that the run names.

Each op's rule names its factors. For each factor the operands that hold it propose the digits they have:

1. A contracted factor (in no output; an output that lacks a sharded factor is partial) takes what all its operands have
   in common, major digits first. Where one holds it finer it keeps that, if nothing else of the op uses the axis: the
   other operands are sliced, which is free.
2. Another factor takes the finest proposal that the others are prefixes of; of proposals that disagree the one of a
   parameter, else that of the operand with the most bytes.
3. A mesh axis goes to one factor only. Major digits are served first; at equal depth the factor wins on which the
   result is wanted to have it (a gradient, `constrain`), then a parameter's, then the one whose loss would move more
   bytes, then the one written first.

A partial sum is carried through sums of values that are partial alike, through views, and through products with a
number; anything else resolves it, once, for all its users, into the layout that its first user asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megalith.sharding import markers
from megalith.sharding.claims import Claim, carried_sums, contiguous, extend, grant, propose, ring_of
from megalith.sharding.graph import Call, Graph, Local, Node, Origin, Ref, TensorType
from megalith.sharding.layout import Dim, Layout, replicated
from megalith.sharding.mesh import Mesh
from megalith.sharding.rule import Rule, rule_of
from megalith.sharding.transition import plan
from megalith.sharding.versions import Input, Move, Partition, Run, Version
from megalith.sharding.views import regroup

__all__ = ["Input", "Move", "Partition", "Run", "Version", "partition"]


def partition(
    graph: Graph,
    mesh: Mesh,
    inputs: Sequence[Input],
    outputs: Sequence[Layout | None] | None = None,
    parse: Callable[[str, tuple[int, ...]], Layout] | None = None,
) -> Partition:
    """Lays a graph out over a mesh.

    Args:
        graph: the graph, with blocks inlined or not.
        mesh: the mesh.
        inputs: for each input of the graph, how it lives.
        outputs: for each output the layout it is to have; None leaves it as it comes, partial values resolved.
        parse: how a marker's pattern becomes a layout of a given shape.

    Raises:
        MissingRule: an op that no table knows.
    """
    parse = parse or (lambda pattern, shape: Layout.parse(pattern, shape, mesh))
    return _walk(graph, mesh, tuple(inputs), outputs, parse, {}, keep_partial=False)


def _walk(
    graph: Graph,
    mesh: Mesh,
    inputs: tuple[Input, ...],
    outputs: Sequence[Layout | None] | None,
    parse: Callable[[str, tuple[int, ...]], Layout],
    blocks: dict[Any, Partition],
    keep_partial: bool,
    wanted: Sequence[Layout | None] = (),
) -> Partition:
    state = _State(graph, mesh, parse, blocks)
    for value, given in zip(graph.inputs, inputs, strict=True):
        state.add_input(value, given)
    for value in graph.constants:
        state.produce(value, replicated(graph.types[value].shape, mesh))
    for output, layout in zip(graph.outputs, outputs or wanted, strict=False):
        if isinstance(output, Ref) and layout is not None:
            state.wanted.setdefault(output.id, layout)
    state.find_wanted()
    for node in graph.nodes:
        state.visit(node)
    finished = []
    asked = outputs if outputs is not None else [None] * len(graph.outputs)
    for output, layout in zip(graph.outputs, asked, strict=True):
        finished.append(state.finish(output, layout, keep_partial) if isinstance(output, Ref) else output)
    return Partition(
        graph,
        mesh,
        tuple(Version(v, i.stored) for v, i in zip(graph.inputs, inputs, strict=True)),
        tuple(Version(v, replicated(graph.types[v].shape, mesh)) for v in graph.constants),
        tuple(state.steps),
        tuple(finished),
        state.types,
    )


# --- the walk --------------------------------------------------------------------------------------


@dataclass
class _State:
    graph: Graph
    mesh: Mesh
    parse: Callable[[str, tuple[int, ...]], Layout]
    blocks: dict[Any, Partition]
    steps: list[Run | Move] = field(default_factory=list)
    inputs: dict[int, Input] = field(default_factory=dict)
    versions: dict[int, list[Version]] = field(default_factory=dict)
    parameter_of: dict[int, int] = field(default_factory=dict)  # value -> the parameter that it is a view of
    wanted: dict[int, Layout] = field(default_factory=dict)
    types: dict[int, TensorType] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    view_of: dict[int, Node] = field(default_factory=dict)  # value -> the permutation or reshape that makes it
    next_value: int = 0

    def __post_init__(self) -> None:
        self.types = dict(self.graph.types)
        self.next_value = max(self.types, default=-1) + 1
        self.names = dict(zip(self.graph.inputs, self.graph.names, strict=True))

    # --- versions of values ---

    def add_input(self, value: int, given: Input) -> None:
        self.inputs[value] = given
        self.versions[value] = [Version(value, given.stored)]
        if given.is_parameter:
            self.parameter_of[value] = value

    def produce(self, value: int, layout: Layout) -> Version:
        version = Version(value, layout)
        self.versions[value] = [version]
        return version

    def current(self, value: int, origin: Origin) -> Version:
        """The version that a node of this phase starts from: of a stored parameter the gathered one."""
        given = self.inputs.get(value)
        if given is not None and given.used is not None and origin.phase != "update":
            for version in self.versions[value]:
                if version.epoch == origin.phase:
                    return version
            stored = self.versions[value][0]
            target = Version(value, given.used, origin.phase)
            self._move(stored, target, self._about(value, origin), f"{given.cause}: stored -> used")
            return target
        versions = [v for v in self.versions[value] if not v.epoch]
        return next((v for v in versions if not v.layout.partial), versions[0])

    def fetch(self, value: int, layout: Layout, origin: Origin, cause: str, asked: bool = True) -> Version:
        """The value in exactly this layout, moved if need be."""
        start = self.current(value, origin)
        candidates = [start, *(v for v in self.versions[value] if v.epoch == start.epoch and v is not start)]
        for version in candidates:
            if version.layout == layout:
                return version
        usable = [v for v in candidates if not v.layout.partial] or candidates[:1]
        size = self.types[value].dtype.itemsize
        at_root = self._fetch_root(value, layout, usable, origin, cause, asked)
        if at_root is not None:
            return at_root
        best = min(usable, key=lambda v: plan(v.layout, layout, size).seconds) if len(usable) > 1 else usable[0]
        target = Version(value, layout, best.epoch)
        self._move(best, target, origin, cause, asked)
        return target

    def _fetch_root(
        self, value: int, layout: Layout, usable: list[Version], origin: Origin, cause: str, asked: bool
    ) -> Version | None:
        """A view in another layout, by way of what it views: all views of one tensor then share one collective."""
        node = self.view_of.get(value)
        size = self.types[value].dtype.itemsize
        if node is None or usable[0].epoch or not all(plan(v.layout, layout, size).bytes_received for v in usable):
            return None
        (operand,) = node.operands
        alone = len(self.graph.users[operand.id]) == 1 and Ref(operand.id) not in self.graph.outputs
        if alone or self.current(operand.id, origin).epoch:
            return None
        wanted = _before_view(node, layout, self.types[operand.id].shape)
        if wanted is None:
            return None
        root = self.fetch(operand.id, wanted, origin, cause, asked)
        target = Version(value, layout)
        self.versions[value].append(target)
        self.steps.append(Run(node, (root,), (target,)))
        return target

    def _move(self, source: Version, target: Version, origin: Origin, cause: str, asked: bool = True) -> None:
        self.steps.append(Move(source, target, self.types[source.value].dtype.itemsize, origin, cause, asked))
        self.versions[source.value].append(target)

    def fresh(self, like: TensorType) -> int:
        value = self.next_value
        self.next_value += 1
        self.types[value] = like
        return value

    # --- layouts that later nodes ask for ---

    def find_wanted(self) -> None:
        """For gradients, the layout that their marker will ask for, carried back through views to the producer."""
        for node in reversed(self.graph.nodes):
            if node.op is markers.like:
                target = self.compute_layout(node.args[1].id)
            elif node.op is markers.constrain:
                target = self.parse(node.args[1], self.types[node.outputs[0]].shape)
            elif node.name in _VIEWS and node.outputs[0] in self.wanted:
                before = _before_view(node, self.wanted[node.outputs[0]], self.types[node.operands[0].id].shape)
                if before is None:
                    continue
                target = before
            else:
                continue
            self.wanted.setdefault(node.args[0].id, target)

    def compute_layout(self, value: int) -> Layout:
        """Where a parameter is while it computes: its gradient is made there, and then scattered over storage axes."""
        given = self.inputs.get(self.root_of(value))
        return replicated(self.types[value].shape, self.mesh) if given is None else given.used or given.stored

    def grad_layout(self, value: int) -> Layout:
        root = self.root_of(value)
        given = self.inputs.get(root)
        if given is not None:
            return given.grad or given.stored
        return replicated(self.types[value].shape, self.mesh)

    def root_of(self, value: int) -> int:
        return self.parameter_of.get(value, value)

    # --- nodes ---

    def visit(self, node: Node) -> None:
        if node.op is markers.constrain:
            layout = self.parse(node.args[1], self.types[node.outputs[0]].shape)
            self._rename(node, layout, f"constrain {node.args[1]!r}")
        elif node.op is markers.like:
            layout = self.grad_layout(node.args[1].id)
            root = self.root_of(node.args[1].id)
            given = self.inputs.get(root)
            about = replace(node, origin=self._about(root, node.origin))
            self._rename(about, layout, f"gradient as its parameter: {given.cause}" if given else "gradient")
        elif isinstance(node.op, Call):
            self._call(node, node.op)
        elif isinstance(node.op, Local):
            self._local(node, node.op)
        elif node.name == "aten.reshape.default":
            self._reshape(node)
        else:
            self._run(node)

    def _rename(self, node: Node, layout: Layout, cause: str) -> None:
        version = self.fetch(node.args[0].id, layout, node.origin, cause)
        out = self.produce(node.outputs[0], version.layout)
        self.steps.append(Run(replace(node, args=node.args[:1]), (version,), (out,)))

    def _reshape(self, node: Node) -> None:
        (operand,) = node.operands
        shape = self.types[node.outputs[0]].shape
        current = self.current(operand.id, node.origin)
        needed, result = regroup(current.layout, shape)
        cause = f"{node.name} to {list(shape)} needs whole blocks"
        version = self.fetch(operand.id, needed, node.origin, cause, asked=False)
        self._emit(node, (version,), (result,))
        if operand.id in self.parameter_of:
            self.parameter_of[node.outputs[0]] = self.parameter_of[operand.id]

    def _call(self, node: Node, call: Call) -> None:
        """A block: laid out once for each combination of operand layouts; partial operands are resolved before it."""
        primals = {at: self.current(ref.id, node.origin).layout.without_partial() for at, ref in call.primal_of}
        versions = []
        for position, ref in enumerate(node.operands):
            layout = primals.get(position, self.current(ref.id, node.origin).layout.without_partial())
            cause = "a cotangent lies as its primal" if position in primals else f"operand of {node.name}"
            versions.append(self.fetch(ref.id, layout, node.origin, cause))
        given = tuple(
            Input(version.layout, is_parameter=ref.id in self.parameter_of, cause=self._cause_of(ref.id))
            for version, ref in zip(versions, node.operands, strict=True)
        )
        made = iter(node.outputs)
        wanted = tuple(self.wanted.get(next(made)) if isinstance(o, Ref) else None for o in call.block.graph.outputs)
        key = (call.block, given, wanted)
        block = self.blocks.get(key)
        if block is None:
            graph = call.block.graph
            block = _walk(graph, self.mesh, given, None, self.parse, self.blocks, keep_partial=True, wanted=wanted)
            self.blocks[key] = block
        layouts = [o.layout if isinstance(o, Version) else None for o in block.outputs]
        outs = iter(node.outputs)
        produced = tuple(self.produce(next(outs), layout) for layout in layouts if layout is not None)
        self.steps.append(Run(node, tuple(versions), produced, block=block))

    def _local(self, node: Node, local: Local) -> None:
        """Code on shards: operands come as it asks for them, results are as it says."""
        versions = tuple(
            self.fetch(ref.id, layout, node.origin, f"{local.name} reads {layout}")
            for ref, layout in zip(node.operands, local.operands, strict=True)
        )
        self._emit(node, versions, local.outputs)

    def _about(self, value: int, origin: Origin) -> Origin:
        """The origin with the name of an input in place of a module."""
        return replace(origin, module=self.names[value]) if value in self.names else origin

    def _cause_of(self, value: int) -> str:
        given = self.inputs.get(self.root_of(value))
        return given.cause if given else ""

    def _emit(
        self,
        node: Node,
        operands: tuple[Version, ...],
        layouts: Sequence[Layout | None],
        indexed: tuple[str, ...] = (),
        ring: tuple[str, ...] = (),
    ) -> None:
        if node.name in _VIEWS:
            self.view_of[node.outputs[0]] = node
        outs = []
        for value, layout in zip(node.outputs, layouts, strict=True):
            outs.append(None if value < 0 or layout is None else self.produce(value, layout))
        self.steps.append(Run(node, operands, tuple(outs), indexed, ring_axes=ring))

    def _run(self, node: Node) -> None:
        operands = node.operands
        if node.name == "add_n":
            node, operands = self._sum_partials(node)
        types = tuple(self.types[r.id] for r in operands)
        out_types = tuple(self.types[o] for o in node.outputs if o >= 0)
        rule = rule_of(node, types, out_types)
        versions = tuple(self.current(r.id, node.origin) for r in operands)
        carried = carried_sums(rule, versions)
        held = tuple(v.layout.dims[rule.at] for v in versions) if rule.recut is not None else ()
        recut = rule.recut(held) if rule.recut is not None and any(dim.axes for dim in held) else None
        ring = ring_of(rule, versions)
        passed = tuple(dict.fromkeys(axis for dim in ring.values() for axis in dim.axes))
        taken = {*carried, *(recut.axes if recut is not None else ()), *passed}
        dims = self._assign(node, rule, operands, versions, taken) | ring
        by_parameter = {
            axis
            for ref, factors in zip(operands, rule.operands, strict=True)
            for factor in factors
            if ref.id in self.parameter_of and factor is not None
            for axis in dims[factor].axes
        }
        fetched = []
        for i, (ref, factors, version) in enumerate(zip(operands, rule.operands, versions, strict=True)):
            target = Layout(self.mesh, _dims_for(factors, dims, types[i].shape))
            if recut is not None:
                target = _with_dim(target, rule.at, held[i])
            if i in rule.linear and carried:
                target = target.with_partial(carried)
            pairs = zip(version.layout.dims, target.dims, strict=True)
            lost = [axis for before, after in pairs for axis in before.axes if axis not in after.axes]
            asked = all(axis in by_parameter and axis not in target.axes for axis in lost)
            granted = {axis for dim in dims.values() for axis in dim.axes}
            cause = _cause(node, version.layout, target, lost, granted)
            fetched.append(self.fetch(ref.id, target, node.origin, cause, asked))
        read = dict.fromkeys(f for fs in rule.operands for f in fs if f is not None)
        indexed = tuple(axis for factor in rule.indexed for axis in dims[factor].axes)
        layouts: list[Layout | None] = []
        found = iter(zip(rule.outputs, out_types, strict=True))
        for value in node.outputs:
            if value < 0:
                layouts.append(None)
                continue
            factors, kind = next(found)
            summed = {axis: rule.reduce for f in read if f not in factors and f not in ring for axis in dims[f].axes}
            layout = Layout(self.mesh, _dims_for(factors, dims, kind.shape))
            summed = {axis: op for axis, op in summed.items() if axis not in layout.axes}
            layout = layout.with_partial({**carried, **summed})
            layouts.append(layout if recut is None else _with_dim(layout, rule.at, recut))
        self._emit(node, tuple(fetched), layouts, indexed, passed)
        if node.name in _VIEWS and operands[0].id in self.parameter_of:
            self.parameter_of[node.outputs[0]] = self.parameter_of[operands[0].id]

    def _sum_partials(self, node: Node) -> tuple[Node, tuple[Ref, ...]]:
        """Of a sum of many, adds those first that are partial alike: they are then reduced once."""
        groups: dict[Any, list[Ref]] = {}
        for ref in node.operands:
            layout = self.current(ref.id, node.origin).layout
            groups.setdefault(layout.partial, []).append(ref)
        if len(groups) == 1:
            return node, node.operands
        terms = list(groups.pop((), []))
        groups = self._alike(groups, node.origin)
        if not terms and len(groups) == 1:
            (alike,) = groups.values()
            return replace(node, args=(tuple(alike),)), tuple(alike)
        for group in groups.values():
            if len(group) > 1:
                value = self.fresh(self.types[node.outputs[0]])
                self._run(replace(node, args=(tuple(group),), outputs=(value,)))
                group = [Ref(value)]
            terms.extend(group)
        return replace(node, args=(tuple(terms),)), tuple(terms)

    def _alike(self, groups: dict[Any, list[Ref]], origin: Origin) -> dict[Any, list[Ref]]:
        """Terms that are partial over different axes, made partial over all of them: free where they are whole."""
        ops = {op for partial in groups for _, op in partial}
        axes = {axis for partial in groups for axis, _ in partial}
        held = {a for group in groups.values() for ref in group for a in self.current(ref.id, origin).layout.axes}
        if len(groups) < 2 or ops != {"sum"} or axes & held:
            return groups
        together: list[Ref] = []
        for group in groups.values():
            for ref in group:
                layout = self.current(ref.id, origin).layout.with_partial(dict.fromkeys(axes, "sum"))
                value = self.fresh(self.types[ref.id])
                version = self.fetch(ref.id, layout, origin, "added to what is partial over more axes")
                out = self.produce(value, layout)
                self.steps.append(Run(Node(markers.constrain, (ref,), {}, (value,), origin), (version,), (out,)))
                together.append(Ref(value))
        return {tuple(axes): together}

    def _assign(
        self,
        node: Node,
        rule: Rule,
        operands: tuple[Ref, ...],
        versions: tuple[Version, ...],
        taken: set[str],
    ) -> dict[str, Dim]:
        """For each factor the dim that all operands and outputs will have, without the axes that are taken."""
        holders: dict[str, list[tuple[Dim, bool, int]]] = {}
        for ref, factors, version in zip(operands, rule.operands, versions, strict=True):
            nbytes = self.types[ref.id].nbytes
            by_parameter = ref.id in self.parameter_of
            for factor, dim in zip(factors, version.layout.dims, strict=True):
                if factor is not None:
                    holders.setdefault(factor, []).append((dim, by_parameter, nbytes))
        produced: dict[str, tuple[int, int, int]] = {}
        for number, (value, factors) in enumerate(zip([o for o in node.outputs if o >= 0], rule.outputs, strict=True)):
            for d, factor in enumerate(factors):
                if factor is not None:
                    produced.setdefault(factor, (number, value, d))
        claims = []
        for factor, held in holders.items():
            if factor in rule.blocked:
                continue
            claim = propose(factor, held, contracted=factor not in produced)
            if factor in produced:
                _, value, d = produced[factor]
                if value in self.wanted:
                    claim.wanted = frozenset(self.wanted[value].dims[d].axes)
            if factor in rule.indexed and not contiguous(claim.dim):
                continue
            claims.append(claim)
        for factor, (_, value, d) in produced.items():
            if factor not in holders and factor not in rule.blocked and value in self.wanted:
                dim = self.wanted[value].dims[d]
                if factor not in rule.indexed or contiguous(dim):
                    claims.append(Claim(factor, dim, True, self.types[value].nbytes))
        sender, place = rule.sent or ("", "")
        grant([claim for claim in claims if claim.factor != place], taken)
        granted = {claim.factor: claim.result() for claim in claims}
        free = taken - _axes_of(granted, sender)
        grant([claim for claim in claims if claim.factor == place], free)
        taken |= free
        granted = {claim.factor: claim.result() for claim in claims}
        for factor, held in holders.items():
            contracted = factor not in produced and factor not in rule.blocked
            if contracted:
                free = taken - _axes_of(granted, sender) if factor == place else taken
                granted[factor] = extend(granted.get(factor, Dim.of(held[0][0].size)), held, free)
                taken |= free
                if factor in rule.indexed and not contiguous(granted[factor]):
                    granted[factor] = Dim.of(held[0][0].size)
            granted.setdefault(factor, Dim.of(held[0][0].size))
        for factor, (_, value, d) in produced.items():
            granted.setdefault(factor, Dim.of(self.types[value].shape[d]))
        return granted

    def finish(self, output: Ref, layout: Layout | None, keep_partial: bool) -> Version:
        """An output in the layout asked for, or as it comes; partial only where that is allowed."""
        producer = self.graph.producers.get(output.id)
        made = self.graph.nodes[producer].origin if producer is not None else _OUTPUT
        origin = replace(made, phase=_OUTPUT.phase)
        version = self.current(output.id, origin)
        if keep_partial and layout is None:
            return version
        target = layout or version.layout.without_partial()
        return self.fetch(output.id, target, origin, "output" if layout is None else "spec of an output")


_OUTPUT = Origin("", "", "update")
_VIEWS = {"aten.permute.default", "aten.reshape.default"}


def _before_view(node: Node, layout: Layout, shape: tuple[int, ...]) -> Layout | None:
    """The layout of a view's operand (of this shape) that gives the view this layout by itself, or None."""
    if node.name == "aten.permute.default":
        order = [d % len(node.args[1]) for d in node.args[1]]
        return layout.with_dims(tuple(layout.dims[order.index(d)] for d in range(len(order))))
    needed, before = regroup(layout, shape)
    same = needed == layout and regroup(before, layout.shape) == (before, layout)
    return before if same else None


def _axes_of(granted: Mapping[str, Dim], factor: str) -> set[str]:
    return set(granted[factor].axes) if factor in granted else set()


def _dims_for(factors: Sequence[str | None], dims: Mapping[str, Dim], shape: tuple[int, ...]) -> tuple[Dim, ...]:
    return tuple(Dim.of(n) if f is None else dims[f] for f, n in zip(factors, shape, strict=True))


def _with_dim(layout: Layout, at: int, dim: Dim) -> Layout:
    return layout.with_dims((*layout.dims[:at], dim, *layout.dims[at + 1 :]))


def _cause(node: Node, before: Layout, after: Layout, lost: list[str], granted: set[str]) -> str:
    """Why an operand moves, in words; `lost` are the axes that leave their dim, `granted` those that the op uses."""
    if before == after:
        return ""
    if before.partial:
        return f"partial over {', '.join(before.partial_axes)}, read by {node.name}"
    moved = [axis for axis in lost if axis in after.axes]
    if moved:
        return f"{node.name} has {', '.join(moved)} on another dim"
    if lost:
        reason = "has the axis elsewhere" if granted & set(lost) else "needs a whole dim"
        return f"{node.name} {reason}: gather over {', '.join(lost)}"
    return f"{node.name} reads it with its other operands' layout"
