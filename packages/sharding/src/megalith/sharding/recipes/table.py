"""What does a recipe take and give? The spec table of one model: a layout for each of its tensors, as text.

A recipe is a function `Specs -> Specs`. It reads names and shapes and splits dims over mesh axes, on top of how they
are split already, so that recipes compose: `zero(3, "dp")` after `tensor_parallel("tp")` stores apart what the other
one uses.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias

import torch

from megalith.sharding.recipes.entries import Entry, entries_of

__all__ = ["Dims", "Leaf", "Recipe", "Specs", "dims_of", "specs_for", "split_dim"]

Dims: TypeAlias = tuple[str, ...]
"""A layout as one piece of text for each dim: `("(tp o)", "i")`."""


@dataclass(frozen=True)
class Leaf:
    """One tensor of a model: a parameter or an input.

    Args:
        shape: its global shape.
        used: its layout while it is computed with.
        stored: where it rests, if elsewhere (ZeRO-3): gathered at use.
        grad, state: where the gradient and the optimizer's state are, if not where the parameter rests.
    """

    shape: tuple[int, ...]
    used: Dims
    stored: Dims | None = None
    grad: Dims | None = None
    state: Dims | None = None

    @staticmethod
    def replicated(shape: Iterable[int]) -> Leaf:
        """A tensor of which every rank holds all."""
        shape = tuple(shape)
        return Leaf(shape, tuple(f"d{n}" for n in range(len(shape))))

    @property
    def rest(self) -> Dims:
        """Where it rests."""
        return self.used if self.stored is None else self.stored

    @property
    def pattern(self) -> str:
        """The entry of a spec table: `layout`, or `stored -> used`."""
        used = text_of(self.used)
        return used if self.rest == self.used else f"{text_of(self.rest)} -> {used}"


@dataclass(frozen=True)
class Specs(Mapping[str, str]):
    """A spec table, which is what `shard` takes: a mapping from name patterns to layouts. `str()` shows it as a table.

    Args:
        params: the parameters by name.
        inputs: the other inputs by name.
        anchors: layouts of module outputs, and of attention (`"*:attention"`), by pattern. Their dims named `batch`,
            `seq` and `heads` are cut as `cuts` says, whether those cuts come before the anchor or after.
        cuts: what comes before the local rest of the dims of that name in activations: `{"seq": "2 ~sp"}`.
    """

    params: Mapping[str, Leaf]
    inputs: Mapping[str, Leaf] = field(default_factory=dict)
    anchors: Mapping[str, str] = field(default_factory=dict)
    cuts: Mapping[str, str] = field(default_factory=dict)

    def map_params(self, change: Callable[[str, Leaf], Leaf]) -> Specs:
        """The table with each parameter's leaf changed: `change(name, leaf)`."""
        return replace(self, params={name: change(name, leaf) for name, leaf in self.params.items()})

    def map_inputs(self, change: Callable[[str, Leaf], Leaf]) -> Specs:
        """The table with each input's leaf changed."""
        return replace(self, inputs={name: change(name, leaf) for name, leaf in self.inputs.items()})

    def anchored(self, anchors: Mapping[str, str]) -> Specs:
        """The table with more layouts of module outputs."""
        return replace(self, anchors={**self.anchors, **anchors})

    def cutting(self, dim: str, axes: str, outside: bool = False) -> Specs:
        """The table with the `batch`, `seq` or `heads` of activations cut over more axes.

        Args:
            dim: which of them.
            axes: the axes, major to minor, with local factors where there are some: `2 ~sp`.
            outside: whether they are major to those that cut it already.
        """
        before = self.cuts.get(dim, "")
        text = f"{axes} {before}" if outside else f"{before} {axes}"
        return replace(self, cuts={**self.cuts, dim: text.strip()})

    def then(self, *recipes: Recipe) -> Specs:
        """The table after these recipes, first to last."""
        table = self
        for recipe in recipes:
            table = recipe(table)
        return table

    @cached_property
    def entries(self) -> dict[str, str]:
        """The table as a plain dict; layers that agree share an entry, with `*` for their number.

        Raises:
            ValueError: a parameter and an input that have one name.
        """
        if twice := sorted(self.params.keys() & self.inputs.keys()):
            raise ValueError(
                f"{twice[0]!r} is a parameter and an input, and an entry of that name would be for both; "
                f"name the input by its argument: {f'batch.{twice[0]}'!r}"
            )
        leaves = {**self.params, **self.inputs}
        found = entries_of({name: Entry(leaf.pattern) for name, leaf in leaves.items()})
        for role in ("grad", "state"):
            wanted = {name: _role_of(leaf, role) for name, leaf in leaves.items()}
            found |= {f"{key}:{role}": text for key, text in entries_of(wanted).items()}
        return {**found, **{key: self._cut(text) for key, text in self.anchors.items()}}

    def _cut(self, anchor: str) -> str:
        """An anchor with its named dims cut, but over no axis that a side of it has on another dim."""
        sides = []
        for side in anchor.split("->"):
            dims = dims_of(side)
            sides.append(text_of(tuple(self._cut_dim(dims, at) for at in range(len(dims)))))
        return " -> ".join(sides)

    def _cut_dim(self, dims: Dims, at: int) -> str:
        *before, name = dims[at].strip("()").split()
        elsewhere = set(re.findall(r"\w+", " ".join((*dims[:at], *dims[at + 1 :]))))
        words = [word for word in self.cuts.get(name, "").split() if word.lstrip("~") not in elsewhere]
        if all(word.isdigit() or word in before for word in words):
            return dims[at]
        return f"({' '.join([*words, *(word for word in before if word not in words), name])})"

    def __getitem__(self, key: str) -> str:
        return self.entries[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __str__(self) -> str:
        entries = self.entries
        width = max((len(key) for key in entries), default=0)
        return "\n".join(f"{key:<{width}}  {pattern}" for key, pattern in entries.items())


Recipe: TypeAlias = Callable[[Specs], Specs]


def specs_for(
    params: torch.nn.Module | Mapping[str, Any], inputs: Mapping[str, Any] | None = None, *recipes: Recipe
) -> Specs:
    """The spec table of a model under these recipes; without any, everything is replicated.

    Args:
        params: a module, or its parameters (tensors or shapes) by name: those that the sharded function gets.
        inputs: its other inputs (tensors or shapes) by name: `input_ids`, `labels`.
        recipes: applied first to last.

    >>> print(specs_for({"h.0.w": (4, 8), "h.1.w": (4, 8), "norm": (4,)}, {"x": (2, 4)}))
    h.*.w  d0 d1
    norm   d0
    x      d0 d1
    """
    named = dict(params.named_parameters()) if isinstance(params, torch.nn.Module) else params
    leaves = {name: Leaf.replicated(getattr(value, "shape", value)) for name, value in named.items()}
    fed = {name: Leaf.replicated(getattr(value, "shape", value)) for name, value in (inputs or {}).items()}
    return Specs(leaves, fed).then(*recipes)


def split_dim(dims: Dims, at: int, axes: str) -> Dims:
    """A layout with a dim cut over further mesh axes, minor to those that cut it already.

    Args:
        dims: the layout.
        at: which dim.
        axes: mesh axes, major to minor, with blanks between.

    >>> split_dim(("(3 tp o)", "e"), 0, "dp"), split_dim(("o", "e"), 1, "row"), split_dim(("(tp q 4 + tp k)",), 0, "dp")
    (('(3 tp dp o)', 'e'), ('o', '(row e)'), ('(tp dp q 4 + tp dp k)',))
    """
    inner = dims[at].strip().strip("()")
    words = [_inserted(word, axes) for word in inner.split("+")]
    return (*dims[:at], f"({' + '.join(words)})", *dims[at + 1 :])


def dims_of(pattern: str) -> Dims:
    """The dims of a layout's text.

    >>> dims_of("(tp o) i")
    ('(tp o)', 'i')
    """
    return tuple(re.findall(r"\([^()]*\)|[^\s()]+", pattern))


def text_of(dims: Dims) -> str:
    """A layout's dims as its text; a scalar's is `...`."""
    return " ".join(dims) or "..."


def _inserted(word: str, axes: str) -> str:
    """A group of factors with axes before the last named one: what follows it, numbers, stays in one piece."""
    factors = word.split()
    named = [n for n, factor in enumerate(factors) if n and factor.isidentifier()]
    at = named[-1] if named else 0 if len(factors) == 1 and factors[0].isidentifier() else len(factors)
    return " ".join([*factors[:at], axes, *factors[at:]])


def _role_of(leaf: Leaf, role: str) -> Entry:
    """What a table says of a role of a parameter; where it says nothing, what is meant."""
    rest = text_of(leaf.rest)
    if role == "state":
        return Entry(text_of(leaf.state), True) if leaf.state is not None else Entry(rest, False)
    grad = leaf.grad
    silent = text_of(leaf.state) if leaf.state is not None else rest
    return Entry(text_of(grad), True) if grad is not None else Entry(silent, False)
