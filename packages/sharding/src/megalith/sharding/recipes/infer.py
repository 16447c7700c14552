"""What is a matrix that no table knows? Told by how it chains with its siblings, from in to out and back."""

from __future__ import annotations

from collections.abc import Mapping

from megalith.sharding.recipes.table import Dims

__all__ = ["inferred"]


def inferred(shapes: Mapping[str, tuple[int, ...]], known: Mapping[str, Dims]) -> dict[str, Dims]:
    """Megatron's layout, with `tp` for the axis, of parameters that no table knows.

    Of the matrices `out in` of one module, the last that leads back to where the first begins is row parallel, and
    those before it that begin there are column parallel. A matrix called an embedding, and one of its shape that is
    alone in its module, are cut by vocabulary. A guess that is wrong costs traffic, never a result.

    Args:
        shapes: the parameters' shapes by name, without those that are best replicated.
        known: what is known of some.

    >>> inferred({"mix.a.weight": (8, 4), "mix.a.bias": (8,), "mix.b.weight": (4, 8), "mix.b.bias": (4,)}, {})
    {'mix.a.weight': ('(tp hidden)', 'embed'), 'mix.b.weight': ('embed', '(tp hidden)'), 'mix.a.bias': ('(tp hidden)',)}
    """
    matrices = {
        name: (shape[0], shape[1]) for name, shape in shapes.items() if len(shape) == 2 and name.endswith(".weight")
    }
    modules: dict[str, dict[str, tuple[int, int]]] = {}
    for name, shape in matrices.items():
        if not _is_embedding(name) and known.get(name, ("",))[0] != "(tp vocab)":
            modules.setdefault(_parent(name), {})[name] = shape
    found: dict[str, Dims] = {}
    for siblings in modules.values():
        found |= _chain(siblings, known)
    found |= _vocabulary({name: shape for name, shape in matrices.items() if name not in found}, known)
    biases = {}
    for name, dims in found.items():
        bias = name.removesuffix("weight") + "bias"
        if bias in shapes and bias not in known and dims[0].startswith("("):
            biases[bias] = dims[:1]
    return {name: dims for name, dims in {**found, **biases}.items() if name not in known}


def _chain(siblings: Mapping[str, tuple[int, int]], known: Mapping[str, Dims]) -> dict[str, Dims]:
    """Column parallel matrices and the row parallel one that closes their chain; nothing where none closes it."""
    names = list(siblings)
    width = siblings[names[0]][1]
    rows = [name for name in names if known.get(name, ("(",))[0] == "embed"]  # a table knows which one closes it
    for last in reversed(rows or names[1:]):
        out, hidden = siblings[last]
        columns = [name for name in names[: names.index(last)] if siblings[name][1] == width]
        parts = {name: siblings[name][0] // hidden for name in columns if siblings[name][0] % hidden == 0}
        if out != width or not parts:
            continue
        dims = {name: f"({n} tp hidden)" if (n := parts.get(name, 1)) > 1 else "(tp hidden)" for name in columns}
        return {**{name: (dim, "embed") for name, dim in dims.items()}, last: ("embed", "(tp hidden)")}
    return {}


def _vocabulary(alone: Mapping[str, tuple[int, int]], known: Mapping[str, Dims]) -> dict[str, Dims]:
    """Embeddings by their names, but for those of positions and types, and matrices of their shape: heads."""
    tables = {name for name in alone if _is_embedding(name) and not any(o in _module(name) for o in _NO_VOCABULARY)}
    shapes = {alone[name] for name in tables if name not in known}
    heads = {name for name in alone if alone[name] in shapes and not _is_embedding(name)}
    return {name: ("(tp vocab)", "embed") for name in alone if name in tables | heads}


def _is_embedding(name: str) -> bool:
    return "emb" in _module(name)


def _module(name: str) -> str:
    """The last part of the path of the module that a weight is of."""
    return name.removesuffix(".weight").rpartition(".")[2].lower()


_NO_VOCABULARY = ("pos", "typ", "seg", "patch", "time", "rot")


def _parent(name: str) -> str:
    """The module that holds the layer that holds a weight."""
    return name.rpartition(".")[0].rpartition(".")[0]
