"""What a benchmark measures, of any library alike: bytes on the wire, seconds and memory; and its table of targets.

    from harness import Table, alternating, bytes_sent, peak_bytes

    with bytes_sent() as wire:
        dist.all_reduce(x)
    wire.sent, wire.received          # of this process, exact, headers included

A benchmark runs its ranks with `Pool().run(fn, ...)` of tests/ranks.py, a new pool where memory is measured.
"""

from __future__ import annotations

import ctypes
import gc
import json
import operator
import os
import platform
import socket
import stat
import statistics
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))
os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler's chatter

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from ranks import Pool as Pool  # noqa: E402
from torch.profiler import ProfilerActivity, profile, record_function  # noqa: E402

# --------------------------------------------------------------------------------------------------- bytes on the wire

# What gloo adds, as test_harness.py measures: three 48-byte messages (ready to send, ready to receive, the header of
# the payload) per segment. A step of a ring all-reduce goes in at least 2 segments of at most 1 MiB, a step of an
# all-gather in 2, an all-to-all in 1 per peer.
GLOO_SEGMENT_HEADER_BYTES = 144
GLOO_SEGMENT_BYTES = 1 << 20


def gloo_header_bytes(payload_bytes: int, n_collectives: int, world_size: int) -> int:
    """The most that gloo adds to `payload_bytes` sent by one rank in `n_collectives` among `world_size` ranks."""
    n_segments = 4 * (world_size - 1) * n_collectives + payload_bytes // GLOO_SEGMENT_BYTES
    return GLOO_SEGMENT_HEADER_BYTES * n_segments


@dataclass
class Wire:
    """Bytes of TCP payload that this process handed to the kernel and got from it."""

    sent: int = 0
    received: int = 0


