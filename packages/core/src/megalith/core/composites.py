"""Which torch functions stay whole in a graph? Attention and cross-entropy, whatever the device and dtype.

`F.scaled_dot_product_attention` and `F.cross_entropy` dispatch to many kernels, with layouts and outputs of their own.
While a program is traced they are replaced by the functions here: one op each, with one factor rule. Under a transform
of `torch.func` that needs more than one reverse derivative they are written out in plain ops instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from megalith.core import _compat
from megalith.core.markers import constrain
from megalith.core.trace import Tracer, current_tracer
from megalith.sharding.layout import Layout

__all__ = ["Intercept", "lse_dtype"]

Tensor = torch.Tensor

_library = torch.library.Library("megalith", "FRAGMENT")
_library.define(
    "sdpa(Tensor q, Tensor k, Tensor v, Tensor? mask, bool causal, float scale) -> (Tensor, Tensor)",
    tags=[torch.Tag.pt2_compliant_tag],
)
_library.define(
    "sdpa_backward(Tensor g, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor out, Tensor lse, bool causal, "
    "float scale) -> (Tensor, Tensor, Tensor)",
    tags=[torch.Tag.pt2_compliant_tag],
)
_library.define(
    "sdpa_merge(Tensor out, Tensor lse, Tensor more, Tensor more_lse, int first) -> (Tensor, Tensor)",
    tags=[torch.Tag.pt2_compliant_tag],
)


def _additive(mask: Tensor | None, q: Tensor) -> Tensor | None:
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -math.inf)


def _finite(lse: Tensor) -> Tensor:
    """The log-sum-exp with 0 for rows that see nothing: their weights are then exp(-inf - 0) = 0."""
    return lse.masked_fill(lse == -math.inf, 0)


def _dense(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Torch's kernel takes the last dim for dense, and gives wrong numbers where a slice or a transpose is not."""
    return tuple(t if t.stride(-1) == 1 else t.contiguous() for t in tensors)


def _sdpa_cpu(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Any:
    q, k, v = _dense(q, k, v)
    if not q.numel():
        return torch.zeros_like(q), q.new_zeros(q.shape[:-1])
    mask = _additive(mask, q)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=mask, scale=scale
    )
    return (out, lse) if mask is None else (out, lse.masked_fill(mask.amax(-1) == -math.inf, -math.inf))


def _sdpa_backward_cpu(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> Any:
    if not g.numel():
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    g, q, k, v, out = _dense(g, q, k, v, out)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        g, q, k, v, out, _finite(lse).contiguous(), 0.0, causal, attn_mask=_additive(mask, q), scale=scale
    )


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    scores = (q * scale) @ k.transpose(-1, -2)  # b h q k
    if causal:
        keep = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        scores = torch.where(keep, scores, -math.inf)
    if mask is not None:
        scores = torch.where(mask, scores, -math.inf) if mask.dtype == torch.bool else scores + mask
    return scores


