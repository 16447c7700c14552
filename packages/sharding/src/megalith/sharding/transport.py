"""What does a rank send in a step, and how does it put together what arrives? Views, permutes and copies only."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from megalith.sharding.exchange import Box, boxes, indices, positions
from megalith.sharding.layout import Dim, Layout, Range
from megalith.sharding.overlap import aligned, axis_sizes, coordinates, intersect, is_even, own_ranges
from megalith.sharding.transition import Step

__all__ = ["Op", "StepRecipe", "apply_op", "local_indices", "neutral", "pack", "recipe", "unpack"]

Op = tuple[str, object]
"""One local tensor operation: `("reshape", shape)`, `("permute", order)`, `("narrow", (dim, start, length))`,
`("select", (dim, index))`, `("pad", shape)`, `("embed", (shape, indices, op))`, `("fill", (shape, op))`."""


@dataclass(frozen=True, eq=False)
class StepRecipe:
    """What one rank does in a step.

    A backend calls `pack`, runs the collective over `peers` on the buffer, and calls `unpack`:

    | kind | packed buffer | collective's result |
    | --- | --- | --- |
    | `slice`, `zero` | the result | |
    | `all_gather` | `chunk` | `[n, *chunk]` |
    | `all_reduce` | `chunk` | `chunk` |
    | `reduce_scatter` | `[n, *chunk]` | `chunk` |
    | `all_to_all` | `[n, *chunk]`, by receiver | `[n, *chunk]`, by sender |
    | `exchange` | flat, `send_sizes` elements to each peer | flat, `receive_sizes` from each |

    Args:
        kind: the kind of the step.
        peers: the ranks of the group, ascending.
        index: this rank's place among them.
        chunk: the padded shape in transport, the same on all of the group.
        pack: the local operations before the collective.
        unpack: those after it.
        pack_is_view: whether packing a contiguous tensor copies nothing.
        unpack_is_view: whether unpacking copies nothing (a gather along the outermost dim, for one).
        send: for an exchange, what goes to each peer, of the local source.
        receive: for an exchange, where in the local target each peer's piece goes.
        shape: the local shape after the step.
    """

    kind: str
    peers: tuple[int, ...]
    index: int
    chunk: tuple[int, ...]
    pack: tuple[Op, ...]
    unpack: tuple[Op, ...]
    pack_is_view: bool
    unpack_is_view: bool
    shape: tuple[int, ...]
    send: tuple[Box, ...] = ()
    receive: tuple[Box, ...] = ()

    @property
    def send_sizes(self) -> tuple[int, ...]:
        """Elements that an exchange sends to each peer, itself included."""
        return tuple(box.size for box in self.send)

    @property
    def receive_sizes(self) -> tuple[int, ...]:
        """Elements that an exchange receives from each peer, itself included."""
        return tuple(box.size for box in self.receive)


def local_indices(layout: Layout, rank: int, dim: int) -> Tensor:
    """The global indices of one dim that a rank holds, ascending, as an int64 tensor.

    >>> from megalith.sharding.layout import Digit
    >>> from megalith.sharding.mesh import Mesh
    >>> layout = Layout(Mesh("sp=2"), (Dim.of(8, (Digit(None, 2, 4), Digit("sp", 2, 2, True))),))
    >>> local_indices(layout, 0, 0).tolist()    # zigzag: the first and the last quarter
    [0, 1, 6, 7]
    """
    return indices(layout.dims[dim].ranges(layout.mesh.coordinates(rank)))


def neutral(op: str, dtype: torch.dtype) -> float | int | bool:
    """What a term that does not count is made of: 0 for a sum, the least (greatest) value for a max (min)."""
    if op == "sum":
        return 0
    if dtype is torch.bool:
        return op == "min"
    if dtype.is_floating_point:
        return -math.inf if op == "max" else math.inf
    return torch.iinfo(dtype).min if op == "max" else torch.iinfo(dtype).max


def pack(step: Step, rank: int, tensor: Tensor) -> Tensor:
    """The contiguous buffer that a rank brings to the collective of a step; of a local step, its result.

    Args:
        step: the step.
        rank: the rank.
        tensor: its shard in the step's source, of `step.source.local_shape(rank)`.

    Returns:
        the buffer as in `StepRecipe`; without a copy where the tensor is contiguous and already in that order.
    """
    made = recipe(step, rank)
    if made.kind == "exchange":
        pieces = [_take(tensor, box) for box in made.send if box.size]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces) if pieces else tensor.new_empty(0)
    tensor = _apply(made.pack, tensor)
    return tensor if made.kind in ("slice", "zero") else tensor.contiguous()


def unpack(step: Step, rank: int, buffer: Tensor) -> Tensor:
    """A rank's shard in the step's target, out of the result of the collective.

    Args:
        step: the step.
        rank: the rank.
        buffer: what the collective gave, as in `StepRecipe`; of a local step, what `pack` gave.
    """
    made = recipe(step, rank)
    if made.kind != "exchange":
        return _apply(made.unpack, buffer)
    pieces = buffer.split(made.receive_sizes)
    if len(pieces) == 1 and made.receive[0].shape == made.shape:
        return pieces[0].view(made.shape)
    out = buffer.new_empty(made.shape)
    for piece, box in zip(pieces, made.receive, strict=True):
        if box.size:
            _place(out, piece.view(box.shape), box)
    return out


@lru_cache(maxsize=16384)
def recipe(step: Step, rank: int) -> StepRecipe:
    """What a rank does in a step, as plain data."""
    peers = step.source.mesh.peers(rank, step.axes)
    index, shape = peers.index(rank), step.target.local_shape(rank)
    before: tuple[Op, ...] = ()
    after: tuple[Op, ...] = ()
    if step.kind == "exchange":
        send, receive = boxes(step, rank)
        return StepRecipe("exchange", peers, index, (), (), (), False, False, shape, send, receive)
    chunk = _chunk(step, peers)
    if step.kind == "slice":
        before = _slice(step, rank)
    elif step.kind == "zero":
        before = _zero(step, rank)
    elif step.kind != "all_reduce":
        fast = _even(step, chunk)
        if step.kind in ("reduce_scatter", "all_to_all"):
            before = fast[0] if fast else _split(step, rank, chunk)
        elif step.source.local_shape(rank) != chunk:
            before = (("pad", chunk),)
        if step.kind in ("all_gather", "all_to_all"):
            after = fast[1] if fast else _join(step, rank, chunk)
        elif chunk != shape:
            after = tuple(("narrow", (d, 0, n)) for d, n in enumerate(shape) if n != chunk[d])
    return StepRecipe(step.kind, peers, index, chunk, before, after, _is_view(before), _is_view(after), shape)


def _is_view(ops: Sequence[Op]) -> bool:
    """Whether local operations copy nothing of a contiguous tensor."""
    names = [name for name, _ in ops]
    return names == sorted(names, key=["reshape", "narrow"].index) if set(names) <= {"reshape", "narrow"} else False


def _apply(ops: Sequence[Op], tensor: Tensor) -> Tensor:
    for name, how in ops:
        tensor = _OPS[name](tensor, how)
    return tensor


def apply_op(name: str, how: object, tensor: Tensor) -> Tensor:
    """One local operation of a recipe."""
    return _OPS[name](tensor, how)


def _pad(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    out = tensor.new_zeros(shape)
    _corner(out, tensor.shape).copy_(tensor)
    return out


def _corner(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    for d, n in enumerate(shape):
        tensor = tensor.narrow(d, 0, n)
    return tensor


def _select(tensor: Tensor, how: tuple[int, Tensor]) -> Tensor:
    dim, index = how
    return tensor.index_select(dim, _on(index, tensor.device))


def _on(index: Tensor, device: torch.device) -> Tensor:
    return index if index.device == device else _copy_on(index, device)


@lru_cache(maxsize=4096)
def _copy_on(index: Tensor, device: torch.device) -> Tensor:
    return index.to(device)


def _fill(tensor: Tensor, how: tuple[Sequence[int], str]) -> Tensor:
    shape, op = how
    return tensor.new_full(shape, neutral(op, tensor.dtype))


def _embed(tensor: Tensor, how: tuple[Sequence[int], Sequence[Tensor], str]) -> Tensor:
    shape, places, op = how
    out = _fill(tensor, (shape, op))
    _place(out, tensor, Box(tuple(places)))
    return out


_OPS: dict[str, Callable[..., Tensor]] = {
    "reshape": lambda tensor, shape: tensor.reshape(shape),
    "permute": lambda tensor, order: tensor.permute(order),
    "narrow": lambda tensor, how: tensor.narrow(*how),
    "select": _select,
    "pad": _pad,
    "embed": _embed,
    "fill": _fill,
}


def _take(tensor: Tensor, box: Box) -> Tensor:
    """The elements of a box, flat."""
    for d, (where, index) in enumerate(zip(box.starts, box.places, strict=True)):
        if where is None:
            tensor = _select(tensor, (d, index))
        elif index.numel() != tensor.shape[d]:
            tensor = tensor.narrow(d, where, index.numel())
    return tensor.reshape(-1)


def _place(out: Tensor, piece: Tensor, box: Box) -> None:
    """Write a piece into its box."""
    scattered = []
    for d, (where, index) in enumerate(zip(box.starts, box.places, strict=True)):
        if where is None:
            scattered.append((d, index))
        else:
            out = out.narrow(d, where, index.numel())
    if not scattered:
        out.copy_(piece)
        return
    grid: list[Tensor | slice] = [slice(None)] * out.dim()
    if len(scattered) == 1:
        d, index = scattered[0]
        out.index_copy_(d, _on(index, out.device), piece)
        return
    for d, n in enumerate(piece.shape):
        index = dict(scattered).get(d, torch.arange(n))
        grid[d] = _on(index, out.device).view([-1 if i == d else 1 for i in range(out.dim())])
    out[tuple(grid)] = piece


def _chunk(step: Step, peers: Sequence[int]) -> tuple[int, ...]:
    """The padded shape in transport: per dim the largest piece that goes from one of the group to another."""
    layout = step.target if step.kind == "reduce_scatter" else step.source
    if step.kind != "all_to_all":
        shapes = [layout.local_shape(rank) for rank in peers]
        return tuple(max(sizes) for sizes in zip(*shapes, strict=True))
    chunk = []
    here, group = step.source.mesh.coordinates(peers[0]), frozenset(step.axes)
    for a, b in zip(step.source.dims, step.target.dims, strict=True):
        chunk.append(max(_size(intersect(x, y)) for x in _each(a, here, group) for y in _each(b, here, group)))
    return tuple(chunk)


def _each(dim: Dim, here: dict[str, int], group: frozenset[str]) -> list[tuple[Range, ...]]:
    """The ranges that the peers hold, by their coordinates along the axes of the group that hold the dim."""
    return [dim.ranges({**here, **held}) for held in coordinates(_within(dim, group))]


def _within(dim: Dim, group: frozenset[str]) -> dict[str, int]:
    return {axis: n for axis, n in axis_sizes(dim).items() if axis in group}


def _size(ranges: Sequence[Range]) -> int:
    return sum(stop - start for start, stop in ranges)


def _slice(step: Step, rank: int) -> tuple[Op, ...]:
    ops: list[Op] = []
    for d, (held, wanted) in enumerate(zip(step.source.ranges(rank), step.target.ranges(rank), strict=True)):
        if held != wanted:
            ops += _pick(d, positions(wanted, held), step.source.local_shape(rank), step.target.local_shape(rank))
    return tuple(ops)


def _pick(dim: int, index: Tensor, before: Sequence[int], after: Sequence[int]) -> list[Op]:
    """Select along a dim: by one narrow where the index is a run, by a view where it is runs equally far apart."""
    n, total = index.numel(), before[dim]
    start = int(index[0]) if n else 0
    if torch.equal(index, torch.arange(start, start + n)):
        return [] if n == total else [("narrow", (dim, start, n))]
    breaks = (index.diff() != 1).nonzero()
    run = int(breaks[0]) + 1
    runs = n // run
    period = int(index[run]) - start
    if runs * run == n and runs * period == total and start + run <= period:
        even = (torch.arange(runs)[:, None] * period + torch.arange(start, start + run)).view(-1)
        if torch.equal(even, index):
            lead, tail = tuple(after[:dim]), tuple(before[dim + 1 :])
            return [
                ("reshape", (*lead, runs, period, *tail)),
                ("narrow", (dim + 1, start, run)),
                ("reshape", (*lead, n, *tail)),
            ]
    return [("select", (dim, index))]


def _zero(step: Step, rank: int) -> tuple[Op, ...]:
    here = step.source.mesh.coordinates(rank)
    shape = step.target.local_shape(rank)
    copies = [axis for axis in step.axes if axis not in step.source.axes]
    if step.op == "sum" and any(here[axis] for axis in copies):
        return (("fill", (shape, step.op)),)
    held, wanted = step.source.ranges(rank), step.target.ranges(rank)
    first = {**here, **dict.fromkeys(step.axes, 0)}  # a segment that an axis does not name counts once
    mine = tuple(own_ranges(dim, here, first if step.op == "sum" else here) for dim in step.source.dims)
    if mine == wanted:
        return ()
    ops = [("select", (d, positions(a, b))) for d, (a, b) in enumerate(zip(mine, held, strict=True)) if a != b]
    places = tuple(positions(a, b) for a, b in zip(mine, wanted, strict=True))
    return (*ops, ("embed", (shape, places, step.op)))


def _split(step: Step, rank: int, chunk: Sequence[int]) -> tuple[Op, ...]:
    """Cut a shard into padded chunks, one a receiver."""
    here, group = step.source.mesh.coordinates(rank), frozenset(step.axes)
    held, local = step.source.ranges(rank), step.source.local_shape(rank)
    room = [max(have, want) for have, want in zip(local, chunk, strict=True)]
    ops: list[Op] = []
    view: list[int] = []
    receivers: dict[str, int] = {}
    rest = []
    for d, dim in enumerate(step.target.dims):
        parts = [positions(intersect(held[d], ranges), held[d]) for ranges in _each(dim, here, group)]
        index = torch.cat([torch.nn.functional.pad(part, (0, chunk[d] - part.numel()), value=-1) for part in parts])
        run = torch.arange(index.numel())
        if index.numel() >= local[d] and bool(((index == run) | (index < 0)).all()):
            room[d] = index.numel()  # in order but for padding at the end
        else:
            ops.append(("select", (d, index.clamp(min=0))))
        for axis, n in _within(dim, group).items():
            receivers[axis] = len(view)
            view.append(n)
        rest.append(len(view))
        view.append(chunk[d])
    if tuple(room) != local:
        ops.insert(0, ("pad", tuple(room)))
    order = (*(receivers[axis] for axis in step.axes), *rest)
    n = math.prod(step.source.mesh.sizes[axis] for axis in step.axes)
    return (*ops, ("reshape", tuple(view)), *_permute(order), ("reshape", (n, *chunk)))


def _join(step: Step, rank: int, chunk: Sequence[int]) -> tuple[Op, ...]:
    """Put the chunks of the senders together, each where its indices belong."""
    here, group = step.source.mesh.coordinates(rank), frozenset(step.axes)
    wanted, sizes = step.target.ranges(rank), step.source.mesh.sizes
    order: list[int] = []
    merged: list[int] = []
    for d, dim in enumerate(step.source.dims):
        senders = _within(dim, group)
        order += [*(step.axes.index(axis) for axis in senders), len(step.axes) + d]
        merged.append(math.prod(senders.values()) * chunk[d])
    shape = step.target.local_shape(rank)
    ops: list[Op] = []
    for d, dim in enumerate(step.source.dims):
        index = torch.zeros(_size(wanted[d]), dtype=torch.int64)
        for i, held in enumerate(_each(dim, here, group)):
            if step.kind == "all_gather":
                common, place = intersect(held, wanted[d]), positions(intersect(held, wanted[d]), held)
            else:
                common = intersect(held, wanted[d])
                place = torch.arange(_size(common))
            index[positions(common, wanted[d])] = i * chunk[d] + place
        ops += _pick(d, index, (*shape[:d], *merged[d:]), shape)
    view = (*(sizes[axis] for axis in step.axes), *chunk)
    return (("reshape", view), *_permute(order), ("reshape", tuple(merged)), *ops)


def _permute(order: Sequence[int]) -> tuple[Op, ...]:
    return (("permute", tuple(order)),) if list(order) != sorted(order) else ()


def _even(step: Step, chunk: Sequence[int]) -> tuple[tuple[Op, ...], tuple[Op, ...]] | None:
    """The packing and unpacking by one permute each, where all cuts are even; else None.

    Digits are either local to both (they stay in the chunk), held by the source only (the sender's place) or by the
    target only (the receiver's).
    """
    group = step.axes
    senders: dict[str, int] = {}
    cuts: list[list[tuple[int, str, str]]] = []
    for a, b in zip(step.source.dims, step.target.dims, strict=True):
        pairs = aligned(a, b)
        if pairs is None or len(pairs) > 1 or not (is_even(a) and is_even(b)):
            return None
        cut, stride = [], a.size
        for x, y in pairs[0]:
            stride = x.stride
            if (x.axis in group and x.back_and_forth) or (y.axis in group and y.back_and_forth):
                return None
            if x.axis and y.axis:
                if x != y or x.axis in group:
                    return None
                continue
            if any(axis and axis not in group for axis in (x.axis, y.axis)):
                return None
            cut.append((x.size, x.axis or "", y.axis or ""))
        cuts.append([*cut, (stride, "", "")])
    n = math.prod(step.source.mesh.sizes[axis] for axis in group)
    view: list[int] = []
    fixed: list[int] = []
    receivers: dict[str, int] = {}
    for cut in cuts:
        for size, sender, receiver in cut:
            if sender:
                continue
            if receiver:
                receivers[receiver] = len(view)
            else:
                fixed.append(len(view))
            view.append(size)
    pack_ops: tuple[Op, ...] = ()
    if step.kind != "all_gather":
        order = (*(receivers[axis] for axis in group), *fixed)
        pack_ops = (("reshape", tuple(view)), *_permute(order), ("reshape", (n, *chunk)))
    senders = {axis: i for i, axis in enumerate(group)}
    received = [step.source.mesh.sizes[axis] for axis in group]
    order_back: list[int] = []
    shape: list[int] = []
    for cut in cuts:
        length = 1
        for size, sender, receiver in cut:
            if receiver:
                continue
            length *= size
            if sender:
                order_back.append(senders[sender])
            else:
                order_back.append(len(received))
                received.append(size)
        shape.append(length)
    return pack_ops, (("reshape", tuple(received)), *_permute(order_back), ("reshape", tuple(shape)))
