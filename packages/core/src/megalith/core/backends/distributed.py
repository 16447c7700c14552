"""How does a mesh run for real? A process a rank; collectives through torch.distributed, each with a deadline."""

from __future__ import annotations

import base64
import json
import math
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megalith.core.backends.direct import COMBINE, Swap, direct_gather, direct_reduce_scatter, is_direct, sums_directly
from megalith.core.codegen import Run, compile_program
from megalith.core.program import Launch, Program, signature
from megalith.sharding.mesh import Mesh, MeshError

__all__ = ["CollectiveError", "CollectiveTimeout", "DigestMismatch", "Distributed", "PeerLost"]

Tensor = torch.Tensor
Start = Callable[..., Any]
Finish = Callable[[Any], Tensor]

SWAP_BYTES = 256 << 10  # up to which two ranks do an all-reduce in one message each
LOOK_SECONDS = 1.0  # how often a rank that waits looks whether another has failed


class CollectiveError(RuntimeError):
    """A collective that did not come about."""


class CollectiveTimeout(CollectiveError):
    """A rank of the group did not come to the collective within the deadline."""


class PeerLost(CollectiveError):
    """A rank has failed, or its process or its connection is gone."""


class DigestMismatch(CollectiveError):
    """Ranks whose programs have other collectives."""


class Distributed:
    """Runs the program of this rank, in step with the processes that run those of the other ranks.

    Every rank constructs it, and compiles the same programs in the same order.

    Args:
        mesh: the mesh; rank r of `torch.distributed`, which has to be initialised, is rank r of the mesh.
        timeout: seconds until a rank that waits for others gives up, with an error that names the collective.

    Raises:
        MeshError: another number of processes than the mesh has ranks.

        runtime = Distributed(Mesh("dp=2 tp=2"))
        outputs = runtime.run(program, shards)
    """

    def __init__(self, mesh: Mesh, timeout: float = 300.0) -> None:
        if not dist.is_initialized():
            raise MeshError(
                f"Mesh({mesh.pattern!r}) needs {mesh.size} processes and torch.distributed is not initialised; start "
                f"them by `torchrun --nproc-per-node={mesh.size} script.py` and call "
                "torch.distributed.init_process_group() first"
            )
        n = dist.get_world_size()
        if n != mesh.size:
            raise MeshError(
                f"Mesh({mesh.pattern!r}) has {mesh.size} ranks and {n} process{'es run' if n != 1 else ' runs'}; "
                f"start {mesh.size} by `torchrun --nproc-per-node={mesh.size} script.py`, or give a mesh of {n}"
            )
        self.mesh, self.timeout, self.rank = mesh, timeout, dist.get_rank()
        self._groups: dict[tuple[int, ...], Any] = {tuple(range(n)): dist.group.WORLD}
        self._board = _Board(self.rank, n, timeout)
        self._runs: dict[int, Run] = {}

    def compile(self, program: Program) -> Run:
        """The function that runs a program on this rank; the first time, after the ranks have agreed on it.

        Raises:
            DigestMismatch: on every rank, where ranks have other collectives; it names the first that differs.
            ValueError: the program of another rank or mesh.
        """
        if id(program) not in self._runs:
            if program.mesh != self.mesh or program.rank != self.rank:
                raise ValueError(
                    f"this is rank {self.rank} of Mesh({self.mesh.pattern!r}) and the program is for rank "
                    f"{program.rank} of Mesh({program.mesh.pattern!r}); use lower(partition, rank={self.rank})"
                )
            with self._board.reporting():
                self._board.agree(program)
                self._runs[id(program)] = self._guarded(program, compile_program(program, self))
            weakref.finalize(program, self._runs.pop, id(program), None)
        return self._runs[id(program)]

    def run(self, program: Program, inputs: Sequence[Tensor]) -> list[Any]:
        """The outputs of a program, compiled when it is new.

        Args:
            program: this rank's program.
            inputs: its local shards.

        Raises:
            ValueError: inputs of other shapes or dtypes than the program's.
            CollectiveTimeout, PeerLost: another rank is missing; its collective, and the group, are named.
            DigestMismatch: see `compile`.
        """
        return self.compile(program)(inputs)

    def _guarded(self, program: Program, run: Run) -> Run:
        """Checks what comes in, and lets the other ranks know of a failure."""
        expected = [(torch.Size(program.types[s].shape), program.types[s].dtype) for s in program.inputs]
        names, board = program.input_names, self._board

        def guarded(inputs: Sequence[Tensor]) -> list[Any]:
            with board.reporting():
                _check(inputs, names, expected)
                return run(inputs)

        return guarded

    # --- collectives ---

    def bind(self, program: Program, number: int) -> tuple[Start, Finish]:
        """What starts, and what awaits, one collective of a program."""
        launch = program.collectives[number]
        sent, arrived = program.types[launch.buffer], program.types[launch.pending]
        shape = torch.Size(arrived.shape)
        if len(launch.peers) == 1:
            return lambda x: x, lambda x: x.clone(memory_format=torch.contiguous_format).view(shape)
        group = self._group(launch.peers)  # even for nothing: other groups along these axes may have something
        if launch.kind != "exchange" and math.prod(sent.shape) == 0:  # the same on all of the group
            return lambda x: x, lambda x: x.new_empty(shape)
        what = _What(launch, number, len(program.collectives))
        board, timeout = self._board, timedelta(seconds=self.timeout)

        def finish(work: Any, on_gpu: bool) -> None:
            if on_gpu:
                work.wait()  # the stream waits, not the host; the backend's watchdog keeps the deadline
            else:
                board.wait(work, what)

        make = _reduction if launch.kind in ("all_reduce", "reduce_scatter") else _movement
        return make(launch, group, timeout, sent.dtype, shape, finish)

    def _group(self, peers: tuple[int, ...]) -> Any:
        """The process group of these ranks. All ranks make theirs in the order of the program, agreed on before."""
        if peers not in self._groups:
            try:
                # Only the members take part: a mesh of 1,024 ranks does not make hundreds of groups on each.
                self._groups[peers] = dist.new_group(
                    list(peers), timeout=timedelta(seconds=self.timeout), use_local_synchronization=True
                )
            except RuntimeError as error:
                failures = self._board.failures()
                raise PeerLost(f"no group of ranks {_listed(peers)} could be made: {error}{failures}") from error
        return self._groups[peers]


