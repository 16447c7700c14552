"""How does a Hugging Face model shard, unmodified? By the names and shapes of its parameters, looked up in tables.

A row of a table says how the weight and the bias of the modules of some names lie; `tp` in it is the axis asked for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["data_parallel", "functional", "parameter_sharded", "tensor_parallel", "unmatched"]


class Row(NamedTuple):
    """Modules by the tail of their name, with the layouts of their weight and bias.

    An entry matches a whole last part of the path (`q_proj`), or more than one (`attention.output.dense`).
    """

    names: str
    weight: str
    bias: str = ""


# Matrices of nn.Linear are `out in`. Rows further down win.
LINEAR = [
    Row("q_proj k_proj v_proj query key value SelfAttention.[qkv] EncDecAttention.[qkv]", "(tp o) i", "(tp o)"),
    Row("gate_proj up_proj fc1 c_fc wi wi_0 wi_1 w1 w3 intermediate.dense dense_h_to_4h", "(tp o) i", "(tp o)"),
    Row("query_key_value", "(tp o) i", "(tp o)"),  # interleaved by head
    Row("qkv qkv_proj c_attn", "(3 tp o) i", "(3 tp o)"),
    Row("o_proj out_proj SelfAttention.o EncDecAttention.o attention.dense fc2 c_proj wo w2", "o (tp i)", "o"),
    Row("down_proj output.dense dense_4h_to_h", "o (tp i)", "o"),
    Row("embed_tokens word_embeddings wte shared tok_embeddings embed_in", "(tp v) e"),
    Row("lm_head embed_out cls.predictions.decoder", "(tp v) e", "(tp v)"),
    Row("cls.predictions", "", "(tp v)"),
    Row("relative_attention_bias", "n (tp h)"),
]

# Matrices of GPT-2's Conv1D are `in out`.
CONV1D = [
    Row("c_attn", "i (3 tp o)", "(3 tp o)"),
    Row("c_fc", "i (tp o)", "(tp o)"),
    Row("c_proj", "(tp i) o", "o"),
]

# Experts stacked in one parameter: `expert out in`, gate and up one behind the other.
EXPERTS = [
    Row("experts.gate_up_proj", "e (2 tp f) i"),
    Row("experts.down_proj", "e o (tp f)"),
]
EXPERTS_APART = [
    Row("experts.gate_up_proj", "(ep e) f i"),
    Row("experts.down_proj", "(ep e) o f"),
]

# Known to be best replicated: small, or read by every rank.
REPLICATED = """
*norm *norm[0-9] *Norm *layernorm* *layer_norm* ln_* *_ln norm_* embed_positions position_embeddings
wpe token_type_embeddings cls_token distillation_token mask_token rotary_emb mlp.gate gate router *.router.* classifier
score pooler.dense transform.dense patch_embeddings.projection conv1 conv2
""".split()


def functional(model: nn.Module) -> tuple[Callable[..., Any], dict[str, Tensor]]:
    """A module as a pure function `fn(params, *inputs, **inputs)`, and its trainable parameters.

    Tied parameters appear once, under the first of their names, and stay tied.

    >>> fn, params = functional(nn.Linear(2, 3))
    >>> fn(params, torch.ones(1, 2)).shape, list(params)
    (torch.Size([1, 3]), ['weight', 'bias'])
    """

    def call(params: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        return torch.func.functional_call(model, dict(params), args, kwargs)

    return call, {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def tensor_parallel(
    model: nn.Module | Mapping[str, Tensor], axis: str = "tp", *, experts: str | None = None
) -> dict[str, str]:
    """Specs that split each layer over a mesh axis: Megatron's layout (Shoeybi et al., arXiv:1909.08053).

    The first matrix of attention and of the MLP by its outputs, the second by its inputs, embeddings and the head by
    vocabulary, experts by their hidden dim. What no table knows, and norms, are replicated.

    Args:
        model: a module, or its parameters by name.
        axis: the mesh axis.
        experts: a mesh axis that holds whole experts instead.

    Returns:
        a spec for every parameter; layers that agree share one, with `*` for their number.

    >>> tensor_parallel({"h.0.q_proj.weight": torch.empty(4, 2), "h.0.o_proj.weight": torch.empty(2, 4)})
    {'h.*.q_proj.weight': '(tp o) i', 'h.*.o_proj.weight': 'o (tp i)'}
    """
    shapes = _shapes(model)
    found: dict[str, str] = {}
    for name, shape in shapes.items():
        layout = _layout(name, shapes, experts is not None) or _whole(len(shape))
        found[name] = re.sub(r"\bep\b", experts or "ep", re.sub(r"\btp\b", axis, layout))
    return _shared(found)


def unmatched(model: nn.Module | Mapping[str, Tensor]) -> list[str]:
    """The parameters that no table knows; `tensor_parallel` leaves them replicated.

    >>> unmatched({"h.0.q_proj.weight": torch.empty(4, 2), "h.0.mystery.weight": torch.empty(4, 2)})
    ['h.0.mystery.weight']
    """
    shapes = _shapes(model)
    return [name for name in shapes if _layout(name, shapes, False) is None and not _is_replicated(name)]


def data_parallel(batch: Mapping[str, Tensor], axis: str = "dp") -> dict[str, str]:
    """Specs that split every tensor of a batch by its first dim.

    >>> data_parallel({"input_ids": torch.zeros(4, 16), "labels": torch.zeros(4)})
    {'input_ids': '(dp b) d1', 'labels': '(dp b)'}
    """
    return {
        name: " ".join([f"({axis} b)", *(f"d{d}" for d in range(1, t.ndim))]) for name, t in batch.items() if t.ndim
    }


def parameter_sharded(specs: Mapping[str, str], axis: str = "dp") -> dict[str, str]:
    """The same specs with each parameter at rest split over one more axis, and gathered at use (ZeRO-3, FSDP).

    The axis goes into the first dim that is split already, else into the first one. Gradients are reduce-scattered.

    >>> parameter_sharded({"q": "(tp o) i", "o": "o (tp i)", "norm": "e"})
    {'q': '(tp dp o) i -> (tp o) i', 'o': 'o (tp dp i) -> o (tp i)', 'norm': '(dp e) -> e'}
    """
    found = {}
    for name, used in specs.items():
        if "->" in used:
            raise ValueError(f"{name!r}: {used!r} says already how it is stored")
        group = re.search(r"\(([^()]*)\)", used)
        if group is not None:
            stored = used[: group.start(1)] + _inserted(group[1], axis) + used[group.end(1) :]
        else:
            stored = re.sub(r"^\s*([^\s()]+)", rf"({axis} \1)", used)
        found[name] = f"{stored} -> {used}" if stored != used else used
    return found


def _inserted(word: str, axis: str) -> str:
    """A group of factors with an axis before its last named factor."""
    factors = word.split()
    last = max((i for i, f in enumerate(factors) if f.isidentifier()), default=len(factors))
    return " ".join([*factors[:last], axis, *factors[last:]])


def _shapes(model: nn.Module | Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    named: Iterable[tuple[str, Tensor]] = model.named_parameters() if isinstance(model, nn.Module) else model.items()
    return {name: tuple(tensor.shape) for name, tensor in named}


def _layout(name: str, shapes: Mapping[str, tuple[int, ...]], experts_apart: bool) -> str | None:
    """What the tables say of a parameter, or None."""
    path, _, kind = name.rpartition(".")
    if kind not in ("weight", "bias"):
        path, kind = name, "weight"
    if _is_replicated(name):
        return None
    table = [*LINEAR, *(EXPERTS_APART if experts_apart else EXPERTS)]
    if _is_conv1d(path, shapes):
        table += CONV1D
    found = None
    for row in table:
        if any(fnmatchcase(path, n) or fnmatchcase(path, f"*.{n}") for n in row.names.split()):
            found = row.weight if kind == "weight" else row.bias
    dims = re.findall(r"\([^()]*\)|[^\s()]+", found or "")
    if not found or len(dims) != len(shapes[name]):
        return None
    for dim, size in zip(dims, shapes[name], strict=True):
        fused = re.match(r"\((\d+) ", dim)
        if fused is not None and size % int(fused[1]):
            return None
    return found


def _is_replicated(name: str) -> bool:
    path = name.removesuffix(".weight").removesuffix(".bias")
    return any(fnmatchcase(path, n) or fnmatchcase(path, f"*.{n}") for n in REPLICATED)


def _is_conv1d(path: str, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether the matrices of this layer are `in out`, told by the one that widens."""
    if path.rpartition(".")[2] not in ("c_attn", "c_fc", "c_proj"):
        return False
    layer = path.rpartition(".")[0].rpartition(".")[0]
    for sibling in ("attn.c_attn", "mlp.c_fc"):
        shape = shapes.get(f"{layer}.{sibling}.weight")
        if shape is not None and len(shape) == 2:
            return shape[1] > shape[0]
    return False


def _whole(rank: int) -> str:
    return " ".join(f"d{d}" for d in range(rank)) if rank else "..."


def _shared(specs: Mapping[str, str]) -> dict[str, str]:
    """One spec for all layers that agree, with `*` for their number."""
    patterns: dict[str, set[str]] = {}
    for name, layout in specs.items():
        patterns.setdefault(_starred(name), set()).add(layout)
    found: dict[str, str] = {}
    for name, layout in specs.items():
        pattern = _starred(name)
        found[pattern if len(patterns[pattern]) == 1 else name] = layout
    return found


def _starred(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
