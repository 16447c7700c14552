"""Which pattern of a spec table holds for which tensor? Name patterns matched to leaves, roles and modules."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from megalith.sharding.grammar import parse_layout, parse_stored_used
from megalith.sharding.layout import Layout, replicated
from megalith.sharding.mesh import Mesh
from megalith.sharding.syntax import LayoutError, did_you_mean, parse_spec

__all__ = ["Resolution", "Resolved", "SpecError", "resolve"]

ROLES = ("grad", "state")
ATTENTION = "attention"


class SpecError(ValueError):
    """An entry of a spec table that matches nothing, or does not fit what it matches."""


@dataclass(frozen=True)
class Choice:
    """An entry of the table that decided, and the layout it gives."""

    key: str
    pattern: str
    layout: Layout

    def __str__(self) -> str:
        return f"{self.key!r}: {self.pattern!r}"


@dataclass(frozen=True)
class Resolved:
    """How one leaf lives.

    Args:
        name: its full path.
        stored: its layout at rest; replicated where no entry matches.
        used: its layout while it is computed with, where the entry is `stored -> used`.
        key, pattern: the entry that decided; None where none matches.
        grad, state: what entries for these roles of a parameter say; None where none matches.
    """

    name: str
    stored: Layout
    used: Layout | None = None
    key: str | None = None
    pattern: str | None = None
    grad: Choice | None = None
    state: Choice | None = None

    @property
    def cause(self) -> str:
        """The entry that decided, for people; empty where none did."""
        return "" if self.key is None else f"{self.key!r}: {self.pattern!r}"


@dataclass(frozen=True)
class Resolution:
    """A spec table applied.

    Args:
        leaves: by full path, how each leaf lives.
        modules: by path, for each module whose output an entry anchors, the key of that entry.
        attentions: by path, for each module that calls attention and has an entry for it, the key of that entry.
        unused: the keys that match no leaf, no module and no attention.
    """

    leaves: Mapping[str, Resolved] = field(default_factory=dict)
    modules: Mapping[str, str] = field(default_factory=dict)
    attentions: Mapping[str, str] = field(default_factory=dict)
    unused: tuple[str, ...] = ()

    def unmatched(self, among: Collection[str] | None = None) -> tuple[str, ...]:
        """The leaves (of `among`, if given) that no entry matches: they are replicated."""
        wanted = self.leaves if among is None else among
        return tuple(name for name, leaf in self.leaves.items() if leaf.key is None and name in wanted)


def resolve(
    specs: Mapping[str, str],
    leaves: Mapping[str, tuple[int, ...]],
    mesh: Mesh,
    sizes: Mapping[str, int] | None = None,
    *,
    aliases: Mapping[str, Sequence[str]] | None = None,
    states: Collection[str] = (),
    modules: Collection[str] = (),
    attentions: Collection[str] = (),
    complete: bool = True,
) -> Resolution:
    """Applies a spec table to the leaves of a function's arguments.

    A key is a name pattern, matched against the whole of a name: `*` is any run of characters, dots included, `?` one
    character, `[...]` one of a set, `{a,b}` either. **The last matching entry wins**, so write general entries first.
    `"name:grad"` and `"name:state"` hold for these roles of what `name` matches. An entry that matches no leaf but
    modules anchors their outputs. `"name:attention"` says how queries, keys, values and the result of the attentions
    lie that modules of this name call, `comes as -> is used as`, as `b h s d`.

    Args:
        specs: name pattern -> layout, or `stored -> used`.
        leaves: full dotted path -> global shape.
        mesh: the mesh that the patterns' axes are from.
        sizes: sizes of named factors.
        aliases: for a leaf, further names that patterns may match: its path without the argument's name, say.
        states: the leaves that are a parameter's optimizer state: a `:state` entry is theirs, and else, without its
            `-> used`, the entry that their name matches.
        modules: paths of the modules.
        attentions: paths of the modules that call attention.
        complete: whether these are all leaves and modules: then an entry that matches none is an error.

    Raises:
        SpecError: an entry that matches nothing or does not fit, with the nearest names or the pattern to write.

    >>> specs = {"*.weight": "o i", "*.{q,k}_proj.weight": "(tp dp o) i -> (tp o) i", "*.q*:grad": "(tp dp o) i"}
    >>> found = resolve(specs, {"l.q_proj.weight": (8, 4), "l.norm.bias": (4,)}, Mesh("dp=2 tp=2"))
    >>> leaf = found.leaves["l.q_proj.weight"]
    >>> leaf.key, str(leaf.stored), str(leaf.used), str(leaf.grad.layout), found.unmatched()
    ('*.{q,k}_proj.weight', '(tp dp o) i', '(tp o) i', '(tp dp o) i', ('l.norm.bias',))
    """
    aliases = aliases or {}
    names = {name: (name, *aliases.get(name, ())) for name in leaves}
    calls = {key: list(filter(_matcher(key), attentions)) for key in specs if _role(key) == ATTENTION}
    matches = {
        key: [name for name in names if any(map(_matcher(key), names[name]))] for key in specs if key not in calls
    }
    anchors = {key: list(filter(_matcher(key), modules)) for key in matches if not matches[key] and not _role(key)}
    unused = tuple(key for key in specs if not matches.get(key) and not anchors.get(key) and not calls.get(key))
    if unused and complete:
        raise _matches_nothing(unused[0], names.values(), modules, attentions)
    decided: dict[tuple[str, str], str] = {}
    for key, found in matches.items():
        decided.update({(name, _role(key)): key for name in found})
    for key, paths in {**anchors, **calls}.items():
        if paths:
            _check_syntax(key, specs[key])
    table = _Table(specs, mesh, sizes or {}, decided)
    return Resolution(
        {
            name: table.state(name, shape) if name in states else table.leaf(name, shape)
            for name, shape in leaves.items()
        },
        {path: key for key, paths in anchors.items() for path in paths},
        {path: key for key, paths in calls.items() for path in paths},
        unused,
    )


@dataclass(frozen=True, slots=True)
class _Table:
    """A spec table whose entries are decided: `(leaf, role) -> key`."""

    specs: Mapping[str, str]
    mesh: Mesh
    sizes: Mapping[str, int]
    decided: Mapping[tuple[str, str], str]

    def leaf(self, name: str, shape: tuple[int, ...]) -> Resolved:
        key = self.decided.get((name, ""))
        grad, state = (self.role(name, shape, role) for role in ROLES)
        if key is None:
            return Resolved(name, replicated(shape, self.mesh), grad=grad, state=state)
        stored, used = self.bind(key, name, shape)
        return Resolved(name, stored, used, key, self.specs[key], grad, state)

    def state(self, name: str, shape: tuple[int, ...]) -> Resolved:
        key = self.decided.get((name, "state"), self.decided.get((name, "")))
        if key is None:
            return Resolved(name, replicated(shape, self.mesh))
        return Resolved(name, self.bind(key, name, shape)[0], None, key, self.specs[key])

    def role(self, name: str, shape: tuple[int, ...], role: str) -> Choice | None:
        key = self.decided.get((name, role))
        return None if key is None else Choice(key, self.specs[key], self.bind(key, name, shape)[0])

    def bind(self, key: str, name: str, shape: tuple[int, ...]) -> tuple[Layout, Layout | None]:
        try:
            if _role(key):
                return parse_layout(self.specs[key], shape, self.mesh, self.sizes, name), None
            return parse_stored_used(self.specs[key], shape, self.mesh, self.sizes, name)
        except LayoutError as error:
            hint = f"  the last matching entry wins: to lay out {name!r} apart, write one for it below {key!r}"
            raise SpecError(f"specs[{key!r}] does not fit {name!r}: {error}\n{hint}") from error


def _check_syntax(key: str, pattern: str) -> None:
    try:
        parse_spec(pattern)
    except LayoutError as error:
        raise SpecError(f"specs[{key!r}]: {error}") from error


@lru_cache(maxsize=4096)
def _split(key: str) -> tuple[str, str]:
    """A key as name pattern and role."""
    name, colon, role = key.partition(":")
    if colon and role not in (*ROLES, ATTENTION):
        known = (*ROLES, ATTENTION)
        fix = f"write one of {', '.join(f'{name}:{role}' for role in known)}" + did_you_mean(role, known)
        raise SpecError(f"specs[{key!r}]: {role!r} is not a role of a parameter\n  {fix}")
    return name, role


def _role(key: str) -> str:
    return _split(key)[1]


@lru_cache(maxsize=4096)
def _matcher(key: str) -> Callable[[str], re.Match[str] | None]:
    return re.compile("|".join(map(fnmatch.translate, _globs(_split(key)[0], key)))).match


def _globs(pattern: str, key: str) -> list[str]:
    """A name pattern with every `{a,b}` spelled out, the innermost first."""
    if "{" not in pattern:
        return [pattern]
    found = re.search(r"\{([^{}]*)\}", pattern)
    if found is None:
        raise SpecError(f"specs[{key!r}]: a brace is not closed\n  write alternatives as {{a,b}}")
    before, after = pattern[: found.start()], pattern[found.end() :]
    return [glob for choice in found[1].split(",") for glob in _globs(before + choice + after, key)]


def _matches_nothing(
    key: str, names: Iterable[Sequence[str]], modules: Collection[str], attentions: Collection[str]
) -> SpecError:
    """The error for an entry without a match, with the names that are nearest, tail to tail."""
    pattern, role = _split(key)
    if role == ATTENTION:
        names, modules, what = (), attentions, "module that calls attention"
    else:
        what = "tensor and no module"
    core = re.sub(r"[*?\[\]]+", "", _globs(pattern, key)[0]).strip(".")
    n_parts = core.count(".") + 1
    everything = list(dict.fromkeys([*(name for group in names for name in group), *modules]))
    by_tail = {".".join(name.split(".")[-n_parts:]): name for name in reversed(everything)}
    close = [by_tail[tail] for tail in difflib.get_close_matches(core, by_tail, n=3, cutoff=0.5)]
    if close:
        fix = f"the nearest names are {', '.join(map(repr, close))}"
    else:
        shown = ", ".join(map(repr, everything[:5])) + (", ..." if len(everything) > 5 else "")
        fix = f"the names are {shown}" if everything else "there are no names to match"
    if "*" not in pattern and any(name.endswith("." + pattern) for name in everything):
        fix = f"a pattern is matched against the whole name: write '*.{pattern}{key[len(pattern) :]}'"
    return SpecError(f"specs[{key!r}] matches no {what}\n  {fix}")
