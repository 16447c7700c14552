"""What a step is predicted to cost is what one computes by hand."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from megalith.core.backends.count import count
from megalith.core.backends.virtual import run_virtual
from megalith.core.effects import Effect, Lying, Output
from megalith.core.memory import memory
from megalith.core.price import DEVICES, Device, collective_seconds, cost, flops_of
from megalith.core.program import Compute, Launch, Wait
from megalith.core.shard import shard
from megalith.core.transforms import grad_and_value
from megalith.models.llama import Llama, LlamaConfig
from megalith.sharding import Mesh
from megalith.sharding.cost import collective_cost
from megalith.sharding.graph import Ref
from megalith.sharding.mesh import Link

aten = torch.ops.aten
SLOW = Device("slow", {torch.float32: 1000.0}, bandwidth=100.0, overhead=1.0)


def sharded(fn, mesh="", specs=None, links=None):
    return shard(fn, Mesh(mesh, links or {}), specs or {}, backend="virtual")


def llama_step():
    model = Llama(LlamaConfig(vocab=128, dim=64, hidden=176, n_layers=2, n_heads=4, n_kv_heads=2))
    params = {name: p.detach() for name, p in model.named_parameters()}
    ids = torch.zeros(4, 32, dtype=torch.int64)

    def step(params, x, y):
        def loss(p):
            return F.cross_entropy(torch.func.functional_call(model, p, (x,)).flatten(0, 1), y.flatten())

        return grad_and_value(loss)(params)

    return step, params, ids


# --- flops ---------------------------------------------------------------------------------------------


def test_the_flops_of_a_step_are_those_of_torchs_counter():
    step, params, ids = llama_step()
    program = sharded(step).program(params, ids, ids)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        run_virtual([program], [[*params.values(), ids, ids]])
    b, h, s, d, layers = 4, 4, 32, 16, 2
    attention = 2 * b * h * s * s * d * (2 + 5) * layers  # a composite that torch's counter does not know
    counts = counter.get_flop_counts()["Global"]
    known = sum(n for op, n in counts.items() if "attention" not in str(op))
    assert count(program).flops == known + attention


@pytest.mark.parametrize(
    ("op", "args", "shapes"),
    [
        (aten.mm.default, (), [(3, 4), (4, 5)]),
        (aten.bmm.default, (), [(2, 3, 4), (2, 4, 5)]),
        (aten.addmm.default, (), [(5,), (3, 4), (4, 5)]),
        (aten.convolution.default, ([2, 2], [1, 1], [1, 1], False, [0, 0], 2), [(2, 4, 9, 9), (6, 2, 3, 3), (6,)]),
        (aten.convolution.default, ([2, 2], [1, 1], [1, 1], True, [0, 0], 1), [(2, 4, 9, 9), (4, 6, 3, 3), (6,)]),
    ],
)
def test_the_flops_of_one_op_are_those_of_torchs_counter(op, args, shapes):
    tensors = [torch.zeros(shape) for shape in shapes]
    with FlopCounterMode(display=False) as counter:
        out = op(*tensors, *args)
    operands = tuple(map(Lying.of, tensors))
    instruction = Compute(op, (*map(Ref, range(len(tensors))), *args), {}, (9,))
    effect = Effect(operands, (Output(Lying.of(out), None, 0),))
    assert flops_of(instruction, effect) == counter.get_total_flops()


def test_a_rank_of_tensor_parallel_does_half_the_products():
    x, w = torch.zeros(8, 16), torch.zeros(16, 32)
    whole = count(sharded(lambda x, w: x @ w).program(x, w))
    half = count(sharded(lambda x, w: x @ w, "tp=2", {"w": "i (tp o)"}).program(x, w))
    assert (whole.flops, half.flops) == (2 * 8 * 16 * 32, 8 * 16 * 32)


# --- seconds -------------------------------------------------------------------------------------------


def test_an_op_takes_the_longest_of_flops_bytes_and_overhead():
    x = torch.zeros(2, 2)
    seconds = cost(sharded(lambda x: x.sin()).program(x), SLOW).seconds
    assert seconds == 1.0  # 32 bytes at 100 a second are less than the overhead
    x, w = torch.zeros(50, 50), torch.zeros(50, 50)
    assert cost(sharded(lambda x, w: x @ w).program(x, w), SLOW).seconds == 3 * 2500 * 4 / 100
    fast = replace(SLOW, bandwidth=1e9)
    assert cost(sharded(lambda x, w: x @ w).program(x, w), fast).seconds == 2 * 50**3 / 1000


def test_a_view_takes_no_time():
    report = cost(sharded(lambda x: x.t().reshape(12)).program(torch.zeros(3, 4)), SLOW)
    assert report.seconds_by_op["aten.permute.default"] == 0
    assert report.bytes_moved == 2 * 48  # the reshape copies


def test_a_collective_takes_latency_and_bandwidth_of_its_axis():
    links = {"tp": Link(bandwidth=64.0, latency=0.25)}
    fn = sharded(lambda x, w: (x @ w).relu(), "tp=4", {"x": "b (tp e)", "w": "(tp e) f"}, links)
    program = fn.program(torch.zeros(8, 4), torch.zeros(4, 6))
    (launch,) = program.collectives
    assert launch.bytes_received == 2 * 48 // 4 * 3 * 4  # 2 L (n-1)/n numbers of four bytes
    whole = collective_cost("all_reduce", program.mesh, ("tp",), elements=48, itemsize=4)
    assert collective_seconds(launch) == whole.seconds > 288 / 64
    report = cost(program, SLOW)
    assert report.bytes_received == {"tp": 288}
    assert report.exposed_seconds == report.communication_seconds == collective_seconds(launch)
    assert report.seconds == report.compute_seconds + report.exposed_seconds


def test_ops_between_launch_and_wait_hide_a_collective():
    links = {"tp": Link(bandwidth=288 / 3, latency=0.0)}  # three seconds
    fn = sharded(lambda x, w, z: ((x @ w).relu(), z.sin(), z.cos()), "tp=4", {"x": "b (tp e)", "w": "(tp e) f"}, links)
    program = fn.program(torch.zeros(8, 4), torch.zeros(4, 6), torch.zeros(2))
    mm, launch, wait, relu, sin, cos = sorted(program.instructions, key=_order)
    assert isinstance(launch, Launch) and isinstance(wait, Wait)

    def seconds(*instructions):
        report = cost(replace(program, instructions=instructions), replace(SLOW, bandwidth=1e9))
        return report.seconds, report.exposed_seconds

    assert seconds(mm, launch, wait, relu, sin, cos) == (4 + 3, 3)
    assert seconds(mm, launch, sin, wait, relu, cos) == (4 + 2, 2)
    assert seconds(mm, launch, sin, cos, wait, relu) == (4 + 1, 1)


def _order(instruction):
    if isinstance(instruction, Launch):
        return 1
    if isinstance(instruction, Wait):
        return 2
    return {"mm": 0, "relu": 3, "sin": 4, "cos": 5}[str(instruction.fn).split(".")[1].removesuffix("_")]


def test_devices_differ_by_dtype():
    h100 = DEVICES["H100"]
    assert h100.flops_for(torch.bfloat16) > h100.flops_for(torch.float32)
    assert h100.flops_for(torch.int64) == h100.flops_for(torch.float32)


def test_the_table_names_the_step_and_the_axes():
    step, params, ids = llama_step()
    text = str(cost(sharded(step, "dp=2", {"[xy]": "(dp b) s"}).program(params, ids, ids), DEVICES["H200"]))
    assert "on H200" in text
    assert "received over dp" in text
    assert "not overlapped" in text


# --- counting ------------------------------------------------------------------------------------------


def test_count_takes_one_program_or_those_of_all_ranks():
    fn = sharded(lambda x, w: (x @ w).relu(), "tp=3", {"x": "b (tp e)", "w": "(tp e) f"})
    args = torch.zeros(8, 7), torch.zeros(7, 6)  # ranks hold 3, 3 and 1 of 7
    fn.program(*args)
    programs = list(next(iter(fn._cache.values())).programs.values())
    counted = count(programs)
    assert [rank.flops for rank in counted.ranks] == [2 * 8 * 6 * n for n in (3, 3, 1)]
    assert counted.flops == 2 * 8 * 6 * 3
    assert counted.ranks[0].collectives == {("all_reduce", ("tp",)): 1}
    assert counted.bytes_received == 2 * 48 // 3 * 2 * 4
    assert counted.ranks[2].peak_bytes == memory(programs[2]).peak == count(programs[2]).peak_bytes
    assert "all_reduce over tp" in str(counted)


def test_count_of_nothing_says_what_to_give():
    with pytest.raises(ValueError, match="give the program of one rank at least"):
        count([])