def _check(inputs: Sequence[Tensor], names: Sequence[str], expected: Sequence[tuple[torch.Size, torch.dtype]]) -> None:
    if len(inputs) != len(expected):
        raise ValueError(f"the program has {len(expected)} inputs and was given {len(inputs)}")
    for i, (shape, dtype) in enumerate(expected):
        x = inputs[i]
        if x.shape != shape or x.dtype is not dtype:
            raise ValueError(
                f"{names[i]}: the program expects the local shard, {dtype} of shape {tuple(shape)}, "
                f"and was given {x.dtype} of shape {tuple(x.shape)}"
            )


@dataclass(frozen=True)
class _What:
    """A collective, as errors name it."""

    launch: Launch
    number: int
    n: int

    def __str__(self) -> str:
        launch = self.launch
        kind = f"{launch.kind} {launch.op}".strip()
        return f"{kind} over {' '.join(launch.axes)} (collective {self.number} of {self.n}: {_where(launch)})"


def _where(launch: Launch) -> str:
    origin = launch.origin
    said = [f"in {origin.module or 'the function itself'}", origin.phase, origin.source and f"at {origin.source}"]
    return ", ".join(s for s in (*said, launch.cause and f"because: {launch.cause}") if s)


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


# --- one collective each -------------------------------------------------------------------------------
#
# The methods of a group are called, not torch.distributed's functions, since only these take a deadline for one
# operation: without it gloo goes on by itself for half an hour, and so does the process that wants to end.


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


# --- what ranks tell each other beside the collectives ---------------------------------------------------


