"""What does each row get from the experts that it chose? Dropless experts as one op, and the pieces it is made of.

Every row goes to its experts, whatever their load: rows are sorted by expert, each expert's matrices meet its slice,
and the results go back to where the rows came from (MegaBlocks, arXiv:2211.15841). The recipe is written once, over
local ops, a swap of counts and an exchange of rows: on one device the last two do nothing, on a mesh they are
collectives.

Letters: r rows, k choices a row, E experts, d dim of a row, f hidden dim, o dim of the result, p ranks that exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

from megalith.core import _compat

__all__ = ["ACTIVATIONS", "Steps", "experts", "run_backward", "run_forward"]

Tensor = torch.Tensor
T = TypeVar("T")
aten = torch.ops.aten


def experts(x: Tensor, ids: Tensor, ins: Sequence[Tensor], out: Tensor, activation: str = "silu") -> Tensor:
    """What its experts make of each row: `out[e] @ (act(ins[0][e] @ x) * (ins[1][e] @ x))`, without a capacity.

    Where `x` and the weights are sharded over the same mesh axis (`(ep r) d` and `(ep E) f d`), rows travel to the
    ranks that hold their experts and results travel back; over different axes no row travels.

    Args:
        x: rows `r d`.
        ids: for each row the experts that it goes to, `r k`, int64.
        ins: one matrix or two per expert, `E f d`: with two the second multiplies what the activation gives (GLU).
        out: `E o f`.
        activation: one of `ACTIVATIONS`.

    Returns:
        `r k o`; a weighted sum over k is the caller's.

    Raises:
        ValueError: an activation or shapes that do not fit.

    >>> x, ids = torch.ones(2, 3), torch.tensor([[0], [1]])
    >>> experts(x, ids, [torch.ones(2, 4, 3)], torch.ones(2, 3, 4), "relu").shape
    torch.Size([2, 1, 3])
    """
    _check(x, ids, ins, out, activation)
    if _compat.functorch_levels() in ((), ("grad",)):
        return _Experts.apply(x, ids, activation, out, *ins)
    return _every_expert(x, ids, ins, out, activation)


def _check(x: Tensor, ids: Tensor, ins: Sequence[Tensor], out: Tensor, activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"experts know no activation {activation!r}; write one of {', '.join(ACTIVATIONS)}")
    shapes = [tuple(t.shape) for t in (x, ids, *ins, out)]
    fits = len(ins) in (1, 2) and x.ndim == ids.ndim == 2 and out.ndim == 3 and len(x) == len(ids)
    if not fits or any(tuple(w.shape) != (out.shape[0], out.shape[2], x.shape[1]) for w in ins):
        raise ValueError(
            f"experts take rows `r d`, ids `r k`, one or two matrices `E f d` and one `E o f`; got {shapes}"
        )


# --- activations -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Activation:
    """An element-wise function by its op and the op of its gradient `(g, x) -> dx`, with what they take further."""

    op: Any
    backward: Any
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()


_TANH = (("approximate", "tanh"),)
ACTIVATIONS: dict[str, Activation] = {
    "silu": Activation(aten.silu.default, aten.silu_backward.default),
    "gelu": Activation(aten.gelu.default, aten.gelu_backward.default),
    "gelu_tanh": Activation(aten.gelu.default, aten.gelu_backward.default, kwargs=_TANH),
    "relu": Activation(aten.relu.default, aten.threshold_backward.default, (0,)),
}
"""The activations by name."""


# --- the recipe --------------------------------------------------------------------------------------


class Steps(Protocol[T]):
    """What the recipe is carried out by: on tensors at once, or as instructions on slots.

    `slots[e]` is where an expert stands among those of all ranks that exchange rows, `n_experts` to a rank, or
    `n_ranks * n_experts` for one that none of them holds; `n_here` of the places of this rank are taken. `share` rows
    are expected to arrive.
    """

    slots: tuple[int, ...]
    n_ranks: int
    n_experts: int
    n_here: int
    share: int

    def op(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> T: ...

    def shape(self, x: T) -> tuple[int, ...]: ...

    def swap(self, counts: T) -> T:
        """Row i of the counts `p E` to rank i."""

    def exchange(self, rows: T, sent: T, received: T, n: int) -> T:
        """Rows, those for a rank together, to the ranks; the counts `p E` say how many go to and come from each.

        n rows are expected to arrive.
        """


@dataclass(frozen=True)
class _Away(Generic[T]):
    """How rows travel: how many for each rank's experts are sent and received, `p E`, and where they then stand."""

    sent: T
    received: T
    regroup: T  # positions in what has arrived, by expert


