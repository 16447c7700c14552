"""How a test or a benchmark runs one function on several real processes over gloo.

    from ranks import run

    def rank_sum(rank):
        x = torch.tensor([float(rank)])
        dist.all_reduce(x)
        return x.item()

    assert run(rank_sum, world_size=4) == [6.0, 6.0, 6.0, 6.0]

The processes persist between calls; each call gets a fresh process group. A call that fails in any way ends
every process of the pool and the next call starts new ones, so no failure outlives its test.
"""

from __future__ import annotations

import atexit
import faulthandler
import itertools
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import cloudpickle

PRELOAD = ["torch", "torch.distributed", "torch.distributed.tensor", "torch.distributed.checkpoint", "cloudpickle"]
if "pytest" in sys.modules:
    PRELOAD.append("_pytest.assertion.rewrite")  # a test function's asserts refer to it
GRACE_SECONDS = 2.0  # what the other ranks get to answer in, once one has failed
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the fork server hands it on
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
TEAR_DOWN = b"tear down"
EXIT = b"exit"


class RankError(RuntimeError):
    """A rank raised.

    Attributes: `rank`, the first that failed; `reports`, what each failed or unfinished rank had to say, by rank, first
    failure first; `exceptions`, the exceptions themselves, by rank, where they survive pickling.
    """

    def __init__(self, message: str, rank: int, reports: dict[int, str], exceptions: dict[int, BaseException]):
        super().__init__(message)
        self.rank, self.reports, self.exceptions = rank, reports, exceptions


class RankDied(RankError):
    """A rank's process ended without an answer."""


class RankTimeout(RankError):
    """A rank gave no answer within the timeout."""


@dataclass(frozen=True)
class Answer:
    """What one rank sends back, once."""

    failed: bool
    seconds: float  # on the machine's monotonic clock, so that the ranks' failures can be ordered
    value: Any = None
    report: str = ""
    died: bool = False


def _serve(connection: Connection, dump_path: str) -> None:
    """The life of one process: answer jobs until told to exit, or until one fails."""
    import torch
    import torch.distributed as dist

    caller = multiprocessing.parent_process()
    threading.Thread(target=lambda: (caller.join(), os._exit(1)), daemon=True).start()  # outlive no killed pytest
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the caller's; it ends the pool
    torch.set_num_threads(1)
    with open(dump_path, "w") as dump:
        faulthandler.register(signal.SIGUSR1, file=dump, all_threads=True)
        while (message := connection.recv_bytes()) != EXIT:
            if message != TEAR_DOWN:
                answer = _answer(*cloudpickle.loads(message))
                connection.send_bytes(_dumps(answer))
                if answer.failed:
                    return  # closes the sockets, which frees the ranks that wait for this one
            elif dist.is_initialized():  # all ranks have answered: nobody needs this one's sockets any more
                dist.destroy_process_group()


def _answer(rank: int, world_size: int, store_path: str, timeout: float, path: list[str], job: bytes) -> Answer:
    import torch
    import torch.distributed as dist

    try:
        sys.path[:] = path
        torch.manual_seed(0)
        store = dist.FileStore(store_path, world_size)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout + 30)
        )
        fn, args, kw = cloudpickle.loads(job)
        value = cloudpickle.dumps(
            fn(rank, *args, **kw)
        )  # plain pickle: tensors go by value, not as shared-memory handles
        return Answer(failed=False, seconds=time.monotonic(), value=value)
    except BaseException as error:  # SystemExit too: the caller must hear of it
        return Answer(failed=True, seconds=time.monotonic(), value=error, report=traceback.format_exc())


def _dumps(answer: Answer) -> bytes:
    try:
        data = cloudpickle.dumps(answer)
        cloudpickle.loads(data)  # many an exception pickles but does not unpickle
        return data
    except Exception:
        return cloudpickle.dumps(Answer(answer.failed, answer.seconds, None, answer.report))


@dataclass
class Worker:
    process: multiprocessing.process.BaseProcess
    connection: Connection
    dump_path: Path