class _Board:
    """A notice board of all ranks, in the store of the process group: digests before a run, and failures."""

    def __init__(self, rank: int, n: int, timeout: float) -> None:
        self.rank, self.n, self.timeout = rank, n, timeout
        store = c10d._get_default_store()
        # Which of this rank's boards it is: the store counts, since a process may outlive its store.
        number = store.add(f"megalith/boards/{rank}", 1)
        self.store = dist.PrefixStore(f"megalith/{number}", store)
        self.n_agreed = 0
        self.turn = 0

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Lets the other ranks know of an exception within.

        All ranks come here equally often. A report counts for those that are no further: an exception that is the same
        everywhere, and put right, is no failure.
        """
        self.turn += 1
        try:
            yield
        except BaseException as error:
            lines = str(error).strip().splitlines()
            with suppress(RuntimeError):  # the store may be what has failed
                note = f"{type(error).__name__}: {lines[0] if lines else ''}"
                self.store.set(f"failed/{self.rank}", f"{self.turn} {note}")
                self.store.add("failures", 1)
            raise

    def failures(self) -> str:
        """What other ranks have reported, as the rest of a message."""
        try:
            if not self.store.add("failures", 0):
                return ""
            others = [r for r in range(self.n) if r != self.rank and self.store.check([f"failed/{r}"])]
            notes = {r: self.store.get(f"failed/{r}").decode().split(" ", 1) for r in others}
            current = {r: note for r, (turn, note) in notes.items() if int(turn) >= self.turn}
            return "".join(f"\n  rank {r} failed: {note}" for r, note in current.items())
        except RuntimeError:
            return "\n  the store of the process group does not answer: has the process that holds it ended?"

    def wait(self, work: Any, what: _What) -> None:
        """Wait for a collective."""
        began = time.monotonic()
        while True:
            try:
                work.wait(timedelta(seconds=min(LOOK_SECONDS, self.timeout)))
                return
            except RuntimeError as error:
                seconds, text = time.monotonic() - began, str(error)
                completed = work.is_completed()
                if completed and "timed out" not in text.lower():
                    raise self.error(PeerLost, what, f"a peer is gone after {seconds:.1f} s", text) from error
                if completed or seconds >= self.timeout:
                    waited = f"not every rank came to it within {self.timeout:g} s"
                    raise self.error(CollectiveTimeout, what, waited, "") from error
                if failures := self.failures():
                    raise self.error(PeerLost, what, "another rank has failed", "", failures) from error

    def error(
        self, kind: type[CollectiveError], what: _What, said: str, text: str, failures: str | None = None
    ) -> CollectiveError:
        lines = [
            f"rank {self.rank}: {said}: {what}",
            f"  its group is ranks {_listed(what.launch.peers)}",
        ]
        if text:
            lines.append(f"  {text.strip().splitlines()[0]}")
        return kind("\n".join(lines) + (self.failures() if failures is None else failures))

    # --- the handshake ---

    def agree(self, program: Program) -> None:
        """Returns when every rank has come here with the same collectives; else raises, on every rank.

        Each rank writes and reads a few keys, however many ranks there are; lists are exchanged on a mismatch only.
        """
        key, self.n_agreed = f"program{self.n_agreed}", self.n_agreed + 1
        digest = f"{program.mesh.pattern}; {program.digest}"
        store = self.store
        store.set(f"{key}/{self.rank}", digest)
        if store.compare_set(f"{key}/first", "", digest).decode() != digest:
            store.add(f"{key}/differ", 1)
        if store.add(f"{key}/arrived", 1) == self.n:
            store.set(f"{key}/go", "go")
        self.wait_for(f"{key}/go", key)
        if store.add(f"{key}/differ", 0):
            self.explain_mismatch(key, program)

    def wait_for(self, wanted: str, key: str) -> None:
        deadline = time.monotonic() + self.timeout
        while True:
            left = deadline - time.monotonic()
            try:
                self.store.wait([wanted], timedelta(seconds=max(min(LOOK_SECONDS, left), 0.001)))
                return
            except RuntimeError as error:
                failures = self.failures()
                if not failures and left > 0:
                    continue
                here = [r for r in range(self.n) if not failures and self.store.check([f"{key}/{r}"])]
                missing = [r for r in range(self.n) if r not in here]
                said = (
                    "another rank has failed"
                    if failures
                    else f"rank {_listed(missing)} has not come to it within {self.timeout:g} s"
                )
                raise (PeerLost if failures else CollectiveTimeout)(
                    f"rank {self.rank}: the ranks compare their programs before the first run, and {said}{failures}"
                ) from error

    def explain_mismatch(self, key: str, program: Program) -> None:
        """Raises `DigestMismatch`, which names the first collective that differs and who has what."""
        mine = [[signature(c, program.types[c.buffer].dtype), _where(c)] for c in program.collectives]
        self.store.set(f"{key}/list/{self.rank}", base64.b85encode(zlib.compress(json.dumps(mine).encode())).decode())
        ranks: dict[str, list[int]] = {}
        for r in range(self.n):
            ranks.setdefault(self.store.get(f"{key}/{r}").decode(), []).append(r)
        lists = {}
        for digest, group in ranks.items():
            self.wait_for(f"{key}/list/{group[0]}", key)
            lists[digest] = json.loads(zlib.decompress(base64.b85decode(self.store.get(f"{key}/list/{group[0]}"))))
        raise DigestMismatch(_mismatch(ranks, lists))


def _mismatch(ranks: dict[str, list[int]], lists: dict[str, list[list[str]]]) -> str:
    meshes = {digest.split(";")[0] for digest in ranks}
    if len(meshes) > 1:
        found = [f"  rank {_listed(group)}: Mesh({digest.split(';')[0]!r})" for digest, group in ranks.items()]
        return "\n".join(["ranks run on different meshes:", *found])
    longest = max(map(len, lists.values()))
    at = next(i for i in range(longest) if len({s[i][0] if i < len(s) else "" for s in lists.values()}) > 1)
    lines = [f"ranks have different programs; collective {at} is the first that differs:"]
    for digest, group in ranks.items():
        sequence = lists[digest]
        has = "; ".join(sequence[at]) if at < len(sequence) else f"none, its program ends after {len(sequence)}"
        lines.append(f"  rank {_listed(group)}: {has}")
    lines.append("every rank has to trace the same function, with the same global shapes, mesh and specs")
    return "\n".join(lines)