@dataclass(frozen=True)
class _Route(Generic[T]):
    """Which row goes where. A pair is a row and one of its choices, numbered as `r k` lies in memory."""

    pairs: T  # in the order in which they are sent: by rank, by expert
    rows: T  # the row of each of these pairs
    counts: T  # rows that each expert here gets
    away: _Away[T] | None = None


def _route(do: Steps[T], ids: T) -> _Route[T]:
    _, k = do.shape(ids)
    n = do.n_ranks * do.n_experts
    slots = do.op(_ops.expert_slots.default, ids, list(do.slots))
    pairs = do.op(_ops.expert_order.default, slots, n)
    rows = do.op(aten.floor_divide.default, pairs, k)
    counts = do.op(_ops.expert_counts.default, slots, n)
    if do.n_ranks == 1:
        return _Route(pairs, rows, counts)
    sent = do.op(aten.reshape.default, counts, [do.n_ranks, do.n_experts])
    received = do.swap(sent)
    regroup = do.op(_ops.expert_regroup.default, received, do.share)
    here = do.op(aten.sum.dim_IntList, received, [0])
    if do.n_here < do.n_experts:
        here = do.op(aten.slice.Tensor, here, 0, 0, do.n_here)
    return _Route(pairs, rows, here, _Away(sent, received, regroup))


def _to_experts(do: Steps[T], x: T, index: T, route: _Route[T]) -> T:
    """The indexed rows of x, with their experts: those of an expert together."""
    rows = do.op(aten.index_select.default, x, 0, index)
    if route.away is None:
        return rows
    arrived = do.exchange(rows, route.away.sent, route.away.received, do.share)
    return do.op(aten.index_select.default, arrived, 0, route.away.regroup)


def _from_experts(do: Steps[T], rows: T, route: _Route[T], r: int, k: int) -> T:
    """Back home, `r k o`; zeros for what no expert here has seen."""
    if route.away is not None:
        by_rank = do.op(_ops.expert_scatter.default, rows, route.away.regroup, -1)
        rows = do.exchange(by_rank, route.away.received, route.away.sent, r * k)
    pairs = do.op(_ops.expert_scatter.default, rows, route.pairs, r * k)
    return do.op(aten.reshape.default, pairs, [r, k, do.shape(rows)[-1]])


def _activate(do: Steps[T], hidden: Sequence[T], activation: str) -> T:
    act = ACTIVATIONS[activation]
    made = do.op(act.op, hidden[0], **dict(act.kwargs))
    return made if len(hidden) == 1 else do.op(aten.mul.Tensor, made, hidden[1])


def _activate_backward(do: Steps[T], g: T, hidden: Sequence[T], activation: str) -> list[T]:
    act = ACTIVATIONS[activation]
    options = dict(act.kwargs)
    if len(hidden) == 1:
        return [do.op(act.backward, g, hidden[0], *act.args, **options)]
    second = do.op(aten.mul.Tensor, g, do.op(act.op, hidden[0], **options))
    first = do.op(aten.mul.Tensor, g, hidden[1])
    return [do.op(act.backward, first, hidden[0], *act.args, **options), second]


def run_forward(do: Steps[T], x: T, ids: T, ins: Sequence[T], out: T, activation: str) -> T:
    """The forward of `experts` by steps."""
    r, k = do.shape(ids)
    route = _route(do, ids)
    rows = _to_experts(do, x, route.rows, route)
    hidden = [do.op(_ops.expert_mm.default, rows, w, route.counts) for w in ins]
    made = do.op(_ops.expert_mm.default, _activate(do, hidden, activation), out, route.counts)
    return _from_experts(do, made, route, r, k)


