"""How is a sequence split? Along the tensor axis between the blocks, by all-to-alls around attention, or in a ring."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from megalith.sharding.recipes.names import embeddings
from megalith.sharding.recipes.table import Leaf, Recipe, Specs

__all__ = ["sequence_parallel"]


def sequence_parallel(axis: str, kind: str = "megatron", at: str | None = None) -> Recipe:
    """Splits the sequence of activations over a mesh axis.

    - `"megatron"` (Korthikanti et al., arXiv:2205.05198), over the tensor axis: norms and residuals too are split, and
      each all-reduce of a block becomes a reduce-scatter and an all-gather. It is one anchor, on the embedding.
    - `"ulysses"` (Jacobs et al., arXiv:2309.14509): the inputs' sequence is split, and around attention all-to-alls
      split heads instead.
    - `"ring"` (Liu et al., arXiv:2310.01889): the inputs' sequence is split, and keys and values travel from rank to
      rank. Ranks hold two chunks each, from both ends (Brandon et al., arXiv:2311.09431), so that causal work is even.

    A sequence is the second dim of an input of shape `batch seq` or `batch seq embed`, as long as in the first such
    input. A mask of keys (its name ends with `mask`) stays whole: all queries read it, and it is small.

    Args:
        axis: the mesh axis.
        kind: `"megatron"`, `"ulysses"` or `"ring"`.
        at: for `"megatron"`, the modules whose output is split, a name pattern; by default the embedding of tokens.

    Raises:
        ValueError: another kind; a model without a known embedding; no input that has a sequence.

    >>> from megalith.sharding.recipes import specs_for
    >>> inputs = {"input_ids": (4, 16)}
    >>> print(specs_for({"model.embed_tokens.weight": (64, 8)}, inputs, sequence_parallel("tp")))
    model.embed_tokens.weight  d0 d1
    input_ids                  d0 d1
    model.embed_tokens         batch (tp seq) embed
    >>> print(specs_for({}, inputs, sequence_parallel("sp", "ulysses")))
    input_ids    d0 (sp d1)
    *:attention  batch heads (sp seq) dim -> batch (sp heads) seq dim
    >>> print(specs_for({}, inputs, sequence_parallel("sp", "ring")))
    input_ids  d0 (2 ~sp d1)
    """
    if kind not in _KINDS:
        raise ValueError(f"sequence_parallel kind={kind!r}: write one of {', '.join(map(repr, _KINDS))}")
    if at is not None and kind != "megatron":
        raise ValueError(f"at={at!r} is for kind='megatron'; leave it out for {kind!r}")
    return lambda specs: _KINDS[kind](specs, axis, at)


def _megatron(specs: Specs, axis: str, at: str | None) -> Specs:
    paths = [at] if at is not None else embeddings({name: leaf.shape for name, leaf in specs.params.items()})
    if not paths:
        raise ValueError(
            f"sequence_parallel({axis!r}, 'megatron') finds no embedding of tokens among {_first(specs.params)}; "
            "say whose output is to be split: at='path.of.the.module'"
        )
    return specs.anchored({path: f"batch ({axis} seq) embed" for path in paths})


def _ulysses(specs: Specs, axis: str, _: str | None) -> Specs:
    cut = _along(specs, axis, lambda before: f"{before} {axis}".strip()).cutting("seq", axis)
    return cut.anchored({"*:attention": f"batch heads seq dim -> batch ({axis} heads) seq dim"})


def _ring(specs: Specs, axis: str, _: str | None) -> Specs:
    return _along(specs, axis, lambda before: f"2 ~{axis} {before}".strip()).cutting("seq", f"2 ~{axis}", outside=True)


_KINDS: dict[str, Callable[[Specs, str, str | None], Specs]] = {
    "megatron": _megatron,
    "ulysses": _ulysses,
    "ring": _ring,
}


def _along(specs: Specs, axis: str, cut: Callable[[str], str]) -> Specs:
    """The inputs' sequence cut: `cut` gives what comes before its local rest, from what came before it so far."""
    sequences = {name: leaf.shape[1] for name, leaf in specs.inputs.items() if len(leaf.shape) in (2, 3)}
    if not sequences:
        raise ValueError(
            f"sequence_parallel({axis!r}) finds no input of shape `batch seq` among {_first(specs.inputs)}; give the "
            "inputs by name: specs_for(params, batch, ...)"
        )
    length = next(iter(sequences.values()))

    def split(name: str, leaf: Leaf) -> Leaf:
        if sequences.get(name) != length or name.endswith("mask"):
            return leaf
        *before, rest = leaf.used[1].strip("()").split()
        return replace(leaf, used=(leaf.used[0], f"({cut(' '.join(before))} {rest})", *leaf.used[2:]))

    return specs.map_inputs(split)


def _first(names: object) -> str:
    shown = list(names)[:5]  # type: ignore[call-overload]
    return ", ".join(map(repr, shown)) or "none"
