"""How is a matrix split both ways? Tensor parallelism over two, two and a half and three axes: SUMMA, Tesseract, 3D.

One axis splits each matrix by its outputs or by its inputs, and leaves the residual stream whole on every rank. Here
both dims of each matrix and of each activation are split, so that nothing is held twice:

    2D     x `(row b) s (col e)`      w `(row e) (col f)`     y `(row b) s (col f)`
    2.5D   x `(dep row b) s (col e)`  w `(row e) (col f)`     y `(dep row b) s (col f)`, w replicated over `dep`
    3D     x `(i j b) s (k e)`        w `(k i e) (j f)`       y `(i k b) s (j f)`, and back with j and k swapped

`row` (3D: `i`) only stores the contracted dim of a matrix, which is gathered over it at use, in each phase anew.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from megalith.sharding.recipes.entries import Entry, entries_of
from megalith.sharding.recipes.heads import Heads
from megalith.sharding.recipes.names import Shapes, embeddings, is_conv1d, megatron
from megalith.sharding.recipes.table import Dims, Leaf, Recipe, Specs, split_dim

__all__ = ["grid_2d", "grid_3d", "grid_25d"]


def grid_2d(row: str = "row", col: str = "col", heads: Heads | None = None) -> Recipe:
    """Splits every matrix and activation over two axes (van de Geijn and Watts, 1997; Optimus, arXiv:2104.05343).

    A product of x `b e` by w `e f` gathers x over `col` and w over `row`. With its two products in the backward, which
    gather both again and scatter both gradients, a rank of a grid of q x q receives 3 (q - 1) / q^2 (b e + e f)
    elements. Products that read the same x gather it, and scatter its gradient, once.

    Args:
        row: the axis of the batch, and of what is contracted.
        col: the axis of the residual stream, of heads and of hidden units.
        heads: what is known of the heads.

    Raises:
        ValueError: parameters that are split at rest already.

    >>> from megalith.sharding.recipes import specs_for
    >>> shapes = {"h.0.norm.weight": (8,), "h.0.up_proj.weight": (32, 8), "h.0.down_proj.weight": (8, 32)}
    >>> print(specs_for(shapes, {"x": (4, 16, 8)}, grid_2d("row", "col")))
    h.*.norm.weight       (col d0)
    h.*.up_proj.weight    (col hidden) (row embed) -> (col hidden) embed
    h.*.down_proj.weight  (col embed) (row hidden) -> (col embed) hidden
    x                     (row d0) d1 d2
    h.*.up_proj           (row batch) ... (col hidden)
    h.*.down_proj         (row batch) ... (col embed)
    """
    side = _Side(out=col, contracted="", stored=row, batch=row)
    return _Grid(row, side, side, heads or Heads()).recipe


def grid_25d(dep: str = "dep", row: str = "row", col: str = "col", heads: Heads | None = None) -> Recipe:
    """Splits the batch over one more axis than `grid_2d`, which replicates the matrices (Tesseract, arXiv:2105.14500).

    A product and its two in the backward receive 3 (q - 1) / q^2 (b e / d + e f) + 2 (d - 1) / d e f / q^2 elements,
    d the size of `dep`: each gradient of a matrix is summed over it.

    >>> from megalith.sharding.recipes import specs_for
    >>> print(specs_for({"up_proj.weight": (32, 8)}, {"x": (4, 16, 8)}, grid_25d("dep", "row", "col")))
    up_proj.weight  (col hidden) (row embed) -> (col hidden) embed
    x               (dep row d0) d1 d2
    up_proj         (dep row batch) ... (col hidden)
    """
    side = _Side(out=col, contracted="", stored=row, batch=f"{dep} {row}")
    return _Grid(f"{dep} {row}", side, side, heads or Heads()).recipe


def grid_3d(i: str = "i", j: str = "j", k: str = "k", heads: Heads | None = None) -> Recipe:
    """Splits every matrix and activation over three axes (Agarwal et al., 1995; Bian et al., arXiv:2105.14450).

    A product y `b f` of x `b e` by w `e f` gathers x over `j` and w over `i`, and scatters y over `k`; the next one has
    j and k swapped. With its two in the backward, which gather x, w and the gradient of y once, a rank of a cube of
    q x q x q receives (q - 1) / q^3 (3 b e + 3 e f + 2 b f) elements.

    >>> from megalith.sharding.recipes import specs_for
    >>> shapes = {"h.0.norm.weight": (8,), "h.0.up_proj.weight": (32, 8), "h.0.down_proj.weight": (8, 32)}
    >>> print(specs_for(shapes, {"x": (4, 16, 8)}, grid_3d("i", "j", "k")))
    h.*.norm.weight       (k d0)
    h.*.up_proj.weight    (j hidden) (k i embed) -> (j hidden) (k embed)
    h.*.down_proj.weight  (k embed) (j i hidden) -> (k embed) (j hidden)
    x                     (i j d0) d1 d2
    h.*.up_proj           (i k batch) ... (j hidden)
    h.*.down_proj         (i j batch) ... (k embed)
    """
    columns = _Side(out=j, contracted=k, stored=i, batch=f"{i} {k}")
    rows = _Side(out=k, contracted=j, stored=i, batch=f"{i} {j}")
    return _Grid(f"{i} {j}", columns, rows, heads or Heads()).recipe


@dataclass(frozen=True)
class _Side:
    """How the matrices lie that lead out of the residual stream (Megatron's columns), or back to it (its rows).

    Args:
        out: the axis of their outputs.
        contracted: the axis of their inputs while they compute; empty where these are whole.
        stored: a further axis of their inputs at rest.
        batch: the axes of the batch in what they give.
    """

    out: str
    contracted: str
    stored: str
    batch: str


@dataclass(frozen=True)
class _Grid:
    """Both kinds of matrices, and the axes of the inputs' batch. `rows.out` is the axis of the residual stream."""

    batch: str
    columns: _Side
    rows: _Side
    heads: Heads

    def recipe(self, specs: Specs) -> Specs:
        shapes = {name: leaf.shape for name, leaf in specs.params.items()}
        layouts = megatron(shapes, self.heads)
        widths = _widths(layouts, shapes)
        outs = {name: _out(name, dims, shapes) for name, dims in layouts.items()}

        def split(name: str, leaf: Leaf) -> Leaf:
            if leaf.rest != leaf.used or leaf.grad is not None or leaf.state is not None:
                raise ValueError(f"{name!r} is split at rest already, and a grid says how it computes; apply zero last")
            if name in layouts:
                return self._matrix(leaf, layouts[name], outs[name])
            wide = [at for at, size in enumerate(leaf.shape) if size in widths]
            return replace(leaf, used=split_dim(leaf.used, wide[-1], self.rows.out)) if wide else leaf

        def feed(_: str, leaf: Leaf) -> Leaf:
            return replace(leaf, used=split_dim(leaf.used, 0, self.batch)) if leaf.shape else leaf

        table = specs.map_params(split).map_inputs(feed)
        table = table.cutting("batch", self.batch).cutting("heads", self.columns.out)
        given = self._given(layouts, outs) | self._looked_up(shapes)
        return table.anchored(entries_of({path: Entry(text) for path, text in given.items()}))

    def _side(self, out: str) -> _Side:
        return self.rows if out == "embed" else self.columns

    def _matrix(self, leaf: Leaf, dims: Dims, out: int) -> Leaf:
        """A matrix or a bias, while it computes and at rest."""
        side = self._side(dims[out])
        used = stored = leaf.used
        for at, dim in enumerate(dims):
            axes = side.out if at == out else side.contracted
            used = _cut(used, at, dim, axes)
            stored = _cut(stored, at, dim, axes if at == out else f"{axes} {side.stored}".strip())
        return replace(leaf, used=used, stored=stored)

    def _given(self, layouts: Mapping[str, Dims], outs: Mapping[str, int]) -> dict[str, str]:
        """The layouts of what the modules of matrices give."""
        found = {}
        for name, dims in layouts.items():
            if name.endswith(".weight") and "embed" in dims:
                out = dims[outs[name]]
                side = self._side(out)
                (text,) = _cut(("",), 0, out, side.out)
                found[name.removesuffix(".weight")] = f"({side.batch} batch) ... {text}"
        return found

    def _looked_up(self, shapes: Shapes) -> dict[str, str]:
        """The layouts of what embeddings give: the residual stream."""
        stream = f"({self.batch} batch) ... ({self.rows.out} embed)"
        return {path: stream for path in embeddings(shapes)}


def _out(name: str, dims: Dims, shapes: Shapes) -> int:
    """The dim of the outputs: matrices are `out in`, but for those of GPT-2, `in out`."""
    last = len(dims) == 1 or is_conv1d(name.rpartition(".")[0], shapes)
    return len(dims) - (1 if last else 2)


def _widths(layouts: Mapping[str, Dims], shapes: Shapes) -> set[int]:
    """The sizes of the residual stream."""
    dims = ((dim, size) for name in layouts for dim, size in zip(layouts[name], shapes[name], strict=True))
    return {size for dim, size in dims if dim == "embed"}


def _cut(before: Dims, at: int, dim: str, axes: str) -> Dims:
    """A layout with a dim of Megatron's layout, `tp` or the residual stream, over other axes, if any.

    >>> _cut(("d0", "d1"), 0, "(3 tp heads)", "col"), _cut(("d0",), 0, "embed", "k i"), _cut(("d0",), 0, "(tp f)", "")
    (('(3 col heads)', 'd1'), ('(k i embed)',), ('f',))
    """
    is_split = dim == "embed" or re.search(r"\btp\b", dim) is not None
    if before[at].startswith("("):  # over other axes already, which are major
        return split_dim(before, at, axes) if is_split and axes else before
    named = f"tp {dim}" if dim == "embed" else dim.strip("()")
    inner = " ".join(re.sub(r"\btp\b", axes, named).split())
    return (*before[:at], f"({inner})" if " " in inner else inner, *before[at + 1 :])
