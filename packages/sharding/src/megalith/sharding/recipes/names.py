"""Which matrix of a model is what? Tables by the names of its modules, and a guess by shapes where no table knows.

A row of a table says how the weight and the bias of the modules of some names lie under Megatron's layout (Shoeybi et
al., arXiv:1909.08053); `tp` in it is the axis. The dims' names say what they are made of: `heads` of queries,
`kv_heads` of keys or values, `groups` of queries, keys and values together, `hidden` units, a `vocab`, `experts`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple, TypeAlias

from megalith.sharding.recipes.heads import Heads, with_heads
from megalith.sharding.recipes.infer import inferred
from megalith.sharding.recipes.table import Dims, dims_of

__all__ = ["Shapes", "embeddings", "is_conv1d", "megatron", "unknown"]

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]


class Row(NamedTuple):
    """Modules by the tail of their name, with the layouts of their weight and bias.

    An entry matches a whole last part of the path (`q_proj`), or more than one (`attention.output.dense`).
    """

    names: str
    weight: str
    bias: str = ""


EMBEDDINGS = "embed_tokens word_embeddings wte shared tok_embeddings embed_in"

# Matrices of nn.Linear are `out in`. Rows further down win.
LINEAR = (
    Row("q_proj wq query SelfAttention.q EncDecAttention.q", "(tp heads) embed", "(tp heads)"),
    Row("k_proj v_proj wk wv key value", "(tp kv_heads) embed", "(tp kv_heads)"),
    Row("SelfAttention.[kv] EncDecAttention.[kv]", "(tp kv_heads) embed"),
    Row("query_key_value", "(tp groups) embed", "(tp groups)"),  # interleaved by head
    Row("qkv qkv_proj c_attn", "(3 tp heads) embed", "(3 tp heads)"),
    Row("in_proj_weight", "(3 tp heads) embed"),
    Row("in_proj_bias", "(3 tp heads)"),
    Row("gate_proj up_proj fc1 c_fc wi wi_0 wi_1 w1 w3", "(tp hidden) embed", "(tp hidden)"),
    Row("intermediate.dense dense_h_to_4h", "(tp hidden) embed", "(tp hidden)"),
    Row("down_proj output.dense dense_4h_to_h fc2 wo w2", "embed (tp hidden)", "embed"),
    Row("o_proj out_proj c_proj SelfAttention.o EncDecAttention.o", "embed (tp heads)", "embed"),
    Row("attention.wo attention.dense attention.output.dense", "embed (tp heads)", "embed"),
    Row("mlp.c_proj", "embed (tp hidden)", "embed"),
    Row(EMBEDDINGS, "(tp vocab) embed"),
    Row("lm_head embed_out cls.predictions.decoder", "(tp vocab) embed", "(tp vocab)"),
    Row("cls.predictions", "", "(tp vocab)"),
    Row("relative_attention_bias", "buckets (tp heads)"),
    # Experts stacked in one parameter: `expert out in`, gate and up one behind the other.
    Row("experts.gate_up_proj", "experts (2 tp hidden) embed"),
    Row("experts.down_proj", "experts embed (tp hidden)"),
)

# Matrices of GPT-2's Conv1D are `in out`.
CONV1D = (
    Row("c_attn", "embed (3 tp heads)", "(3 tp heads)"),
    Row("c_fc", "embed (tp hidden)", "(tp hidden)"),
    Row("c_proj", "(tp heads) embed", "embed"),
    Row("mlp.c_proj", "(tp hidden) embed", "embed"),
)

# Known to be best replicated: small, or read by every rank.
REPLICATED = """
*norm *norm[0-9] *Norm *layernorm* *layer_norm* ln_* *_ln norm_* embed_positions position_embeddings
wpe token_type_embeddings cls_token distillation_token mask_token rotary_emb mlp.gate gate router *.router.* classifier
score pooler.dense transform.dense patch_embeddings.projection conv1 conv2
""".split()


def megatron(shapes: Shapes, heads: Heads | None = None) -> dict[str, Dims]:
    """Megatron's layout, with `tp` for the axis, of each parameter that it splits; the others are replicated.

    Args:
        shapes: the parameters' shapes by name.
        heads: what is known of the heads, which are then whole.

    >>> megatron({"h.0.q_proj.weight": (4, 2), "h.0.o_proj.weight": (2, 4), "h.0.norm.weight": (2,)})
    {'h.0.q_proj.weight': ('(tp heads)', 'embed'), 'h.0.o_proj.weight': ('embed', '(tp heads)')}
    """
    known = {name: dims for name in shapes if (dims := _known(name, shapes, heads)) is not None}
    guessed = inferred({name: shape for name, shape in shapes.items() if not _is_replicated(name, shapes)}, known)
    found = {**known, **guessed}
    return {name: found[name] for name in shapes if name in found}


def unknown(shapes: Shapes) -> list[str]:
    """The parameters of which no table knows: what they are is guessed by their shapes, or they are replicated.

    >>> unknown({"h.0.q_proj.weight": (4, 2), "h.0.mystery.weight": (4, 2)})
    ['h.0.mystery.weight']
    """
    return [name for name in shapes if _known(name, shapes, None) is None and not _is_replicated(name, shapes)]


def embeddings(shapes: Shapes) -> list[str]:
    """The paths of the modules that look tokens up in a vocabulary.

    >>> embeddings({"model.embed_tokens.weight": (64, 8), "lm_head.weight": (64, 8)})
    ['model.embed_tokens']
    """
    vocabularies = [name for name, dims in megatron(shapes).items() if dims[0] == "(tp vocab)" and len(dims) == 2]
    paths = [name.removesuffix(".weight") for name in vocabularies]
    return [path for path in paths if _matches(path, EMBEDDINGS) or "emb" in path.rpartition(".")[2]]


def _known(name: str, shapes: Shapes, heads: Heads | None) -> Dims | None:
    """What the tables say of a parameter, or None."""
    path, _, kind = name.rpartition(".")
    if kind not in ("weight", "bias"):
        path, kind = name, "weight"
    if _is_replicated(name, shapes):
        return None
    found = None
    for row in (*LINEAR, *(CONV1D if is_conv1d(path, shapes) else ())):
        if _matches(path, row.names):
            found = row.weight if kind == "weight" else row.bias
    dims = dims_of(found or "")
    if not found or len(dims) != len(shapes[name]):
        return None
    dims = with_heads(dims, shapes[name], heads) if heads is not None else dims
    for dim, size in zip(dims, shapes[name], strict=True):
        fused = re.match(r"\((\d+) ", dim)
        if fused is not None and size % int(fused[1]):
            return None
    return dims


def _matches(path: str, names: str) -> bool:
    return any(fnmatchcase(path, name) or fnmatchcase(path, f"*.{name}") for name in names.split())


def _is_replicated(name: str, shapes: Shapes) -> bool:
    path = name.removesuffix(".weight").removesuffix(".bias")
    module, _, last = path.rpartition(".")
    gates_values = last == "gate" and any(other.startswith(f"{module}.up") for other in shapes)  # and routes nothing
    return not gates_values and _matches(path, " ".join(REPLICATED))


def is_conv1d(path: str, shapes: Shapes) -> bool:
    """Whether the matrices of this layer are `in out`, told by the one that widens."""
    if path.rpartition(".")[2] not in ("c_attn", "c_fc", "c_proj"):
        return False
    layer = path.rpartition(".")[0].rpartition(".")[0]
    for sibling in ("attn.c_attn", "mlp.c_fc"):
        shape = shapes.get(f"{layer}.{sibling}.weight")
        if shape is not None and len(shape) == 2:
            return shape[1] > shape[0]
    return False