class Pool(AbstractContextManager):
    """Processes that answer `run`; started when first needed, ended by `close`, `with Pool() as pool:` or at exit."""

    def __init__(self) -> None:
        self._workers: list[Worker] = []
        self._folder = Path(tempfile.gettempdir(), f"ranks-{os.getpid()}-{id(self)}")
        self._numbers = itertools.count()
        atexit.register(self.close)

    def __exit__(self, *exc: object) -> None:
        self.close()

    def run(self, fn: Callable, *args: Any, world_size: int = 4, timeout: float = 60.0, **kw: Any) -> list[Any]:
        """Call `fn(rank, *args, **kw)` on each of `world_size` processes that share a fresh gloo group.

        `timeout` is in seconds, for the whole call. Returns each rank's value, in order. Raises RankError when a rank
        raised, RankDied when one died, RankTimeout when one did not answer in time; each says which rank was first and
        what the others did. `fn` goes by value with its module's globals: a test module need not be importable, and its
        state does not persist.
        """
        job = _pickle_by_value(fn, args, kw)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        if wait([worker.connection for worker in self._workers], 0):
            self._kill()  # an idle process has nothing to say: this is the end of one that died
        while len(self._workers) < world_size:
            self._workers.append(self._start())
        number, workers = next(self._numbers), self._workers[:world_size]
        store_path = self._folder / f"store-{number}"
        answers: dict[int, Answer] = {}
        try:
            for rank, worker in enumerate(workers):
                message = (rank, world_size, str(store_path), timeout, sys.path, job)
                worker.connection.send_bytes(cloudpickle.dumps(message))
            answers = self._collect(workers, timeout)
            if len(answers) < world_size or any(answer.failed for answer in answers.values()):
                raise _error(fn, timeout, answers, self._dumps_of(workers, answers))
            for worker in workers:
                worker.connection.send_bytes(TEAR_DOWN)
        except BaseException:
            self._kill()
            raise
        finally:
            store_path.unlink(missing_ok=True)
        return [cloudpickle.loads(answers[rank].value) for rank in range(world_size)]

    def close(self) -> None:
        """End the processes and delete the pool's folder."""
        for worker in self._workers:
            with suppress(OSError):  # of one that is dead already
                worker.connection.send_bytes(EXIT)
        for worker in self._workers:
            worker.process.join(GRACE_SECONDS)
        self._kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> Worker:
        number = next(self._numbers)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        here, there = context.Pipe()
        dump_path = self._folder / f"dump-{number}"
        process = context.Process(target=_serve, args=(there, str(dump_path)), name=f"rank-{number}")
        main, sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("__main__")
        try:
            process.start()  # without importing the caller's `__main__`, which is pytest or goes by value
        finally:
            sys.modules["__main__"] = main
        there.close()  # so that the end of the process is the end of the connection
        return Worker(process, here, dump_path)

    def _collect(self, workers: list[Worker], timeout: float) -> dict[int, Answer]:
        """Each rank's answer, without those that came neither in time nor soon after the first failure."""
        answers: dict[int, Answer] = {}
        pending = {worker.connection: rank for rank, worker in enumerate(workers)}
        deadline = time.monotonic() + timeout
        while pending:
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = pending.pop(connection)
                try:
                    answers[rank] = cloudpickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    answers[rank] = _death(workers[rank].process)
                if answers[rank].failed:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return answers

    def _dumps_of(self, workers: list[Worker], answers: dict[int, Answer]) -> dict[int, str]:
        """Where each rank without an answer is, as its faulthandler tells."""
        silent = {rank: worker for rank, worker in enumerate(workers) if rank not in answers}
        for worker in silent.values():
            if worker.process.is_alive():
                os.kill(worker.process.pid, signal.SIGUSR1)
        dumps = dict.fromkeys(silent, "")
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline:
            before, dumps = dumps, {rank: worker.dump_path.read_text() for rank, worker in silent.items()}
            if all(dumps.values()) and dumps == before:
                break
            time.sleep(0.05)
        return dumps

    def _kill(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.connection.close()
            worker.dump_path.unlink(missing_ok=True)
        self._workers = []


def _death(process: multiprocessing.process.BaseProcess) -> Answer:
    process.join(GRACE_SECONDS)
    code = process.exitcode
    how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
    return Answer(failed=True, seconds=time.monotonic(), report=f"the process ended with {how}\n", died=True)


def _error(fn: Callable, timeout: float, answers: dict[int, Answer], dumps: dict[int, str]) -> RankError:
    name = getattr(fn, "__qualname__", repr(fn))
    # A death comes first: the other ranks may notice it, and raise, before this process does.
    failed = [rank for rank, answer in answers.items() if answer.failed]
    failed.sort(key=lambda rank: (not answers[rank].died, answers[rank].seconds))
    reports = {rank: answers[rank].report for rank in failed}
    reports |= {rank: f"still running, at\n{dump or '(no stack could be read)'}" for rank, dump in dumps.items()}
    exceptions = {rank: answers[rank].value for rank in failed if isinstance(answers[rank].value, BaseException)}
    first = failed[0] if failed else min(dumps)
    if not failed:
        kind, headline = RankTimeout, f"no answer within {timeout:g} s from rank {', '.join(map(str, sorted(dumps)))}"
    elif answers[first].died:
        kind, headline = RankDied, f"rank {first} died: {answers[first].report.strip()}"
    else:
        kind, headline = RankError, f"rank {first} raised {answers[first].report.strip().splitlines()[-1]}"
    parts = [f"{name}: {headline}", *(f"--- rank {rank}: {report.rstrip()}" for rank, report in reports.items())]
    if finished := sorted(set(answers) - set(failed)):
        parts.append(f"--- finished: rank {', '.join(map(str, finished))}")
    return kind("\n".join(parts), first, reports, exceptions)


def _pickle_by_value(fn: Callable, args: tuple, kw: dict) -> bytes:
    """Pickle a call; a test or benchmark module goes along by value, every other module by name."""
    module = sys.modules.get(getattr(getattr(fn, "func", fn), "__module__", None) or "")
    file = Path(getattr(module, "__file__", None) or "")
    of_tests = "tests" in file.parts or file.name.startswith("test_")
    by_value = module is not None and module.__name__ != __name__ and of_tests
    if by_value:
        cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps((fn, args, kw))
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(module)


pool = Pool()
run = pool.run
