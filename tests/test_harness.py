"""The benchmarks' measures measure what they say, to the byte where they claim it."""

import json
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent / "bench"))

from harness import (
    Table,
    alternating,
    bytes_sent,
    collectives,
    gloo_header_bytes,
    merge,
    peak_bytes,
    peak_rss,
    tensor_memory,
)

# ------------------------------------------------------------------------------------------------ bytes on the wire


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("numel", [4_000, 1 << 18, 1 << 22])
def test_bytes_sent_is_the_payload_and_the_headers(ranks, world_size, numel):
    def measure(rank, numel, repeats):
        x = torch.ones(numel)
        dist.all_reduce(x)  # connects
        dist.barrier()
        with bytes_sent() as wire:
            for _ in range(repeats):
                dist.all_reduce(x)
        dist.barrier()
        return wire.sent

    once, thrice = (ranks.run(measure, numel, repeats, world_size=world_size) for repeats in (1, 3))
    payload = 2 * 4 * numel * (world_size - 1) // world_size
    steps, chunk = 2 * (world_size - 1), 4 * numel // world_size
    assert once == [payload + 144 * steps * max(2, -(-chunk // 2**20))] * world_size
    assert thrice == [3 * sent for sent in once]
    assert once[0] <= payload + gloo_header_bytes(payload, 1, world_size)


@pytest.mark.parametrize("world_size", [2, 4])
def test_other_collectives_stay_within_the_headers(ranks, world_size):
    def measure(rank, numel):
        world_size, x = dist.get_world_size(), torch.ones(numel)
        out = torch.empty(world_size * numel)
        sent = []
        for call in (
            lambda: dist.all_gather_into_tensor(out, x),
            lambda: dist.all_to_all_single(torch.empty(numel), x),
        ):
            call()
            dist.barrier()
            with bytes_sent() as wire:
                call()
            sent.append(wire.sent)
            dist.barrier()
        return sent

    numel = 1 << 20
    for gathered, exchanged in ranks.run(measure, numel, world_size=world_size):
        payload = 4 * numel * (world_size - 1)
        assert gathered - payload == 2 * 144 * (world_size - 1) <= gloo_header_bytes(payload, 1, world_size)
        assert exchanged - payload // world_size == 144 * (world_size - 1)


def test_a_socket_closed_while_counted_is_an_error(ranks):
    def measure(rank):
        dist.barrier()
        with bytes_sent():
            dist.destroy_process_group()

    with pytest.raises(RuntimeError, match="destroy no group here"):
        ranks.run(measure, world_size=2)


def test_collectives_are_counted_whoever_issues_them(ranks):
    def measure(rank):
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
        x = torch.ones(2, 3)

        def step():
            model(x).sum().backward()
            dist.barrier()
            torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(x, "sum", "0"))

        step(), step()  # DDP rebuilds its buckets in the second
        return dict(collectives(step))

    assert ranks.run(measure, world_size=2) == [{"allreduce": 2, "barrier": 1}] * 2


# ---------------------------------------------------------------------------------------------------------- seconds


def test_alternating_tells_wall_from_cpu_and_runs_the_cases_in_turn():
    calls = []

    def spin():
        calls.append("spin")
        end = time.process_time() + 0.03
        while time.process_time() < end:
            pass

    def sleep():
        calls.append("sleep")
        time.sleep(0.03)

    timings = alternating({"spin": spin, "sleep": sleep}, rounds=3, warmup=1)
    assert calls == ["spin", "sleep"] * 4 and len(timings["spin"].walls) == 3
    assert timings["spin"].cpu >= 0.03 and timings["sleep"].wall >= 0.03 and timings["sleep"].cpu < 0.01


def test_merge_takes_the_slowest_wall_and_adds_the_cpu(ranks):
    def measure(rank):
        return alternating({"sleep": lambda: time.sleep(0.02 * rank)}, rounds=3)

    both = ranks.run(measure, world_size=2)
    merged = merge(both)["sleep"]
    assert merged.wall >= 0.02 and len(merged.walls) == 3
    assert merged.cpus == [a + b for a, b in zip(both[0]["sleep"].cpus, both[1]["sleep"].cpus, strict=True)]


# ----------------------------------------------------------------------------------------------------------- memory

n = 4096  # float32 elements: 16,384 bytes


def chain():
    x = torch.empty(n)
    y = x.exp()  # two alive
    del x
    return y.neg()  # two alive


@pytest.mark.parametrize(
    ("fn", "peak"),
    [
        (lambda: torch.empty(n), 4 * n),
        (lambda: torch.empty(n + 1).fill_(1.0), 4 * n + 4),
        (lambda: torch.empty(n).view(64, 64).t(), 4 * n),
        (chain, 8 * n),
        (lambda: torch.empty(n, dtype=torch.bfloat16).float().double(), 4 * n + 8 * n),
        (lambda: [torch.empty(n) for _ in range(5)], 20 * n),
    ],
    ids=["one", "uneven", "view", "chain", "casts", "list"],
)
def test_peak_bytes_is_exact(fn, peak):
    assert peak_bytes(fn) == peak


def test_peak_bytes_sees_the_temporaries_inside_an_op():
    # einsum permutes and copies an operand before its matmul; no Python code sees the copy.
    a, b = torch.randn(4, 8, 16), torch.randn(8, 4, 32)
    assert peak_bytes(lambda: torch.einsum("xij,ixk->jk", a, b)) >= 4 * 16 * 32 + 4 * min(a.numel(), b.numel())
    # The copy of a transposed matrix goes through a block of 60 x 60 elements.
    assert peak_bytes(lambda: torch.empty(64, 64).t().contiguous()) == 2 * 4 * 64 * 64 + 4 * 60 * 60


def test_tensor_memory_sees_what_a_step_replaces():
    state = {}

    def build():
        state["w"] = torch.empty(n)

    def step():
        state["w"] = state["w"].neg()  # the old one is freed after the new one is there

    phases = tensor_memory(build, step, step)
    assert [(phase.start, phase.peak, phase.end) for phase in phases] == [
        (0, 4 * n, 4 * n),
        (4 * n, 8 * n, 4 * n),
        (4 * n, 8 * n, 4 * n),
    ]


def test_tensor_memory_sees_what_another_thread_frees():
    box = []

    def allocate():
        box.append(torch.empty(n))

    def free():
        thread = threading.Thread(target=box.clear)
        thread.start()
        thread.join()
        return torch.empty(n)

    first, second = tensor_memory(allocate, free)
    assert (first.end, second.start, second.peak, second.end) == (4 * n, 4 * n, 4 * n, 0)
    allocate()  # from the first call on, the books are kept between calls too
    assert tensor_memory(free)[0].end == -4 * n


def test_peak_bytes_counts_what_the_backward_allocates():
    def backward():
        w = torch.empty(n, requires_grad=True)
        w.exp().backward(w.detach())

    assert peak_bytes(backward) == 3 * 4 * n  # w, exp(w) which is saved, and w.grad


def test_peak_rss_sees_what_is_touched_and_freed():
    size = 64 << 20

    def touch():
        torch.ones(size // 4)

    base = peak_rss(lambda: None)
    assert size - (1 << 20) <= peak_rss(touch) - base <= size + (4 << 20)


# ------------------------------------------------------------------------------------------------------------ table


def test_the_table_writes_its_rows_and_fails_on_a_missed_target(tmp_path, capsys):
    table = Table("wire", {"case": "", "MB sent": ".1f", "note": ""}, folder=tmp_path)
    table.row("DDP", 69.234, None)
    assert table.target("enough", 1.0, 1.0, "<=") and table.finish() == 0
    assert not table.target("too much", 2.0, 1.0, "<=") and table.finish() == 1
    printed = capsys.readouterr().out
    assert "69.2" in printed and "PASS  enough: 1 <= 1" in printed and "MISS  too much: 2 <= 1" in printed
    written = json.loads((tmp_path / "wire.json").read_text())
    assert written["rows"] == [{"case": "DDP", "MB sent": 69.234, "note": None}]
    assert [target["met"] for target in written["targets"]] == [True, False]
    with pytest.raises(ValueError, match=r"2 cells .* 3 columns"):
        table.row("DDP", 1.0)