def _sdpa_any(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Any:
    scores = _scores(q, k, mask, causal, scale)
    lse = scores.logsumexp(-1)
    return (scores - _finite(lse)[..., None]).exp() @ v, lse


def _sdpa_backward_any(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> Any:
    p = (_scores(q, k, mask, causal, scale) - _finite(lse)[..., None]).exp()
    dv = p.transpose(-1, -2) @ g
    ds = p * (g @ v.transpose(-1, -2) - (g * out).sum(-1, keepdim=True))
    return ds @ k * scale, ds.transpose(-1, -2) @ q * scale, dv


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the log-sum-exp of queries of this dtype."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _sdpa_meta(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Any:
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(q.shape[:-1], dtype=lse_dtype(q.dtype))


def _sdpa_backward_meta(g: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Any:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _sdpa_merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Attention to further keys joined to what is there, for the rows of queries from `first` on.

    With the dtype of `lse`, so that sums over many blocks of keys keep their digits. A row that sees none of the keys
    has a log-sum-exp of -inf and the weight 0.
    """
    out, lse = out.to(lse.dtype, copy=True), lse.clone()
    rows = slice(first, first + more.shape[-2])
    before = lse[..., rows].clone()
    after = torch.logaddexp(before, more_lse, out=lse[..., rows])
    shift = _finite(after)
    out[..., rows, :].mul_((before - shift).exp_()[..., None])
    out[..., rows, :].addcmul_(more.to(lse.dtype), (more_lse - shift).exp_()[..., None])
    return out, lse


def _sdpa_merge_meta(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor, first: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(out, dtype=lse.dtype), torch.empty_like(lse)


_library.impl("sdpa", _sdpa_cpu, "CPU")
_library.impl("sdpa_merge", _sdpa_merge, "CPU")
_library.impl("sdpa_merge", _sdpa_merge, "CUDA")
_library.impl("sdpa_merge", _sdpa_merge_meta, "Meta")
_library.impl("sdpa_backward", _sdpa_backward_cpu, "CPU")
_library.impl("sdpa", _sdpa_any, "CUDA")
_library.impl("sdpa_backward", _sdpa_backward_any, "CUDA")
_library.impl("sdpa", _sdpa_meta, "Meta")
_library.impl("sdpa_backward", _sdpa_backward_meta, "Meta")


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Any:
        return torch.ops.megalith.sdpa(q, k, v, mask, causal, scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        q, k, v, mask, ctx.causal, ctx.scale = inputs
        out, lse = output
        ctx.mark_non_differentiable(lse)
        ctx.save_for_backward(q, k, v, mask, out, lse)

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Any) -> Any:
        q, k, v, mask, out, lse = ctx.saved_tensors
        grads = torch.ops.megalith.sdpa_backward(g, q, k, v, mask, out, lse, ctx.causal, ctx.scale)
        return *grads, None, None, None


class _CrossEntropy(torch.autograd.Function):
    """Negative log-likelihood of each target: `logsumexp(logits) - logits[target]`, over the last dim."""

    @staticmethod
    def forward(logits: Tensor, target: Tensor) -> Any:
        picked = logits.gather(-1, target.unsqueeze(-1))  # first, so that over shards it is summed with what follows
        peak = logits.amax(-1, keepdim=True)
        lse = peak + (logits - peak).exp().sum(-1, keepdim=True).log()
        return (lse - picked).squeeze(-1), lse

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        logits, target = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, target, output[1])

    @staticmethod
    def backward(ctx: Any, g: Any, g_lse: Any) -> Any:
        logits, target, lse = ctx.saved_tensors
        p = (logits - lse).exp()
        if g is None:
            return p * g_lse, None
        g = g.unsqueeze(-1)
        every = g if g_lse is None else g + g_lse  # of the logsumexp itself, where a derivative is differentiated
        return (p * every).scatter_add(-1, target.unsqueeze(-1), -g), None


def _one_reverse_derivative() -> bool:
    """Whether a function with a first reverse derivative only is enough here."""
    return _compat.functorch_levels() in ((), ("grad",))


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    if dropout_p > 0 or query.ndim != 4:
        return NotImplemented
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    tracer = current_tracer()
    spec = tracer.meet_attention() if tracer is not None else None
    layouts = () if spec is None else tuple(side.strip() for side in spec.pattern.split("->"))
    if key.shape[1] != query.shape[1]:
        moved = _heads_moved(key.shape[1], query.shape[1], layouts[-1], query, tracer) if layouts else key.shape[1]
        key, value = (_repeat_heads(x, moved) for x in (key, value))
    for layout in layouts:
        query, key, value = (constrain(x, layout) for x in (query, key, value))
    key, value = (_repeat_heads(x, query.shape[1]) for x in (key, value))
    out = _whole_attention(query, key, value, attn_mask, is_causal, scale)
    for layout in reversed(layouts):
        out = constrain(out, layout)
    return out


def _whole_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool, scale: float
) -> Tensor:
    whole = value.shape[-1] == query.shape[-1] and not (attn_mask is not None and attn_mask.requires_grad)
    if whole and _one_reverse_derivative():
        out: Tensor = _Attention.apply(query, key, value, attn_mask, is_causal, scale)[0]
        return out
    return torch.softmax(_scores(query, key, attn_mask, is_causal, scale), -1) @ value


def _heads_moved(n: int, heads: int, layout: str, query: Tensor, tracer: Tracer | None) -> int:
    """To how many heads the n of keys and values are repeated before they move to where they are used.

    To the fewest that the ranks of the layout's heads share evenly, so that no rank is sent a head twice; to all where
    those are no part of all.
    """
    if tracer is None or tracer.mesh is None:
        return n
    used = Layout.parse(layout, tuple(query.shape), tracer.mesh, tracer.sizes, "the queries of an attention")
    least = math.lcm(n, math.prod(tracer.mesh.sizes[axis] for axis in used.dims[1].axes))
    return least if heads % least == 0 else heads


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    b, h, s, d = x.shape
    if h == heads:
        return x
    return x[:, :, None].expand(b, h, heads // h, s, d).reshape(b, heads, s, d)


def _cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    plain = weight is None and label_smoothing == 0 and size_average is None and reduce is None
    if not plain or target.dtype.is_floating_point or input.ndim < 1:
        return NotImplemented
    logits = input.movedim(1, -1) if input.ndim > 2 else input
    valid = target != ignore_index
    safe = torch.where(valid, target, 0)
    if _one_reverse_derivative():
        loss = _CrossEntropy.apply(logits, safe)[0]
    else:
        loss = logits.logsumexp(-1) - logits.gather(-1, safe.unsqueeze(-1)).squeeze(-1)
    loss = torch.where(valid, loss, 0)
    if reduction == "none":
        return loss
    return loss.sum() / valid.sum() if reduction == "mean" else loss.sum()


_COMPOSITES: dict[Any, Callable[..., Any]] = {
    F.scaled_dot_product_attention: _attention,
    F.cross_entropy: _cross_entropy,
}


class Intercept(TorchFunctionMode):
    """While active, the torch functions of this page are replaced by their composites."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tracer = current_tracer()
        if func is torch.autograd.grad and tracer is not None:
            tracer.backward_depth += 1
            try:
                return func(*args, **kwargs)
            finally:
                tracer.backward_depth -= 1
        composite = _COMPOSITES.get(func)
        if composite is not None:
            out = composite(*args, **kwargs)
            if out is not NotImplemented:
                return out
        return func(*args, **kwargs)
