"""Under which patterns does a table print? As few as say it, and none that decides for a tensor it is not for.

A pattern's star matches dots, and a pattern matches the tail of a name too (`h.0.w` of `params.h.0.w`). So an entry
for one tensor may match another one. The last matching entry wins; what comes out wrong is written once more, below.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

__all__ = ["Entry", "entries_of"]


class Entry(NamedTuple):
    """A layout's text. One that is not `needed` holds without an entry, unless an entry for others matches."""

    text: str
    needed: bool = True


def entries_of(wanted: Mapping[str, Entry]) -> dict[str, str]:
    """A spec table of few patterns that gives each tensor its own layout.

    Args:
        wanted: the layout of each tensor, by name.

    >>> entries_of({"h.0.w": Entry("(tp o) i"), "h.1.w": Entry("(tp o) i"), "w": Entry("o i")})
    {'w': 'o i', 'h.*.w': '(tp o) i'}
    """
    by_pattern: dict[str, set[Entry]] = {}
    for name, entry in wanted.items():
        by_pattern.setdefault(_starred(name), set()).add(entry)
    found: dict[str, str] = {}
    for name, entry in wanted.items():
        if entry.needed:
            shared = _starred(name)
            found[shared if len(by_pattern[shared]) == 1 else _escaped(name)] = entry.text
    wrong = _wrong(found, wanted)
    if wrong:  # a key matches no name of fewer dots, so those of few dots go first
        found = dict(sorted(found.items(), key=lambda item: (item[0].count("."), -item[0].count("*"))))
        wrong = _wrong(found, wanted)
    for name in sorted(wrong, key=len):  # a name is longer than its tails, which it would match: each has the last word
        found.pop(_escaped(name), None)
        found[_escaped(name)] = wanted[name].text
    return found


def _wrong(table: Mapping[str, str], wanted: Mapping[str, Entry]) -> set[str]:
    """The names that need an entry of their own: those decided wrongly, and, as these come last, those they match."""
    keys = list(table)
    order = {key: n for n, key in enumerate(keys)}
    globs = [key for key in keys if re.search(r"[*?[]", key)]
    tails = {name: [name[m.end() :] for m in re.finditer(r"\.", name)] for name in wanted}

    def decided(name: str) -> str | None:
        candidates = (name, *tails[name])
        hits = [key for key in candidates if key in order]
        hits += [key for key in globs if any(fnmatchcase(candidate, key) for candidate in candidates)]
        return max(hits, key=order.__getitem__, default=None)

    wrong = set()
    for name, entry in wanted.items():
        key = decided(name)
        if (key is not None or entry.needed) and (key is None or table[key] != entry.text):
            wrong.add(name)
    while True:
        more = {name for name in wanted if name not in wrong and wrong & set(tails[name])}
        if not more:
            return wrong
        wrong |= more


def _escaped(name: str) -> str:
    """A name as a pattern: what means something in patterns stands for any character, and `output` is for outputs."""
    return re.sub(r"^output(?![^.])", "[o]utput", re.sub(r"[*?\[\]{}:]", "?", name))


def _starred(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", _escaped(name))
