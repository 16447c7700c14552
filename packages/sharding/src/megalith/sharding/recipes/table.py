"""What does a recipe take and give? The spec table of one model: a layout for each of its tensors, as text.

A recipe is a function `Specs -> Specs`. It reads names and shapes and splits dims over mesh axes, on top of how they
are split already, so that recipes compose: `zero(3, "dp")` after `tensor_parallel("tp")` stores apart what the other
one uses.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch

__all__ = ["Dims", "Leaf", "Recipe", "Specs", "specs_for", "split_dim"]

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
    def pattern(self) -> str:
        """The entry of a spec table: `layout`, or `stored -> used`."""
        used = " ".join(self.used) or "..."
        return used if self.stored in (None, self.used) else f"{' '.join(self.stored or ())} -> {used}"


@dataclass(frozen=True)
class Specs(Mapping[str, str]):
    """A spec table, which is what `shard` takes: a mapping from name patterns to layouts. `str()` shows it as a table.

    Args:
        params: the parameters by name.
        inputs: the other inputs by name.
        anchors: layouts of module outputs, and of attention (`"*:attention"`), by pattern.
    """

    params: Mapping[str, Leaf]
    inputs: Mapping[str, Leaf] = field(default_factory=dict)
    anchors: Mapping[str, str] = field(default_factory=dict)

    def map_params(self, change: Callable[[str, Leaf], Leaf]) -> Specs:
        """The table with each parameter's leaf changed: `change(name, leaf)`."""
        return replace(self, params={name: change(name, leaf) for name, leaf in self.params.items()})

    def map_inputs(self, change: Callable[[str, Leaf], Leaf]) -> Specs:
        """The table with each input's leaf changed."""
        return replace(self, inputs={name: change(name, leaf) for name, leaf in self.inputs.items()})

    def anchored(self, anchors: Mapping[str, str]) -> Specs:
        """The table with more layouts of module outputs."""
        return replace(self, anchors={**self.anchors, **anchors})

    def then(self, *recipes: Recipe) -> Specs:
        """The table after these recipes, first to last."""
        table = self
        for recipe in recipes:
            table = recipe(table)
        return table

    @property
    def entries(self) -> dict[str, str]:
        """The table as a plain dict; layers that agree share an entry, with `*` for their number."""
        flat = {name: leaf.pattern for name, leaf in (*self.params.items(), *self.inputs.items())}
        found = _shared(flat)
        for role in ("grad", "state"):
            dims = {name: getattr(leaf, role) for name, leaf in self.params.items()}
            written = {name: " ".join(d) or "..." for name, d in dims.items() if d is not None}
            found |= {f"{pattern}:{role}": text for pattern, text in _shared(written, dims).items()}
        return {**found, **self.anchors}

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
        params: a module, or its parameters (tensors or shapes) by name.
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

    >>> split_dim(("(3 tp h d)", "e"), 0, "dp"), split_dim(("o", "e"), 1, "row"), split_dim(("(tp q + tp k)",), 0, "dp")
    (('(3 tp h dp d)', 'e'), ('o', '(row e)'), ('(tp dp q + tp dp k)',))
    """
    text = dims[at].strip()
    inner = text[1:-1] if text.startswith("(") else text
    words = [_inserted(word, axes) for word in inner.split("+")]
    return (*dims[:at], f"({' + '.join(words)})", *dims[at + 1 :])


def _inserted(word: str, axes: str) -> str:
    """A group of factors with axes before its last one."""
    factors = word.split()
    return " ".join([*factors[:-1], axes, factors[-1]])


def _shared(entries: Mapping[str, str], among: Mapping[str, Any] | None = None) -> dict[str, str]:
    """One entry for all layers that agree, with `*` for their number; `among` are all the names that it may match."""
    patterns: dict[str, set[str | None]] = {}
    for name in among or entries:
        patterns.setdefault(_starred(name), set()).add(entries.get(name))
    found: dict[str, str] = {}
    for name, text in entries.items():
        starred = _starred(name)
        found[starred if len(patterns[starred]) == 1 else name] = text
    return found


def _starred(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
