"""How much of a gathered matrix is held at a time? A panel of the contracted dim: gathered, multiplied, added, dropped.

Takes a rank's program, as lowered, the same for all ranks. Gives one in which a product of matrices that reads gathered
operands is a sum over panels (SUMMA: van de Geijn and Watts, 1997). After this, no operand that is gathered for
products alone is ever whole: as many bytes travel, in more messages, and the peak falls by what was gathered.

Products that read one gathered operand, and contract the same dim of it, take their panels together. What else reads a
gathered operand, or contracts two dims of it, needs the whole, and that gather stays.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from megalith.core.program import Compute, Instruction, Launch, Program, Wait, in_order, reads, writes
from megalith.sharding.graph import Origin, Ref, TensorType, op_name, refs

__all__ = ["panels"]

aten = torch.ops.aten


def panels(program: Program, n: int) -> Program:
    """The program with products of gathered matrices in panels.

    Numbers of two bytes are rounded once a panel, not once a product.

    Args:
        program: one rank's program; the shards of all ranks are equally large.
        n: how many panels a contracted dim is cut into, if it has as many rows.

    Raises:
        ValueError: no panel.

    >>> from megalith.core import shard
    >>> from megalith.sharding import Mesh
    >>> specs = {"x": "(row b) (col e)", "w": "(row e) (col f)"}
    >>> args = torch.empty(8192, 32768, device="meta"), torch.empty(32768, 8192, device="meta")
    >>> for n in (1, 32):
    ...     step = shard(lambda x, w: x @ w, Mesh("row=2 col=2"), specs, backend="count", panels=n)
    ...     print(step.program(*args).bytes_received >> 20, step.memory(*args).peak >> 20)  # MiB
    512 2048
    512 664
    """
    if n < 1:
        raise ValueError(f"panels={n}: a product has at least one panel; write 1 to gather operands whole")
    groups = list(_groups(program)) if n > 1 else []
    writer = _Writer(program, n)
    written = {max(group.products): group for group in groups}
    dropped = {position for group in groups for position in group.products}
    dropped |= {position for group in groups for gather in group.gathers for position in gather.members}
    order: list[Instruction] = []
    for position, instruction in enumerate(program.instructions):
        if position in written:
            order.extend(writer.write(written[position]))
        elif position not in dropped:
            order.append(instruction)
    return replace(program, instructions=in_order(program, order), types=writer.types)


# --- what becomes of a gathered buffer --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Digit:
    """A part of a dim of a buffer: `size` indices, `stride` apart."""

    dim: int
    size: int
    stride: int = 1


Dims: TypeAlias = tuple[tuple[_Digit, ...], ...]
"""A view of a buffer: what each dim consists of, major to minor."""


@dataclass(frozen=True)
class _Operand:
    """An operand of a product as a view of a buffer: of what a gather brings, or of a tensor that is there."""

    buffer: int
    dims: Dims
    contracted: int

    @property
    def digit(self) -> _Digit:
        """The minor part of the contracted dim, of which panels are cut."""
        return self.dims[self.contracted][-1]


@dataclass(frozen=True)
class _Gather:
    """A gather whose result only products read, all along the same dim.

    Args:
        launch: the gather.
        arrived: the slot of what it brings.
        members: positions of its launch, its wait, and the views of what it brings.
        uses: by position of a product and number of the operand, how that sees what it brings.
    """

    launch: Launch
    arrived: int
    members: tuple[int, ...]
    uses: Mapping[tuple[int, int], _Operand]

    @property
    def digit(self) -> _Digit:
        return next(iter(self.uses.values())).digit

    @property
    def granule(self) -> int:
        """Of how many indices panels are cut."""
        return math.gcd(*(use.digit.size for use in self.uses.values()))


@dataclass(frozen=True)
class _Panel:
    """The indices `start` to `stop` of each run of `granule` indices."""

    granule: int
    start: int
    stop: int

    @property
    def width(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class _Group:
    """Products that take their panels together, by position, and what is gathered for them."""

    products: tuple[int, ...]
    gathers: tuple[_Gather, ...]


def _whole(shape: tuple[int, ...]) -> Dims:
    return tuple((_Digit(d, n),) if n > 1 else () for d, n in enumerate(shape))


def _viewed(dims: Dims, view: Compute) -> Dims | None:
    """The dims of a reshape or a permutation; None where a new dim begins amid an old part that does not divide."""
    if op_name(view.fn) == "aten.permute.default":
        return tuple(dims[d] for d in view.args[1])
    flat = [digit for dim in dims for digit in dim]
    found = []
    for size in view.args[1]:
        mine: list[_Digit] = []
        while size > 1:
            digit = flat.pop(0)
            if size % digit.size == 0:
                mine.append(digit)
                size //= digit.size
            elif digit.size % size == 0:
                inner = digit.size // size
                mine.append(_Digit(digit.dim, size, digit.stride * inner))
                flat.insert(0, _Digit(digit.dim, inner, digit.stride))
                size = 1
            else:
                return None
        found.append(tuple(mine))
    return tuple(found)


def _gathers(program: Program) -> Iterator[_Gather]:
    """The gathers that can come in panels."""
    readers: dict[int, list[int]] = {}
    for position, instruction in enumerate(program.instructions):
        for slot in reads(instruction):
            readers.setdefault(slot, []).append(position)
    waits = {i.pending: position for position, i in enumerate(program.instructions) if isinstance(i, Wait)}
    kept = {ref.id for ref in refs(program.outputs)}
    for position, launch in enumerate(program.instructions):
        if not isinstance(launch, Launch) or launch.kind != "all_gather" or launch.pending not in waits:
            continue
        (arrived,) = writes(program.instructions[waits[launch.pending]])
        found = _uses(program, readers, kept, arrived)
        if found is None or not all(use.dims[use.contracted] for use in found[0].values()):
            continue
        uses, views = found
        cut = {(use.digit.dim, use.digit.stride) for use in uses.values()}
        if len(cut) == 1 and cut.pop()[0] > 0:  # the first dim is that of the ranks
            yield _Gather(launch, arrived, (position, waits[launch.pending], *views), uses)


def _uses(
    program: Program, readers: Mapping[int, list[int]], kept: set[int], buffer: int
) -> tuple[dict[tuple[int, int], _Operand], list[int]] | None:
    """The products that read a buffer by way of views, and these; None if anything else reads it."""
    found: dict[tuple[int, int], _Operand] = {}
    passed: list[int] = []
    views = [(buffer, _whole(program.types[buffer].shape))]
    for slot, dims in views:
        if slot in kept:
            return None
        for position in readers.get(slot, []):
            reader = program.instructions[position]
            if not isinstance(reader, Compute):
                return None
            name = op_name(reader.fn)
            if name == "aten.mm.default":
                for at, ref in enumerate(reader.args):
                    if ref.id == slot:
                        found[position, at] = _Operand(buffer, dims, 1 - at)
                continue
            seen = _viewed(dims, reader) if name in ("aten.reshape.default", "aten.permute.default") else None
            if seen is None:
                return None
            views.append((reader.outputs[0], seen))
            passed.append(position)
    return found, passed


def _groups(program: Program) -> Iterator[_Group]:
    """Products that share gathers, transitively; without those that wait for one of their own group."""
    by_product: dict[int, list[_Gather]] = {}
    for gather in _gathers(program):
        for position, _ in gather.uses:
            by_product.setdefault(position, []).append(gather)
    done: set[int] = set()
    end = -1
    for first in sorted(by_product):
        if first in done:
            continue
        products, gathers = [first], []
        for position in products:
            for gather in by_product[position]:
                if gather not in gathers:
                    gathers.append(gather)
                    products.extend(p for p, _ in gather.uses if p not in products)
        done.update(products)
        alone = len(products) == 1
        if alone or (first > end and not _depend(program, products, gathers)):
            end = end if alone else max(products)
            yield _Group(tuple(sorted(products)), tuple(gathers))


def _depend(program: Program, products: list[int], gathers: list[_Gather]) -> bool:
    """Whether one of these products, or what is gathered for it, needs the result of another."""
    made: set[int] = set()
    sent = {gather.launch.pending for gather in gathers}
    for position, instruction in enumerate(program.instructions[: max(products) + 1]):
        needs = any(slot in made for slot in reads(instruction))
        is_sent = isinstance(instruction, Launch) and instruction.pending in sent
        if needs and (is_sent or position in products):
            return True
        if needs or position in products:
            made.update(writes(instruction))
    return False


# --- panels -----------------------------------------------------------------------------------------------------------


class _Writer:
    """Writes products in panels, and the slots that these need."""

    def __init__(self, program: Program, n: int) -> None:
        self.program, self.n = program, n
        self.types = dict(program.types)
        self.next_slot = max(self.types) + 1
        self.out: list[Instruction] = []

    def write(self, group: _Group) -> list[Instruction]:
        """A group's products, panel by panel."""
        self.out = []
        granule = math.gcd(*(gather.granule for gather in group.gathers))
        n = min(self.n, granule)
        sums: dict[int, int] = {}
        for t in range(n):
            panel = _Panel(granule, granule * t // n, granule * (t + 1) // n)
            arrived = {gather.arrived: self.gather(gather, panel, n) for gather in group.gathers}
            uses = {at: use for gather in group.gathers for at, use in gather.uses.items()}
            seen: dict[tuple[int, Dims], int] = {}  # products that see a panel alike share the view
            for position in group.products:
                product = self.program.instructions[position]
                assert isinstance(product, Compute)
                operands = []
                for at, ref in enumerate(product.args):
                    use = uses.get((position, at)) or _Operand(ref.id, _whole(self.types[ref.id].shape), 1 - at)
                    if (use.buffer, use.dims) not in seen:
                        held = arrived.get(use.buffer)
                        if held is None:
                            held = self.narrow(ref.id, use.digit, panel, product.origin)
                        seen[use.buffer, use.dims] = self.view(held, use, panel, product.origin)
                    operands.append(seen[use.buffer, use.dims])
                sums[position] = self.add(product, sums.get(position), operands, last=t == n - 1)
        return self.out

    def gather(self, gather: _Gather, panel: _Panel, n: int) -> int:
        """A panel of what a gather brings."""
        launch, digit = gather.launch, gather.digit
        sent = self.narrow(launch.buffer, replace(digit, dim=digit.dim - 1), panel, launch.origin)  # ranks come first
        shape = (len(launch.peers), *self.types[sent].shape)
        pending, arrived = self.slot(shape, sent), self.slot(shape, sent)
        share = launch.bytes_received * panel.width // panel.granule
        cause = f"{launch.cause}, in {n} panels"
        self.out.append(replace(launch, buffer=sent, pending=pending, bytes_received=share, cause=cause))
        self.out.append(Wait(pending, arrived, launch.origin))
        return arrived

    def narrow(self, slot: int, digit: _Digit, panel: _Panel, origin: Origin) -> int:
        """A panel of a buffer: in place of the dim that is cut, what is major to it, the panel, and what is minor."""
        shape, d = self.types[slot].shape, digit.dim
        major = (shape[d] // (panel.granule * digit.stride),)
        before = (*shape[:d], *(major if major != (1,) else ()))
        after = (*((digit.stride,) if digit.stride > 1 else ()), *shape[d + 1 :])
        apart = self.shaped(slot, (*before, panel.granule, *after), origin)
        bounds = (len(before), panel.start, panel.stop)
        return self.emit(aten.slice.Tensor, (Ref(apart), *bounds), (*before, panel.width, *after), apart, origin)

    def view(self, slot: int, use: _Operand, panel: _Panel, origin: Origin) -> int:
        """A panel of a buffer as the matrix that a product reads."""
        digit = use.digit
        minor = replace(digit, size=panel.width)
        major = replace(digit, size=digit.size // panel.granule, stride=digit.stride * panel.granule)
        dims = [tuple(p for d in dim for p in ((major, minor) if d == digit else (d,))) for dim in use.dims]
        digits = [d for dim in dims for d in dim]
        lying = sorted(digits, key=lambda d: (d.dim, -d.stride))
        apart = self.shaped(slot, tuple(d.size for d in lying), origin)
        order = [lying.index(d) for d in digits]
        shape = tuple(d.size for d in digits)
        if order != sorted(order):
            apart = self.emit(aten.permute.default, (Ref(apart), order), shape, apart, origin)
        return self.shaped(apart, tuple(math.prod(d.size for d in dim) for dim in dims), origin)

    def add(self, product: Compute, total: int | None, operands: list[int], last: bool) -> int:
        """A panel's product, added to those before it where their sum lies."""
        out = product.outputs[0]
        if not last:
            out = self.slot(self.types[out].shape, out)
        before, fn = ((), aten.mm.default) if total is None else ((Ref(total),), aten.addmm_.default)
        self.out.append(replace(product, fn=fn, args=(*before, *map(Ref, operands)), outputs=(out,)))
        return out

    def shaped(self, slot: int, shape: tuple[int, ...], origin: Origin) -> int:
        if self.types[slot].shape == shape:
            return slot
        return self.emit(aten.reshape.default, (Ref(slot), list(shape)), shape, slot, origin)

    def emit(self, fn: Any, args: tuple[Any, ...], shape: tuple[int, ...], like: int, origin: Origin) -> int:
        out = self.slot(shape, like)
        self.out.append(Compute(fn, args, {}, (out,), origin))
        return out

    def slot(self, shape: tuple[int, ...], like: int) -> int:
        self.types[self.next_slot] = TensorType(shape, self.types[like].dtype)
        self.next_slot += 1
        return self.next_slot - 1
