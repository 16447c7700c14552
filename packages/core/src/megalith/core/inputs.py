"""How does each input of a sharded function live? Names of leaves, the specs that match them, and their layouts."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megalith.core import _compat
from megalith.core._compat import pytree
from megalith.core.backends.backend import Backend, PerRank
from megalith.core.trace import Traced
from megalith.sharding.graph import Ref
from megalith.sharding.layout import Layout
from megalith.sharding.mesh import Mesh
from megalith.sharding.partition import Input
from megalith.sharding.specs import Resolution, SpecError, resolve

__all__ = ["Leaf", "donated_outputs", "global_shape", "is_output", "leaves_of", "output_layouts", "resolve_leaves"]

PARAMETERS = "params"
_NO_SPEC = ": no spec, replicated"


@dataclass
class Leaf:
    """One leaf of the arguments.

    Args:
        name: its dotted path, the argument's name first: `params.layers.0.weight`.
        value: a tensor, shards, or a constant.
        shape, dtype: the global ones, of a tensor.
        layout: where it is at rest; None for constants.
        used: where a parameter is while it computes, if elsewhere.
        grad: where its gradient is: by a `:grad` entry, else where its state is by a `:state` entry.
        cause: the spec that decided.
    """

    name: str
    value: Any
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    layout: Layout | None = None
    used: Layout | None = None
    grad: Layout | None = None
    cause: str = ""

    @property
    def is_tensor(self) -> bool:
        return isinstance(self.value, (torch.Tensor, PerRank))

    @property
    def device(self) -> torch.device | None:
        """Where its elements are; None where there are none."""
        tensor = self.value.shards[0] if isinstance(self.value, PerRank) else self.value
        held = isinstance(tensor, torch.Tensor) and tensor.device.type != "meta"
        return tensor.device if held else None

    @property
    def parameter(self) -> str | None:
        """The name of the parameter that it is: what follows `params` in its path."""
        parts = self.name.split(".")
        return ".".join(parts[parts.index(PARAMETERS) + 1 :]) if PARAMETERS in parts[:-1] else None

    @property
    def is_silent(self) -> bool:
        """Whether no spec speaks of it."""
        return self.cause.endswith(_NO_SPEC)

    @property
    def key(self) -> Any:
        return (self.name, self.shape, self.dtype) if self.is_tensor else (self.name, self.value)

    def with_shape(self, shape: tuple[int, ...]) -> Leaf:
        return replace(self, shape=shape)

    def copy_layouts(self, other: Leaf) -> None:
        self.layout, self.used, self.grad, self.cause = other.layout, other.used, other.grad, other.cause

    def abstract(self) -> Any:
        """What the function is traced with."""
        if not self.is_tensor:
            return self.value
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def as_input(self) -> Input:
        assert self.layout is not None
        is_parameter = self.parameter is not None or self.used is not None
        return Input(self.layout, self.used, self.grad, is_parameter, self.cause)


def leaves_of(arguments: Mapping[str, Any], signature: inspect.Signature | None = None) -> list[Leaf]:
    """The leaves of arguments by name, in the order of the flattened dict."""
    leaves = []
    for path, value in pytree.tree_flatten_with_path(dict(arguments))[0]:
        leaf = Leaf(_compat.key_path(path), value)
        if isinstance(value, torch.Tensor):
            leaf.shape, leaf.dtype = tuple(value.shape), value.dtype
        elif isinstance(value, PerRank):
            leaf.dtype = value.shards[0].dtype
        leaves.append(leaf)
    return leaves


def resolve_leaves(
    leaves: Sequence[Leaf],
    mesh: Mesh,
    specs: Mapping[str, str],
    sizes: Mapping[str, int],
    modules: Collection[str] = (),
    attentions: Collection[str] = (),
    whole: bool = False,
    complete: bool = False,
) -> Resolution:
    """Gives each tensor leaf the layouts that the specs say.

    Leaves outside of the parameters are optimizer state to the specs: `:state` entries are for them, and the stored
    side of `stored -> used`. A function without parameters (nothing in it is called `params`) has no state either: what
    a spec stores and uses in two ways is then a parameter of it.

    Args:
        whole: whether these are all leaves of the function, so that it is known whether it has parameters.
        complete: whether entries that match nothing are an error.

    Raises:
        SpecError: an entry that does not fit, or names a tier that nothing pages yet; if `complete`, one that matches
            nothing.
    """
    tensors = {leaf.name: leaf for leaf in leaves if leaf.is_tensor}
    table = {key: pattern for key, pattern in specs.items() if not is_output(key)}
    has_parameters = not whole or any(leaf.parameter is not None for leaf in tensors.values())
    outside = {name for name, leaf in tensors.items() if leaf.parameter is None and leaf.shape}
    states = outside if has_parameters else set()
    found = resolve(
        table,
        {name: leaf.shape for name, leaf in tensors.items()},
        mesh,
        sizes,
        aliases={name: _tails(name) for name in tensors},
        states=states,
        modules=modules,
        attentions=attentions,
        complete=complete,
    )
    for name, leaf in tensors.items():
        lives = found.leaves[name]
        leaf.layout, leaf.cause = lives.stored, lives.cause or f"{name}{_NO_SPEC}"
        leaf.used = lives.used if leaf.parameter is not None or not has_parameters else None
        for layout in (lives.stored, lives.used):
            if layout is not None and layout.tier != "device":
                raise SpecError(
                    f"{name}: {lives.cause} asks for @{layout.tier}, and paging between tiers is not there yet; "
                    f"leave '@{layout.tier}' out"
                )
        # Of a split state each part needs its part of the gradient only: it is made there, unless an entry says else.
        grad = lives.grad or lives.state
        leaf.grad = grad.layout if grad is not None and leaf.parameter is not None else None
    return found


def is_output(key: str) -> bool:
    """Whether an entry of a spec table is for outputs: `output`, or a path that starts with it."""
    return key.split(".")[0].split(":")[0] == "output"


def output_layouts(
    traced: Traced, mesh: Mesh, specs: Mapping[str, str], sizes: Mapping[str, int], chosen: list[Layout | None]
) -> list[Layout | None]:
    """The layouts of outputs: those already chosen, else what an `output...` entry says."""
    table = {key: pattern for key, pattern in specs.items() if is_output(key)}
    if not table:
        return chosen
    spec = traced.out_spec
    tree = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    paths = [path for path, _ in pytree.tree_flatten_with_path(tree)[0]]
    names = [".".join(part for part in ("output", _compat.key_path(path)) if part) for path in paths]
    types = {
        name: traced.graph.types[o.id].shape
        for name, o in zip(names, traced.graph.outputs, strict=True)
        if isinstance(o, Ref)
    }
    found = resolve(table, types, mesh, sizes)
    given = [found.leaves[n].stored if n in types and found.leaves[n].key is not None else None for n in names]
    return [layout or other for layout, other in zip(chosen, given, strict=True)]


def _tails(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[i:]) for i in range(1, len(parts))]


def global_shape(
    leaf: Leaf,
    local: Any,
    mesh: Mesh,
    specs: Mapping[str, str],
    sizes: Mapping[str, int],
    backend: Backend,
) -> tuple[int, ...]:
    """The shape of the whole of which a process has this shard, if all ranks have as much.

    Raises:
        ValueError: the shard's shape does not say; `place` the whole once, or pass whole shapes to `program`.
    """
    shapes = local if isinstance(leaf.value, PerRank) else (local,)
    shape = list(shapes[0])
    probe = Leaf(leaf.name, leaf.value, tuple(shape), leaf.dtype)
    for _ in range(2):
        resolve_leaves([probe], mesh, specs, sizes)
        assert probe.layout is not None
        whole = tuple(
            n * _factor(dim.axes, mesh) for n, dim in zip(shapes[0], probe.layout.dims, strict=True)
        )
        probe = Leaf(leaf.name, leaf.value, whole, leaf.dtype)
    resolve_leaves([probe], mesh, specs, sizes)
    layout = probe.layout
    assert layout is not None
    if tuple(layout.local_shape(r) for r in backend.ranks) != tuple(shapes):
        raise ValueError(
            f"{leaf.name}: shards of shape {shapes} under {layout} do not say how large the whole is; "
            "place the whole tensor once with .place(...), or build the program with .program(...) on whole shapes"
        )
    return probe.shape


def _factor(axes: Sequence[str], mesh: Mesh) -> int:
    n = 1
    for axis in axes:
        n *= mesh.sizes[axis]
    return n


def donated_outputs(
    traced: Traced, leaves: Sequence[Leaf], donate: Sequence[str]
) -> tuple[list[tuple[int, int]], list[Layout | None]]:
    """Which outputs take the place of donated inputs, and the layouts that this gives them.

    A donated argument is matched with the first part of the output that has its structure and shapes.

    Returns:
        pairs `(input position, output position)`, and for each output leaf a layout or None.
    """
    tensors = [leaf for leaf in leaves if leaf.is_tensor]
    spec = traced.out_spec
    layouts: list[Layout | None] = [None] * spec.num_leaves
    parts = _parts(spec)
    pairs: list[tuple[int, int]] = []
    used: set[int] = set()
    for name in donate:
        mine = [(i, leaf) for i, leaf in enumerate(tensors) if leaf.name.split(".")[0] == name]
        for number, (start, n) in enumerate(parts):
            if number in used or n != len(mine):
                continue
            outputs = traced.graph.outputs[start : start + n]
            types = [traced.graph.types[o.id] if isinstance(o, Ref) else None for o in outputs]
            pairs_of = zip(types, mine, strict=True)
            if all(t is not None and (t.shape, t.dtype) == (leaf.shape, leaf.dtype) for t, (_, leaf) in pairs_of):
                used.add(number)
                for k, (i, leaf) in enumerate(mine):
                    layouts[start + k] = leaf.layout
                    pairs.append((i, start + k))
                break
        else:
            raise ValueError(
                f"{name!r} is donated, but no part of the output has its structure and shapes; return the new "
                f"{name!r}, or do not donate it"
            )
    return pairs, layouts


def _parts(spec: Any) -> list[tuple[int, int]]:
    """First leaf and number of leaves of the whole output and of each of its children."""
    parts = [(0, spec.num_leaves)]
    start = 0
    for child in spec.children():
        parts.append((start, child.num_leaves))
        start += child.num_leaves
    return parts
