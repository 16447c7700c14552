"""An oracle for layouts, written apart from the code it judges, and random layouts to judge it on.

The oracle knows no strides. It cuts a list of indices as DESIGN says, factor by factor: a list too short for whole
blocks is first filled up with holes (None), so that every block has its nominal length; holes are nobody's elements.
"""

import math
from dataclasses import dataclass

from hypothesis import strategies as st

from megalith.sharding.layout import Layout
from megalith.sharding.mesh import Mesh


@dataclass(frozen=True)
class F:
    """A factor as drawn: its text, and what it is: mesh axis or local, its size (None: open), back and forth."""

    text: str
    size: int | None
    axis: str | None = None
    turned: bool = False


Word = list[F]


@dataclass(frozen=True)
class Case:
    """A pattern with the tensor, mesh and sizes it fits, and its factors for the oracle."""

    pattern: str
    shape: tuple[int, ...]
    mesh: Mesh
    sizes: dict[str, int]
    dims: list[list[tuple[int, Word]]]  # per dim its segments: (size, factors)

    def layout(self) -> Layout:
        return Layout.parse(self.pattern, self.shape, self.mesh, self.sizes, "x")

    def held(self, rank: int) -> list[list[int]]:
        """Per dim the indices that a rank holds."""
        coordinates = self.mesh.coordinates(rank)
        return [held(segments, coordinates) for segments in self.dims]


def held(segments: list[tuple[int, Word]], coordinates: dict[str, int]) -> list[int]:
    """The indices of one dim at these coordinates."""
    found, offset = [], 0
    for size, word in segments:
        owners = cut(list(range(offset, offset + size)), word, 0)
        found += [i for i, owner in owners.items() if all(coordinates[a] == c for a, c in owner.items())]
        offset += size
    return sorted(found)


def cut(block: list[int | None], word: Word, parity: int) -> dict[int, dict[str, int]]:
    """For each index of a block, the coordinates of the ranks that hold it."""
    if not word or word[0].size is None:
        return {i: {} for i in block if i is not None}
    factor, minor = word[0], word[1:]
    if factor.axis is None:
        assert len(block) % factor.size == 0
        step = len(block) // factor.size
    else:
        unit = math.prod(f.size for f in minor if f.axis is None and f.size is not None)
        step = math.ceil(len(block) / (unit * factor.size)) * unit
        block = block + [None] * (factor.size * step - len(block))
    owners = {}
    for j in range(factor.size):
        back = factor.turned and parity % 2
        own = {factor.axis: factor.size - 1 - j if back else j} if factor.axis else {}
        for i, owner in cut(block[j * step : (j + 1) * step], minor, parity * factor.size + j).items():
            owners[i] = owner | own
    return owners


def indices(ranges: tuple[tuple[int, int], ...]) -> list[int]:
    return [i for start, stop in ranges for i in range(start, stop)]


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    """One to three axes of one to four ranks, two of them perhaps one composite axis."""
    n_axes = draw(st.integers(1, 3))
    axes = [f"{name}={draw(st.integers(1, 4))}" for name in ("dp", "tp", "sp")[:n_axes]]
    if n_axes > 1 and draw(st.booleans()):
        axes[-2:] = [f"cp=({axes[-2]} {axes[-1]})"]
    return Mesh(" ".join(axes))


@st.composite
def cases(draw: st.DrawFn, even: bool = False) -> Case:
    """A random pattern of the whole grammar with a tensor that it fits; `even`: every cut divides."""
    mesh = draw(meshes())
    free = list(draw(st.permutations(mesh.axes)))
    sizes: dict[str, int] = {}
    texts, dims = [], []
    for d in range(draw(st.integers(0, 3))):
        held_by = [free.pop() for _ in range(draw(st.integers(0, len(free))))]
        if draw(st.integers(0, 4)) == 0:
            words = [draw(_closed(mesh, held_by, f"x{d}{s}", sizes)) for s in range(draw(st.integers(2, 3)))]
            segments = [(math.prod(f.size for f in word), word) for word in words]
        else:
            segments = [draw(_opened(mesh, held_by, f"x{d}", sizes, even))]
        dims.append(segments)
        text = " + ".join(" ".join(_composed(word, mesh)) for _, word in segments)
        bare = len(segments) == 1 and len(segments[0][1]) == 1 and draw(st.booleans())
        texts.append(text if bare else f"({text})")
    shape = [sum(size for size, _ in segments) for segments in dims]
    if draw(st.integers(0, 3)) == 0:
        at, n_whole = draw(st.integers(0, len(dims))), draw(st.integers(0, 2))
        texts.insert(at, "...")
        shape[at:at] = whole = draw(st.lists(st.integers(0, 4), min_size=n_whole, max_size=n_whole))
        dims[at:at] = [[(n, [])] for n in whole]
    marks = [f"{draw(st.sampled_from(['', 'sum:', 'max:', 'min:']))}{a}" for a in free if draw(st.booleans())]
    if marks:
        texts += ["//", *marks]
    tier = draw(st.sampled_from(["", "", "@host", "@disk", "@paged", "@device"]))
    return Case(" ".join([*texts, tier]), tuple(shape), mesh, sizes, dims)


@st.composite
def _factors(draw: st.DrawFn, mesh: Mesh, axes: list[str]) -> Word:
    """Mesh axes in any order, with local numbers before and between them."""
    word = [F(a, mesh.sizes[a], a) for a in axes]
    for _ in range(draw(st.integers(0, 2))):
        k = draw(st.integers(1, 3))
        word.insert(draw(st.integers(0, len(word))), F(str(k), k))
    return [F("~" + f.text, f.size, f.axis, True) if f.axis and draw(st.integers(0, 2)) == 0 else f for f in word]


@st.composite
def _opened(draw: st.DrawFn, mesh: Mesh, axes: list[str], name: str, sizes: dict[str, int], even: bool):
    """A segment whose minor-most names are open, or sized by `sizes`."""
    word = draw(_factors(mesh, axes))
    word = word[: max((i + 1 for i, f in enumerate(word) if f.axis), default=len(word))]
    leading = math.prod(f.size for f in word[: next((i for i, f in enumerate(word) if f.axis), len(word))])
    unit = 1
    tail = [F(name, None)]
    if draw(st.booleans()):
        unit = draw(st.integers(1, 3))
        sizes[name + "u"] = unit
        sized = F(name + "u", unit)
        tail = draw(st.sampled_from([[*tail, sized], [sized, *tail]]))
        if tail[0] is sized and axes:  # open to the right of it: it need not divide the dim, only the blocks
            unit = unit if even else 1
    n_units = draw(st.integers(0, 3)) * math.prod(f.size for f in word) if even else draw(st.integers(0, 9)) * leading
    return n_units * unit, [*word, *tail]


@st.composite
def _closed(draw: st.DrawFn, mesh: Mesh, axes: list[str], name: str, sizes: dict[str, int]) -> Word:
    """A segment all of whose sizes are known."""
    word = draw(_factors(mesh, draw(st.permutations(axes))[: draw(st.integers(0, len(axes)))]))
    if not word or draw(st.booleans()):
        sizes[name] = draw(st.integers(1, 4))
        word.append(F(name, sizes[name]))
    return word


def _composed(word: Word, mesh: Mesh) -> list[str]:
    texts = [f.text for f in word]
    for group, members in mesh.groups.items():
        for i in range(len(texts)):
            if tuple(texts[i : i + len(members)]) == members:
                texts[i : i + len(members)] = [group]
    return texts
