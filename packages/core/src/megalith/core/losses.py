"""How is a language model's loss taken without ever holding all its logits? Some tokens at a time, and again backward.

The logits of a vocabulary are the largest tensor of a language model: b s v numbers, made in one line and used in the
next. Here a chunk of the tokens is multiplied with the head, reduced to one number a token, and forgotten; the backward
makes its logits again. Plain torch ops, so that a mesh splits them like any others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from megalith.core import _compat

__all__ = ["chunked_cross_entropy"]

Tensor = torch.Tensor


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    chunks: int,
    ignore_index: int = -100,
    reduction: str = "mean",
    softcap: float | None = None,
) -> Tensor:
    """`F.cross_entropy(hidden @ weight.T, labels)`, of which only the logits of a chunk of tokens exist at a time.

    The tokens are dealt to the chunks in turn along their last dim: chunk i has those at i, i + chunks, i + 2 chunks
    and so on, and what does not divide is a chunk of its own. So each rank computes a part of every chunk, and nothing
    moves, also where that dim is split, as long as `chunks` divides what a rank has of it. A head that is split by
    vocabulary, `(tp v) e`, sends two numbers forward a token, its largest logit and its sum, and never a logit.

    Cut Cross-Entropy (Wijmans et al., arXiv:2411.09009) and Liger Kernel (Hsu et al., arXiv:2410.10989) do the same in
    kernels. The memory is b s v / chunks numbers; the price is that the logits are computed twice.

    Args:
        hidden: what the head is given, [..., e].
        weight: the head, [v, e]; the embedding's weight where they are tied.
        labels: the index of the right token, [...].
        chunks: how many parts.
        ignore_index: a label that does not count.
        reduction: "mean" over the labels that count, "sum", or "none" for a loss a token, [...].
        softcap: where given, the logits z are softcap tanh(z / softcap), as in Gemma 2.

    Returns:
        the loss, in float32 or, where `hidden` is in float64, in that. The gradient of `weight` is added up in the
        dtype of `weight`.

    Raises:
        ValueError: shapes that do not fit each other, another reduction, fewer than one chunk.

    >>> hidden, weight, labels = torch.ones(2, 6, 4), torch.zeros(10, 4), torch.zeros(2, 6, dtype=torch.int64)
    >>> chunked_cross_entropy(hidden, weight, labels, chunks=3)     # log(10)
    tensor(2.3026)
    """
    _check(hidden, weight, labels, chunks, reduction)
    counts = labels != ignore_index
    safe = torch.where(counts, labels, 0)
    if _compat.functorch_levels() in ((), ("grad",)):
        loss, _ = _ChunkedNLL.apply(hidden, weight, safe, chunks, softcap)
    else:  # another transform of `torch.func`, which the plain ops know
        loss, _ = _forward(hidden, weight, safe, chunks, softcap)
    loss = torch.where(counts, loss, 0)
    if reduction == "none":
        return loss
    return loss.sum() / counts.sum() if reduction == "mean" else loss.sum()


def _check(hidden: Tensor, weight: Tensor, labels: Tensor, chunks: int, reduction: str) -> None:
    shapes = f"hidden {list(hidden.shape)}, weight {list(weight.shape)}, labels {list(labels.shape)}"
    if weight.ndim != 2 or hidden.ndim < 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(f"{shapes}: write hidden as [..., e] and weight as [v, e]")
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(f"{shapes}: there is one label a token, so write labels as {list(hidden.shape[:-1])}")
    if chunks < 1:
        raise ValueError(f"chunks is {chunks}; write 1 or more")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction is {reduction!r}; write 'mean', 'sum' or 'none'")


class _ChunkedNLL(torch.autograd.Function):
    """`logsumexp(logits) - logits[label]` a token, and the logsumexp, which has a derivative like any other result."""

    @staticmethod
    def forward(
        hidden: Tensor, weight: Tensor, labels: Tensor, chunks: int, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        return _forward(hidden, weight, labels, chunks, softcap)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        hidden, weight, labels, ctx.chunks, ctx.softcap = inputs
        ctx.save_for_backward(hidden, weight, labels, output[1])

    @staticmethod
    def backward(ctx: Any, g: Tensor, g_lse: Tensor) -> Any:
        hidden, weight, labels, lse = ctx.saved_tensors
        n = ctx.chunks
        per_token = (_dealt(x.unsqueeze(-1), -2, n) for x in (labels, lse, g, g + g_lse))
        grads: list[Tensor] = []
        weight_grad = None
        for h, label, z, g_picked, g_sum in zip(_dealt(hidden, -2, n), *per_token, strict=True):
            logits = _logits(h, weight, ctx.softcap)
            g_logits = ((logits - z).exp() * g_sum).scatter_add(-1, label, -g_picked)
            if ctx.softcap is not None:
                g_logits = g_logits * (1 - (logits / ctx.softcap) ** 2)
            g_logits = g_logits.to(h.dtype)
            grads.append(g_logits @ weight)
            more = g_logits.flatten(0, -2).T @ h.flatten(0, -2)
            weight_grad = more if weight_grad is None else weight_grad + more
        return _gathered(grads, -2, hidden.shape[-2], n), weight_grad, None, None, None


def _forward(
    hidden: Tensor, weight: Tensor, labels: Tensor, chunks: int, softcap: float | None
) -> tuple[Tensor, Tensor]:
    losses, lses = [], []
    for h, y in zip(_dealt(hidden, -2, chunks), _dealt(labels, -1, chunks), strict=True):
        logits = _logits(h, weight, softcap)
        picked = logits.gather(-1, y.unsqueeze(-1))
        peak = logits.detach().amax(-1, keepdim=True)
        lse = peak + (logits - peak).exp().sum(-1, keepdim=True).log()
        losses.append((lse - picked).squeeze(-1))
        lses.append(lse.squeeze(-1))
    n = labels.shape[-1]
    return _gathered(losses, -1, n, chunks), _gathered(lses, -1, n, chunks)


def _logits(hidden: Tensor, weight: Tensor, softcap: float | None) -> Tensor:
    logits = F.linear(hidden, weight)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return logits if softcap is None else (logits / softcap).tanh() * softcap


def _dealt(x: Tensor, dim: int, chunks: int) -> list[Tensor]:
    """The parts of a dim: every `chunks`-th element from each of the first, and the rest."""
    n = x.shape[dim]
    rest = n % chunks
    whole, last = x.split([n - rest, rest], dim)
    parts = list(whole.unflatten(dim, (-1, chunks)).unbind(dim)) if n >= chunks else []
    return [*parts, last] if rest else parts


def _gathered(parts: list[Tensor], dim: int, n: int, chunks: int) -> Tensor:
    """The inverse of `_dealt`."""
    k = len(parts) - bool(n % chunks)
    whole = [torch.stack(parts[:k], dim).flatten(dim - 1, dim)] if k else []
    return torch.cat([*whole, *parts[k:]], dim)