def run_backward(do: Steps[T], g: T, x: T, ids: T, ins: Sequence[T], out: T, activation: str) -> list[T]:
    """The gradients of x, of each of `ins` and of `out`, by steps.

    It begins as the forward does. Where that has run on the same values, the pass `merge` takes its results.
    """
    r, k = do.shape(ids)
    route = _route(do, ids)
    rows = _to_experts(do, x, route.rows, route)
    hidden = [do.op(_ops.expert_mm.default, rows, w, route.counts) for w in ins]
    pairs = do.op(aten.reshape.default, g, [r * k, do.shape(g)[-1]])
    g_made = _to_experts(do, pairs, route.pairs, route)
    g_out = do.op(_ops.expert_outer.default, g_made, _activate(do, hidden, activation), route.counts)
    g_active = do.op(_ops.expert_mm.default, g_made, do.op(aten.permute.default, out, [0, 2, 1]), route.counts)
    g_hidden = _activate_backward(do, g_active, hidden, activation)
    g_ins = [do.op(_ops.expert_outer.default, gh, rows, route.counts) for gh in g_hidden]
    flat = [do.op(aten.permute.default, w, [0, 2, 1]) for w in ins]
    terms = [do.op(_ops.expert_mm.default, gh, w, route.counts) for gh, w in zip(g_hidden, flat, strict=True)]
    g_rows = terms[0] if len(terms) == 1 else do.op(aten.add.Tensor, *terms)
    g_x = do.op(aten.sum.dim_IntList, _from_experts(do, g_rows, route, r, k), [1])
    return [g_x, *g_ins, g_out]


