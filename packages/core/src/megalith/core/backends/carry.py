"""How does a process group carry out one collective? As a function that starts it and one that awaits it.

The methods of a group are called, not torch.distributed's functions, since only these take a deadline for one
operation: without it gloo goes on by itself for half an hour, and so does the process that wants to end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megalith.core.backends.direct import COMBINE, Swap, direct_gather, direct_reduce_scatter, is_direct, sums_directly
from megalith.core.program import SUMS, Launch

__all__ = ["Finish", "Start", "carried_out"]

Tensor = torch.Tensor
Start = Callable[..., Any]
Finish = Callable[[Any], Tensor]

SWAP_BYTES = 256 << 10  # up to which two ranks do an all-reduce in one message each


def carried_out(
    launch: Launch,
    group: Any,
    timeout: timedelta,
    dtype: torch.dtype,
    shape: torch.Size,
    finish: Callable[[Any, bool], None],
) -> tuple[Start, Finish]:
    """What starts, and what awaits, a collective.

    Args:
        launch: the collective.
        group: the process group of its ranks.
        timeout: its deadline.
        dtype: of what is sent.
        shape: of what arrives.
        finish: awaits a piece of work, and is told whether that is on a GPU.
    """
    make = _reduction if launch.kind in SUMS else _movement
    return make(launch, group, timeout, dtype, shape, finish)


def _method(group: Any, name: str, old: str) -> Any:
    return getattr(group, name, None) or getattr(group, old)  # torch 2.13, and before


def _options(kind: Any, timeout: timedelta) -> Any:
    options = kind()
    options.timeout = timeout
    options.asyncOp = True
    return options


_CARRIED = {
    torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64
}  # fmt: skip


def _movement(
    launch: Launch,
    group: Any,
    timeout: timedelta,
    dtype: torch.dtype,
    shape: torch.Size,
    finish: Callable[[Any, bool], None],
) -> tuple[Start, Finish]:
    """An all-gather, an all-to-all or an exchange: flat buffers, as bytes where the dtype is not a common one."""
    carried = dtype if dtype in _CARRIED else torch.uint8
    scale = dtype.itemsize // carried.itemsize
    n = math.prod(shape) * scale
    if launch.sizes is not None:
        return _sized_exchange(group, timeout, shape, finish)
    swap = _swap(group, timeout)

    def arrived(pending: tuple[Any, Tensor]) -> Tensor:
        work, out = pending
        finish(work, out.is_cuda)
        return out

    send: Callable[[Tensor], Any]
    arrive: Callable[[Any], Tensor] = arrived
    if launch.kind != "all_gather":
        receives, sends = [r * scale for r in launch.receive], [s * scale for s in launch.send]

        def send(flat: Tensor) -> Any:
            out = torch.empty(n, dtype=carried, device=flat.device)
            return swap(out, flat, receives, sends), out

    elif group.name() == "gloo" and is_direct(group.size(), n * carried.itemsize // group.size()):
        send, arrive = direct_gather(swap, group.rank(), group.size(), lambda work: finish(work, False))
    else:
        gather = _method(group, "all_gather_single", "_allgather_base")
        options = _options(c10d.AllgatherOptions, timeout)

        def send(flat: Tensor) -> Any:
            out = torch.empty(n, dtype=carried, device=flat.device)
            return gather(out, flat, options), out

    def start(x: Tensor) -> Any:
        flat = x.contiguous().view(-1)
        if carried is not dtype:
            if flat.stride(0) != 1:  # of a single element any stride counts as contiguous, but not to view it as bytes
                flat = flat.clone(memory_format=torch.contiguous_format)
            flat = flat.view(carried)
        return send(flat)

    def wait(pending: Any) -> Tensor:
        return arrive(pending).view(dtype).view(shape)

    return start, wait


def _swap(group: Any, timeout: timedelta) -> Swap:
    swap, options = _method(group, "all_to_all_single", "alltoall_base"), _options(c10d.AllToAllOptions, timeout)
    return lambda out, sent, receives, sends: swap(out, sent, receives, sends, options)


def _sized_exchange(
    group: Any, timeout: timedelta, shape: torch.Size, finish: Callable[[Any, bool], None]
) -> tuple[Start, Finish]:
    """An exchange of as many rows as counts say when it starts."""
    swap = _swap(group, timeout)
    row = math.prod(shape[1:])

    def start(x: Tensor, sent: Tensor, received: Tensor) -> tuple[Any, Tensor]:
        sends, receives = ((counts.sum(1) * row).tolist() for counts in (sent, received))
        out = x.new_empty(sum(receives))
        return swap(out, x.contiguous().view(-1), receives, sends), out

    def wait(pending: tuple[Any, Tensor]) -> Tensor:
        work, out = pending
        finish(work, out.is_cuda)
        return out.view(-1, *shape[1:])

    return start, wait


_CODES = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_WIDER = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}


def _reduction(
    launch: Launch,
    group: Any,
    timeout: timedelta,
    dtype: torch.dtype,
    shape: torch.Size,
    finish: Callable[[Any, bool], None],
) -> tuple[Start, Finish]:
    """An all-reduce or a reduce-scatter; in a wider dtype where the transport has not this one."""
    op = launch.op
    if dtype is torch.bool:
        carried, op = torch.uint8, "min" if op == "min" else "max"  # or, or and
    else:
        carried = dtype if dtype in _CARRIED or dtype.is_complex else _WIDER.get(dtype, torch.float32)
    if launch.kind == "reduce_scatter":
        return _reduce_scatter(op, group, timeout, dtype, carried, shape, finish)
    small = math.prod(shape) * dtype.itemsize <= SWAP_BYTES
    if small and len(launch.peers) == 2 and carried is dtype and not dtype.is_complex and group.name() == "gloo":
        return _swapped_reduction(op, group, timeout, finish)
    options = _options(c10d.AllreduceOptions, timeout)
    options.reduceOp = _CODES[op]
    overwrite = launch.may_overwrite
    contiguous = torch.contiguous_format

    def start(x: Tensor) -> tuple[Any, Tensor]:
        if carried is not dtype:
            x = x.to(carried, memory_format=contiguous)
        elif not (overwrite and x.is_contiguous()):
            x = x.clone(memory_format=contiguous)
        return group.allreduce([torch.view_as_real(x) if x.is_complex() else x], options), x

    def wait(pending: tuple[Any, Tensor]) -> Tensor:
        work, out = pending
        finish(work, out.is_cuda)
        return out if carried is dtype else out.to(dtype)

    return start, wait


def _swapped_reduction(
    op: str, group: Any, timeout: timedelta, finish: Callable[[Any, bool], None]
) -> tuple[Start, Finish]:
    """A small all-reduce of two ranks over gloo: each sends its term to the other, as many bytes in half the steps."""
    swap = _swap(group, timeout)
    combine = COMBINE[op]
    me = group.rank()

    def start(x: Tensor) -> tuple[Any, tuple[Tensor, Tensor]]:
        flat = x.contiguous().view(-1)
        out = torch.empty_like(flat)
        sizes = [0, len(flat)] if me == 0 else [len(flat), 0]
        return swap(out, flat, sizes, sizes), (flat.view(x.shape), out)

    def wait(pending: tuple[Any, tuple[Tensor, Tensor]]) -> Tensor:
        work, (mine, theirs) = pending
        finish(work, False)
        return combine(mine, theirs.view(mine.shape))

    return start, wait


def _reduce_scatter(
    op: str,
    group: Any,
    timeout: timedelta,
    dtype: torch.dtype,
    carried: torch.dtype,
    shape: torch.Size,
    finish: Callable[[Any, bool], None],
) -> tuple[Start, Finish]:
    """On the CPU as an all-to-all and a local sum: gloo's own sends twice the bytes. Elsewhere the backend's own."""
    swap = _swap(group, timeout)
    scatter = _method(group, "reduce_scatter_single", "_reduce_scatter_base")
    scatter_options = _options(c10d.ReduceScatterOptions, timeout)
    scatter_options.reduceOp = _CODES[op]
    n = group.size()
    direct = group.name() == "gloo" and sums_directly(n, math.prod(shape) * carried.itemsize, carried)
    first, combined = direct_reduce_scatter(op, swap, group.rank(), n, lambda work: finish(work, False))

    def start(x: Tensor) -> Any:
        x = x.contiguous() if carried is dtype else x.to(carried, memory_format=torch.contiguous_format)
        if x.is_complex():
            x = torch.view_as_real(x)
        flat = x.view(-1)
        if direct:
            return first(flat.view(n, -1))
        if flat.device.type == "cpu":
            out = torch.empty_like(flat)
            return swap(out, flat, [], []), out
        out = flat.new_empty(flat.numel() // n)
        return scatter(out, flat, scatter_options), out

    def wait(pending: Any) -> Tensor:
        if direct:
            out = combined(pending)
        else:
            work, out = pending
            finish(work, out.is_cuda)
        if not direct and out.device.type == "cpu":
            terms = out.view(n, -1)
            out = terms.sum(0, dtype=out.dtype) if op == "sum" else terms.amax(0) if op == "max" else terms.amin(0)
        if dtype.is_complex:
            out = torch.view_as_complex(out.view(-1, 2))
        return out.view(shape) if carried is dtype else out.to(dtype).view(shape)

    return start, wait
