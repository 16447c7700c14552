"""The pool of ranks keeps its promises: values by rank, culprits by name, and no failure that outlives its test."""

import functools
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import Pool, RankDied, RankError, RankTimeout


@dataclass
class Point:
    x: int


class Unpicklable(Exception):
    def __init__(self, a, b):
        super().__init__("only one of the two arguments reaches pickle")


def rank_sum(rank, scale=1.0):
    x = torch.tensor([scale * rank])
    dist.all_reduce(x)
    return x


def assert_usable(ranks):
    assert [x.item() for x in ranks.run(rank_sum, world_size=4)] == [6.0] * 4


def alive(pids):
    """The processes that are not gone: a zombie may still have threads that hold its sockets open."""
    return [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


def pid_of(rank):
    return os.getpid()


@pytest.mark.parametrize("world_size", [1, 2, 4, 2])
def test_each_rank_returns_its_value_in_order(ranks, world_size):
    def describe(rank, offset, *, scale):
        return (
            offset + scale * rank,
            dist.get_rank(),
            dist.get_world_size(),
            torch.get_num_threads(),
            os.environ["OMP_NUM_THREADS"],
        )

    assert ranks.run(describe, 10, scale=2, world_size=world_size) == [
        (10 + 2 * rank, rank, world_size, 1, "1") for rank in range(world_size)
    ]


def test_the_group_communicates_and_partials_are_shipped(ranks):
    assert [x.item() for x in ranks.run(functools.partial(rank_sum, scale=2.0), world_size=2)] == [2.0, 2.0]


def test_values_of_all_sorts_come_back_by_value(ranks):
    def values(rank, t, point):
        assert isinstance(point, Point)
        return t + rank, t.to(torch.bfloat16), t.numpy() * rank, Point(point.x + rank), t.requires_grad_()

    open_files = len(os.listdir("/proc/self/fd"))
    t = torch.arange(300_000, dtype=torch.float64)
    for rank, (total, low, array, point, leaf) in enumerate(ranks.run(values, t, Point(5), world_size=2)):
        torch.testing.assert_close(total, t + rank)
        torch.testing.assert_close(low, t.to(torch.bfloat16))
        np.testing.assert_array_equal(array, t.numpy() * rank)
        assert point == Point(5 + rank) and leaf.requires_grad and not total.is_shared()
    assert len(os.listdir("/proc/self/fd")) <= open_files + 2, "tensors left file handles behind"


def test_the_processes_persist_and_the_group_does_not(ranks):
    def sub_group(rank):
        group = dist.new_group([0, 1])
        return os.getpid(), dist.get_world_size(group)

    first, second = ranks.run(sub_group, world_size=2), ranks.run(sub_group, world_size=2)
    assert first == second and len({pid for pid, _ in first}) == 2 and os.getpid() not in dict(first)


def test_each_job_starts_from_the_same_seed(ranks):
    def draw(rank):
        return torch.rand(3).tolist()

    a, b = ranks.run(draw, world_size=2), ranks.run(draw, world_size=2)
    assert a == b and a[0] == a[1]


def test_an_exception_names_the_first_rank_and_shows_every_traceback(ranks):
    def one_raises(rank):
        if rank == 2:
            raise ValueError("the layout does not divide")
        dist.all_reduce(torch.ones(1))  # waits for rank 2, which never comes

    begin = time.monotonic()
    with pytest.raises(RankError, match="rank 2 raised ValueError: the layout does not divide") as caught:
        ranks.run(one_raises, world_size=4)
    assert time.monotonic() - begin < 20, "the other ranks were waited for"
    assert caught.value.rank == 2 and type(caught.value) is RankError
    assert next(iter(caught.value.reports)) == 2 and set(caught.value.reports) == {0, 1, 2, 3}
    assert "in one_raises" in caught.value.reports[2] and "all_reduce" in caught.value.reports[0]
    assert isinstance(caught.value.exceptions[2], ValueError)
    assert_usable(ranks)


@pytest.mark.parametrize("raised", [Unpicklable(1, 2), SystemExit(3)], ids=["unpicklable", "exit"])
def test_any_exception_gets_through(ranks, raised):
    def raises(rank, kind):
        raise Unpicklable(1, 2) if kind == "Unpicklable" else SystemExit(3)

    with pytest.raises(RankError, match=type(raised).__name__) as caught:
        ranks.run(raises, type(raised).__name__, world_size=2)
    assert set(caught.value.reports) == {0, 1}
    assert_usable(ranks)


def test_a_value_that_cannot_be_pickled_is_an_error_of_its_rank(ranks):
    def returns_a_group(rank):
        return dist.group.WORLD if rank == 1 else None

    with pytest.raises(RankError, match=r"rank 1 raised .*pickle"):
        ranks.run(returns_a_group, world_size=2)
    assert_usable(ranks)


def test_a_hang_is_a_timeout_that_says_what_each_rank_was_doing(ranks):
    def one_sleeps(rank):
        if rank == 1:
            time.sleep(600)
        elif rank != 3:
            dist.barrier()

    pids = ranks.run(pid_of, world_size=4)
    with pytest.raises(RankTimeout, match="no answer within 2 s from rank 0, 1, 2\n") as caught:
        ranks.run(one_sleeps, world_size=4, timeout=2)
    assert "barrier" in caught.value.reports[0] and "in one_sleeps" in caught.value.reports[1]
    assert "barrier" not in caught.value.reports[1] and "finished: rank 3" in str(caught.value)
    assert not alive(pids), "the hung processes were left behind"
    assert_usable(ranks)


def test_a_death_is_told_from_the_errors_it_causes(ranks):
    def one_dies(rank):
        dist.barrier()
        if rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))

    pids = ranks.run(pid_of, world_size=4)
    with pytest.raises(RankDied, match="rank 3 died: the process ended with signal SIGKILL") as caught:
        ranks.run(one_dies, world_size=4)
    assert caught.value.rank == 3 and "all_reduce" in caught.value.reports[0]
    assert not alive(pids)
    assert_usable(ranks)


