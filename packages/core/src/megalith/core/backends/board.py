"""What do ranks tell each other beside the collectives? Digests before a run, failures within one, and deadlines."""

from __future__ import annotations

import base64
import json
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megalith.core.program import Launch, Program, signature

__all__ = ["Board", "CollectiveError", "CollectiveTimeout", "DigestMismatch", "Named", "PeerLost", "listed"]

LOOK_SECONDS = 1.0  # how often a rank that waits looks whether another has failed


class CollectiveError(RuntimeError):
    """A collective that did not come about."""


class CollectiveTimeout(CollectiveError):
    """A rank of the group did not come to the collective within the deadline."""


class PeerLost(CollectiveError):
    """A rank has failed, or its process or its connection is gone."""


class DigestMismatch(CollectiveError):
    """Ranks whose programs have other collectives."""


@dataclass(frozen=True)
class Named:
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


def listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


class Board:
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

    def wait(self, work: Any, what: Named) -> None:
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
        self, kind: type[CollectiveError], what: Named, said: str, text: str, failures: str | None = None
    ) -> CollectiveError:
        lines = [
            f"rank {self.rank}: {said}: {what}",
            f"  its group is ranks {listed(what.launch.peers)}",
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
                    else f"rank {listed(missing)} has not come to it within {self.timeout:g} s"
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
        found = [f"  rank {listed(group)}: Mesh({digest.split(';')[0]!r})" for digest, group in ranks.items()]
        return "\n".join(["ranks run on different meshes:", *found])
    longest = max(map(len, lists.values()))
    at = next(i for i in range(longest) if len({s[i][0] if i < len(s) else "" for s in lists.values()}) > 1)
    lines = [f"ranks have different programs; collective {at} is the first that differs:"]
    for digest, group in ranks.items():
        sequence = lists[digest]
        has = "; ".join(sequence[at]) if at < len(sequence) else f"none, its program ends after {len(sequence)}"
        lines.append(f"  rank {listed(group)}: {has}")
    lines.append("every rank has to trace the same function, with the same global shapes, mesh and specs")
    return "\n".join(lines)