class _AtOnce:
    """The steps on tensors, on one device that holds all experts."""

    n_ranks = 1
    share = 0

    def __init__(self, n_experts: int) -> None:
        self.n_experts = self.n_here = n_experts
        self.slots = tuple(range(n_experts))

    def op(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
        made: Tensor = fn(*args, **kwargs)
        return made

    def shape(self, x: Tensor) -> tuple[int, ...]:
        return tuple(x.shape)

    def swap(self, counts: Tensor) -> Tensor:
        return counts

    def exchange(self, rows: Tensor, sent: Tensor, received: Tensor, n: int) -> Tensor:
        return rows


# --- the op ------------------------------------------------------------------------------------------

_library = torch.library.Library("megalith", "FRAGMENT")
_PURE = [torch.Tag.pt2_compliant_tag]
for _schema in (
    "experts(Tensor x, Tensor ids, Tensor[] ins, Tensor out, str activation) -> Tensor",
    "experts_backward(Tensor g, Tensor x, Tensor ids, Tensor[] ins, Tensor out, str activation) -> Tensor[]",
    "expert_slots(Tensor ids, int[] slots) -> Tensor",
    "expert_order(Tensor slots, int n) -> Tensor",
    "expert_counts(Tensor slots, int n) -> Tensor",
    "expert_regroup(Tensor counts, int n) -> Tensor",
    "expert_scatter(Tensor rows, Tensor places, int n) -> Tensor",
    "expert_mm(Tensor rows, Tensor weight, Tensor counts) -> Tensor",
    "expert_outer(Tensor g, Tensor rows, Tensor counts) -> Tensor",
):
    _library.define(_schema, tags=_PURE)
_ops = torch.ops.megalith


def _experts(x: Tensor, ids: Tensor, ins: list[Tensor], out: Tensor, activation: str) -> Tensor:
    return run_forward(_AtOnce(len(out)), x, ids, ins, out, activation)


def _experts_backward(
    g: Tensor, x: Tensor, ids: Tensor, ins: list[Tensor], out: Tensor, activation: str
) -> list[Tensor]:
    return run_backward(_AtOnce(len(out)), g, x, ids, ins, out, activation)


def _slots(ids: Tensor, slots: list[int]) -> Tensor:
    """The slot of each pair, by its expert."""
    return torch.tensor(slots, device=ids.device)[ids.flatten()]


def _order(slots: Tensor, n: int) -> Tensor:
    """The pairs by slot, in their own order within each; those of slot n, which nobody holds, are left out."""
    order = slots.argsort(stable=True)
    return order[: int((slots < n).sum())]


def _counts(slots: Tensor, n: int) -> Tensor:
    return torch.bincount(slots, minlength=n + 1)[:n]


def _regroup(counts: Tensor, n: int) -> Tensor:
    """Of rows that lie by rank and then by expert, the positions by expert and then by rank. n are expected."""
    ranks, n_experts = counts.shape
    owner = torch.arange(n_experts, device=counts.device).repeat(ranks).repeat_interleave(counts.flatten())
    return owner.argsort(stable=True)


def _scatter(rows: Tensor, places: Tensor, n: int) -> Tensor:
    """Row i to place `places[i]` of n (of as many as there are, where n is -1); zeros in the others."""
    n = len(places) if n < 0 else n
    made = rows.new_empty if n == len(places) else rows.new_zeros
    return made((n, rows.shape[1])).index_copy_(0, places, rows)


def _slices(counts: Tensor, n: int) -> list[slice]:
    """Where each of the first n experts has its rows."""
    ends = counts[:n].cumsum(0).tolist()
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def _mm(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Rows times the transposed matrix `o i` of their expert."""
    out = rows.new_empty((len(rows), weight.shape[1]))
    for matrix, at in zip(weight, _slices(counts, len(weight)), strict=True):
        if at.start < at.stop:
            torch.mm(rows[at], matrix.T, out=out[at])
    return out


def _outer(g: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
    """The gradient `E o i` of the matrices: zero for an expert without rows."""
    slices = _slices(counts, len(counts))
    out = g.new_empty((len(slices), g.shape[1], rows.shape[1]))
    for matrix, at in zip(out, slices, strict=True):
        torch.mm(g[at].T, rows[at], out=matrix)
    return out


_KERNELS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "experts": (_experts, lambda x, ids, ins, out, _: x.new_empty((*ids.shape, out.shape[1]))),
    "experts_backward": (
        _experts_backward,
        lambda g, x, ids, ins, out, _: [torch.empty_like(t) for t in (x, *ins, out)],
    ),
    "expert_slots": (_slots, lambda ids, slots: ids.new_empty(ids.numel())),
    "expert_order": (_order, lambda slots, n: torch.empty_like(slots)),
    "expert_counts": (_counts, lambda slots, n: slots.new_empty(n)),
    "expert_regroup": (_regroup, lambda counts, n: counts.new_empty(n)),
    "expert_scatter": (
        _scatter,
        lambda rows, places, n: rows.new_empty((len(places) if n < 0 else n, rows.shape[1])),
    ),
    "expert_mm": (_mm, lambda rows, weight, counts: rows.new_empty((len(rows), weight.shape[1]))),
    "expert_outer": (_outer, lambda g, rows, counts: g.new_empty((len(counts), g.shape[1], rows.shape[1]))),
}
for _name, (_kernel, _meta) in _KERNELS.items():
    _library.impl(_name, _kernel, "CPU")
    _library.impl(_name, _kernel, "CUDA")
    _library.impl(_name, _meta, "Meta")


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, ids: Tensor, activation: str, out: Tensor, *ins: Tensor) -> Any:
        return _ops.experts(x, ids, list(ins), out, activation)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ids, ctx.activation, out, *ins = inputs
        ctx.save_for_backward(x, ids, out, *ins)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, ids, out, *ins = ctx.saved_tensors
        g_x, *g_ins, g_out = _ops.experts_backward(g, x, ids, ins, out, ctx.activation)
        return g_x, None, None, g_out, *g_ins


def _every_expert(x: Tensor, ids: Tensor, ins: Sequence[Tensor], out: Tensor, activation: str) -> Tensor:
    """The same in plain ops, for derivatives of any order: every expert sees every row."""
    act = ACTIVATIONS[activation]
    hidden = [torch.einsum("rd,efd->ref", x, w) for w in ins]
    active = act.op(hidden[0], **dict(act.kwargs))
    made = torch.einsum("ref,eof->reo", active if len(ins) == 1 else active * hidden[1], out)
    return made.gather(1, ids.unsqueeze(-1).expand(*ids.shape, made.shape[-1]))