def _sockets() -> dict[int, tuple[int, int]]:
    """(bytes sent, bytes received) so far by each TCP socket of this process, by inode."""
    totals = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            status = os.stat(int(name))
            if not stat.S_ISSOCK(status.st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as sock:
                if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
                    continue
                info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:  # closed since the folder was listed
            continue
        # struct tcp_info of linux/tcp.h; what is queued but not yet sent counts, what was sent twice does not.
        received, unsent, sent, resent = (
            struct.unpack_from(code, info, at)[0] for code, at in (("Q", 128), ("I", 144), ("Q", 200), ("Q", 208))
        )
        totals[status.st_ino] = sent - resent + unsent, received
    return totals


@contextmanager
def bytes_sent() -> Iterator[Wire]:
    """Count the bytes that this process sends and receives over TCP inside the block, by whatever library.

    Exact on Linux 4.19 or later: the kernel's own counters of the process's sockets, so headers count. `sent` is the
    same in each run; `received` ends with what the peers had sent by then. Raises RuntimeError when a socket was closed
    inside the block, for then its count is lost.
    """
    wire, before = Wire(), _sockets()
    yield wire
    after = _sockets()
    if closed := before.keys() - after.keys():
        raise RuntimeError(
            f"{len(closed)} TCP sockets were closed while their bytes were counted: destroy no group here"
        )
    for inode, (sent, received) in after.items():
        wire.sent += sent - before.get(inode, (0, 0))[0]
        wire.received += received - before.get(inode, (0, 0))[1]


def collectives(fn: Callable[[], Any]) -> Counter[str]:
    """Run `fn` and count the c10d collectives it issued in this process, by name, whichever library issued them."""
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        fn()
    names = (event.name for event in prof.events())
    return Counter(name.removeprefix("c10d::").strip("_") for name in names if name.startswith("c10d::"))


# ------------------------------------------------------------------------------------------------------------- seconds


@dataclass
class Timing:
    """Seconds of each round of one case."""

    walls: list[float] = field(default_factory=list)
    cpus: list[float] = field(default_factory=list)

    @property
    def wall(self) -> float:
        """Median seconds from start to end."""
        return statistics.median(self.walls)

    @property
    def cpu(self) -> float:
        """Median seconds of processor time, all threads."""
        return statistics.median(self.cpus)


def alternating(cases: dict[str, Callable[[], Any]], rounds: int, warmup: int = 2) -> dict[str, Timing]:
    """Time the cases in turn, `rounds` times after `warmup` rounds, so that a busy moment hits all of them alike.

    In a process group every rank calls this with the same cases; they meet in a barrier before each call, untimed.
    """
    timings = {name: Timing() for name in cases}
    for round_ in range(-warmup, rounds):
        for name, step in cases.items():
            gc.collect()
            if dist.is_initialized():
                dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            step()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            if round_ >= 0:
                timings[name].walls.append(wall)
                timings[name].cpus.append(cpu)
    return timings


def merge(ranks: Sequence[dict[str, Timing]]) -> dict[str, Timing]:
    """The ranks' timings as one of each case: by round, the slowest rank's wall and the sum of CPU seconds."""
    return {
        name: Timing(
            [max(walls) for walls in zip(*(rank[name].walls for rank in ranks), strict=True)],
            [sum(cpus) for cpus in zip(*(rank[name].cpus for rank in ranks), strict=True)],
        )
        for name in ranks[0]
    }


# -------------------------------------------------------------------------------------------------------------- memory


@dataclass(frozen=True)
class Phase:
    """Bytes of CPU tensor memory, above what was allocated before the first phase."""

    start: int
    peak: int
    end: int


def tensor_memory(*phases: Callable[[], Any]) -> list[Phase]:
    """Run the phases in order and return each one's allocated bytes at its start, its peak and its end.

    Exact: every block of ATen's CPU allocator is seen, temporaries inside an op included (a Python scalar is one, of 8
    bytes), at the size it was asked for, whichever thread frees it. Only a peak inside another thread may be missed.
    What was allocated before this process's first call is not seen to be freed; so for the steady state of a step that
    replaces its parameters let the first phase build them and the last be the step.
    """
    # The allocator keeps its books of all threads from now on; the profiler alone loses what another thread frees.
    c10 = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    ctypes.c_bool.in_dll(c10, "FLAGS_caffe2_report_cpu_memory_usage").value = True
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        for number, phase in enumerate(phases):
            with record_function(f"tensor_memory {number}"):
                torch.empty(1)  # reads the books: the first two and the last two events of a phase are these probes
                result = phase()
                del result
                torch.empty(1)
    levels: list[tuple[int, int]] = []  # (nanoseconds, bytes allocated by then)
    spans: dict[str, tuple[int, int]] = {}  # nanoseconds
    stack = list(prof.profiler.kineto_results.experimental_event_tree())
    while stack:
        event = stack.pop()
        stack.extend(event.children)
        if event.tag == torch._C._profiler._EventType.Allocation:
            if event.extra_fields.device.type == "cpu":
                levels.append((event.start_time_ns, event.extra_fields.total_allocated))
        elif event.name.startswith("tensor_memory "):
            spans[event.name] = event.start_time_ns, event.end_time_ns
    levels.sort()
    found, base = [], None
    for number in range(len(phases)):
        begin, end = spans[f"tensor_memory {number}"]
        _, first, *inside, _, last = (level for at, level in levels if begin <= at <= end)
        base = first if base is None else base
        found.append(Phase(first - base, max(first, last, *inside) - base, last - base))
    return found


def peak_bytes(fn: Callable[[], Any], warmup: int = 0) -> int:
    """Run `fn` and return the peak of CPU tensor memory above what was allocated when it started, in bytes.

    With `warmup` calls before, what they left behind is seen to be freed; see tensor_memory.
    """
    last = tensor_memory(*[fn] * (warmup + 1))[-1]
    return last.peak - last.start


def resident() -> dict[str, int]:
    """Resident bytes of this process: `VmRSS`, its peak `VmHWM`, and `RssAnon`, which is without mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {name: int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM", "RssAnon", "RssFile", "RssShmem")}


IMPORT_BASELINE = resident()["RssAnon"]


def peak_rss(fn: Callable[[], Any], baseline: int | None = None) -> int:
    """Run `fn` and return the peak of anonymous resident memory above `baseline` bytes.

    The baseline is by default that of this module's import. Includes what malloc keeps and what libraries other than
    torch allocate; right to about a MiB. It is the kernel's own high-water mark, less the resident files, which only
    grow; or, where that mark cannot be reset, the most that a sampling thread saw.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what earlier code freed is not to be counted
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        peak = _sampled_peak(fn)
    else:
        fn()
        after = resident()
        peak = after["VmHWM"] - after["RssFile"] - after["RssShmem"]
    return peak - (IMPORT_BASELINE if baseline is None else baseline)


def _sampled_peak(fn: Callable[[], Any], interval_seconds: float = 0.001) -> int:
    peak, done = [resident()["RssAnon"]], threading.Event()

    def sample() -> None:
        while not done.wait(interval_seconds):
            peak.append(max(peak.pop(), resident()["RssAnon"]))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        fn()
    finally:
        done.set()
        thread.join()
    return max(peak[0], resident()["RssAnon"])


# --------------------------------------------------------------------------------------------------------------- table


class Table:
    """Rows of measurements and the targets they have to meet.

    Example::

        table = Table("wire", {"case": "", "MB sent": ".1f"})
        table.row("DDP", 69.2)
        table.target("DDP, MB sent", 69.2, 69.3, "<=")
        sys.exit(table.finish())        # prints all, writes out/bench/wire.json; 1 when a target is missed
    """

    operators: ClassVar = {"<=": operator.le, "<": operator.lt, ">=": operator.ge, ">": operator.gt, "==": operator.eq}

    def __init__(self, name: str, columns: dict[str, str], folder: Path = ROOT / "out" / "bench"):
        self.name, self.columns, self.folder = name, columns, folder
        self.rows: list[tuple] = []
        self.targets: list[dict[str, Any]] = []

    def row(self, *cells: Any) -> None:
        """Add a row; a number is printed with its column's format, None as a dash."""
        if len(cells) != len(self.columns):
            raise ValueError(f"{len(cells)} cells {cells} for the {len(self.columns)} columns {list(self.columns)}")
        self.rows.append(cells)

    def target(self, name: str, value: float, limit: float, relation: str) -> bool:
        """State that `value` has to be `relation` (<=, <, >=, >, ==) `limit`; returns whether it is."""
        met = bool(self.operators[relation](value, limit))
        self.targets.append({"name": name, "value": value, "relation": relation, "limit": limit, "met": met})
        return met

    def finish(self) -> int:
        """Print the table and a line per target, write the JSON file, and return the exit code."""
        from rich.console import Console
        from rich.table import Table as RichTable

        console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
        table = RichTable(title=self.name)
        for column in self.columns:
            table.add_column(column, justify="left" if column == next(iter(self.columns)) else "right")
        for cells in self.rows:
            formats = self.columns.values()
            texts = (
                "–" if cell is None else cell if isinstance(cell, str) else format(cell, form)
                for cell, form in zip(cells, formats, strict=True)
            )
            table.add_row(*texts)
        console.print(table)
        for target in self.targets:
            verdict = "[green]PASS[/]" if target["met"] else "[red]MISS[/]"
            console.print(
                f"{verdict}  {target['name']}: {target['value']:.10g} {target['relation']} {target['limit']:.10g}"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{self.name}.json"
        rows = [dict(zip(self.columns, cells, strict=True)) for cells in self.rows]
        host = {"torch": torch.__version__, "python": platform.python_version(), "cpus": os.cpu_count()}
        path.write_text(json.dumps({"name": self.name, "host": host, "rows": rows, "targets": self.targets}, indent=1))
        return int(not all(target["met"] for target in self.targets))
