"""How does a mesh run for real? A process a rank; collectives through torch.distributed, each with a deadline."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megalith.core.backends.board import (
    Board,
    CollectiveError,
    CollectiveTimeout,
    DigestMismatch,
    Named,
    PeerLost,
    listed,
)
from megalith.core.backends.carry import Finish, Start, carried_out
from megalith.core.codegen import Run, compile_program
from megalith.core.program import Program
from megalith.sharding.mesh import Mesh, MeshError

__all__ = ["CollectiveError", "CollectiveTimeout", "DigestMismatch", "Distributed", "PeerLost"]

Tensor = torch.Tensor


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
        self._board = Board(self.rank, n, timeout)
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
        what = Named(launch, number, len(program.collectives))
        board, timeout = self._board, timedelta(seconds=self.timeout)

        def finish(work: Any, on_gpu: bool) -> None:
            if on_gpu:
                work.wait()  # the stream waits, not the host; the backend's watchdog keeps the deadline
            else:
                board.wait(work, what)

        return carried_out(launch, group, timeout, sent.dtype, shape, finish)

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
                raise PeerLost(f"no group of ranks {listed(peers)} could be made: {error}{failures}") from error
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