def test_a_rank_that_dies_while_the_rest_sleeps_is_named_with_their_stacks(ranks):
    def one_exits(rank):
        if rank == 0:
            os._exit(7)
        time.sleep(600)

    with pytest.raises(RankDied, match="rank 0 died: the process ended with exit code 7") as caught:
        ranks.run(one_exits, world_size=2)
    assert "still running" in caught.value.reports[1] and "in one_exits" in caught.value.reports[1]
    assert_usable(ranks)


def test_a_process_that_dies_while_idle_is_replaced():
    with Pool() as pool:
        pids = pool.run(pid_of, world_size=2)
        os.kill(pids[1], signal.SIGKILL)
        while alive(pids[1:]):
            time.sleep(0.01)
        assert [x.item() for x in pool.run(rank_sum, world_size=2)] == [1.0, 1.0]


def test_close_ends_the_processes_and_the_pool_may_be_used_again():
    pool = Pool()
    pids = pool.run(pid_of, world_size=2)
    pool.close()
    assert not alive(pids)
    assert len(pool.run(pid_of, world_size=2)) == 2
    pool.close()


def test_no_process_outlives_a_killed_caller(tmp_path):
    script = tmp_path / "caller.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import os, time, ranks\n"
        "def report_and_hang(rank):\n"
        "    open(f'pid-{rank}', 'w').write(str(os.getpid()))\n"
        "    time.sleep(600)\n"
        "ranks.run(report_and_hang, world_size=2, timeout=600)\n"
    )
    caller = subprocess.Popen([sys.executable, str(script)], cwd=tmp_path)
    files = [tmp_path / "pid-0", tmp_path / "pid-1"]
    deadline = time.monotonic() + 60
    while not all(file.exists() and file.read_text() for file in files) and time.monotonic() < deadline:
        time.sleep(0.05)
    pids = [int(file.read_text()) for file in files]
    caller.kill()
    caller.wait()
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(pids)
