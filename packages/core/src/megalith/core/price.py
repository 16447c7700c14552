"""How long will a step take, and where does the time go? A roofline for each op, links for each collective."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from megalith.core.effects import Effect, effects
from megalith.core.explain import aligned, amount
from megalith.core.program import Compute, Launch, Program, reads
from megalith.sharding.cost import collective_cost
from megalith.sharding.graph import op_name

__all__ = ["DEVICES", "FLOPS", "CostReport", "Device", "collective_seconds", "cost", "flops_of"]


# --- devices -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Device:
    """How fast one device computes.

    Args:
        name: for tables.
        flops: floating-point operations a second in matrix products, by dtype; others count as float32.
        bandwidth: bytes a second from and to its memory.
        overhead: seconds that an op takes at least; views are free.
    """

    name: str
    flops: Mapping[torch.dtype, float] = field(hash=False)
    bandwidth: float
    overhead: float

    def flops_for(self, dtype: torch.dtype) -> float:
        """Operations a second on numbers of a dtype."""
        return self.flops.get(dtype, self.flops[torch.float32])


def _device(name: str, fp64: float, fp32: float, half: float, fp8: float, bandwidth: float, overhead: float) -> Device:
    flops = {torch.float64: fp64, torch.float32: fp32, torch.bfloat16: half, torch.float16: half}
    flops |= {torch.float8_e4m3fn: fp8, torch.float8_e5m2: fp8}
    return Device(name, MappingProxyType(flops), bandwidth, overhead)


DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        device.name: device
        for device in (
            #       name        fp64    fp32    16 bit   fp8      bytes/s  overhead
            _device("cpu core", 27e9, 60e9, 1e9, 1e9, 13e9, 4e-6),
            _device("V100", 7.8e12, 15.7e12, 125e12, 125e12, 0.9e12, 5e-6),
            _device("A100", 19.5e12, 19.5e12, 312e12, 312e12, 2.04e12, 5e-6),
            _device("H100", 67e12, 67e12, 989e12, 1979e12, 3.35e12, 5e-6),
            _device("H200", 67e12, 67e12, 989e12, 1979e12, 4.8e12, 5e-6),
            _device("B200", 37e12, 75e12, 2250e12, 4500e12, 8e12, 5e-6),
        )
    }
)
"""Peak rates of the data sheets, dense, without TF32; of the CPU core, what torch reaches on one of a
server without units for 16-bit numbers."""


# --- operations ----------------------------------------------------------------------------------------

Shapes = Sequence[tuple[int, ...]]


def _mm(x: Shapes, _: Shapes) -> int:
    return 2 * math.prod(x[0]) * x[1][-1]


def _addmm(x: Shapes, _: Shapes) -> int:
    return _mm(x[1:], ())


def _attention(x: Shapes, _: Shapes) -> int:
    (*batch, n, d), keys, values = x[0], x[1], x[2]
    return 2 * math.prod(batch) * n * keys[-2] * (d + values[-1])


def _attention_backward(x: Shapes, _: Shapes) -> int:
    """Five products: the scores again, and the gradients of the weights, of v, q and k."""
    (*batch, n, d), keys, values = x[1], x[2], x[3]
    return 2 * math.prod(batch) * n * keys[-2] * (3 * d + 2 * values[-1])


def _convolution(x: Shapes, y: Shapes) -> int:
    (_, _, *_), weight, out = x[0], x[1], y[0]
    return 2 * math.prod(out) * math.prod(weight[1:])


def _transposed(x: Shapes, _: Shapes) -> int:
    return 2 * math.prod(x[0]) * math.prod(x[1][1:])


def _convolution_backward(g: tuple[int, ...], weight: tuple[int, ...], wanted: Sequence[bool]) -> int:
    return 2 * math.prod(g) * math.prod(weight[1:]) * (bool(wanted[0]) + bool(wanted[1]))


def _expert_mm(x: Shapes, _: Shapes) -> int:
    """Each row meets the matrix of one expert."""
    return 2 * math.prod(x[0]) * x[1][-2]


def _expert_outer(x: Shapes, _: Shapes) -> int:
    return 2 * math.prod(x[0]) * x[1][-1]


FLOPS: dict[str, Callable[[Shapes, Shapes], int]] = {
    "aten.mm.default": _mm,
    "aten.bmm.default": _mm,
    "aten.addmm.default": _addmm,
    "aten.addmm_.default": _addmm,
    "aten.baddbmm.default": _addmm,
    "megalith.sdpa.default": _attention,
    "megalith.sdpa_backward.default": _attention_backward,
    "megalith.expert_mm.default": _expert_mm,
    "megalith.expert_outer.default": _expert_outer,
}
"""Per op, its floating-point operations, of the shapes of its operands and outputs: two for a multiply and add.

Attention counts all scores, masked ones too, as torch's own counter does. An op that is not here is bound by memory.
"""


def flops_of(instruction: Compute, effect: Effect) -> int:
    """Floating-point operations of an op in matrix products, attention and convolutions.

    >>> from megalith.core.effects import Lying
    >>> from megalith.sharding.graph import Ref
    >>> mm = Compute(torch.ops.aten.mm.default, (Ref(0), Ref(1)), {}, (2,))
    >>> flops_of(mm, Effect((Lying.packed((3, 4), torch.float32), Lying.packed((4, 5), torch.float32))))
    120
    """
    name = op_name(instruction.fn)
    shapes = [x.shape for x in effect.operands]
    if name == "aten.convolution.default":
        transposed = instruction.args[6]
        return (_transposed if transposed else _convolution)(shapes, [o.lying.shape for o in effect.outputs if o])
    if name == "aten.convolution_backward.default":
        g, x, weight = shapes[:3]
        moved = x if instruction.args[7] else g
        return _convolution_backward(moved, weight, instruction.args[10])
    count = FLOPS.get(name)
    return count(shapes, [o.lying.shape for o in effect.outputs if o]) if count else 0


_ROWS_OF_FIRST = {"aten.embedding.default", "aten.gather.default", "aten.index_select.default", "aten.index.Tensor"}
"""Ops that read of their first operand only what comes out."""


def traffic_of(instruction: Compute, effect: Effect) -> int:
    """Bytes that an op reads and writes; a view none."""
    written = sum(o.lying.nbytes for o in effect.outputs if o is not None and (o.alias is None or _writes(instruction)))
    if not written:
        return 0
    read = [x.nbytes for x in effect.operands]
    if op_name(instruction.fn) in _ROWS_OF_FIRST and effect.outputs[0] is not None:
        read[0] = min(read[0], effect.outputs[0].lying.nbytes)
    return sum(read) + written


def _writes(instruction: Compute) -> bool:
    schema = getattr(instruction.fn, "_schema", None)
    return schema is not None and schema.is_mutable


# --- the step ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CostReport:
    """What one run of a program is predicted to take on one rank; `str()` gives a table.

    Args:
        device: on which device.
        seconds: from start to end: compute, and the communication that does not overlap with it.
        compute_seconds: all ops one behind the other.
        communication_seconds: all collectives one behind the other.
        exposed_seconds: what ops wait for collectives.
        flops: operations in matrix products, attention and convolutions.
        bytes_moved: bytes from and to the device's memory.
        bytes_received: by the axes of the group.
        seconds_by_op: compute seconds by op, the most first.
    """

    device: Device
    seconds: float
    compute_seconds: float
    communication_seconds: float
    exposed_seconds: float
    flops: int
    bytes_moved: int
    bytes_received: Mapping[str, int]
    seconds_by_op: Mapping[str, float]

    @property
    def flops_per_second(self) -> float:
        """Operations a second over the whole step."""
        return self.flops / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        rows = [
            ("step", _time(self.seconds)),
            ("compute", _time(self.compute_seconds)),
            ("communication", _time(self.communication_seconds)),
            ("  not overlapped", _time(self.exposed_seconds)),
            ("flops", f"{self.flops:.3g}"),
            ("flops/s", f"{self.flops_per_second:.3g}"),
            ("memory traffic", amount(self.bytes_moved)),
            *((f"received over {axes}", amount(nbytes)) for axes, nbytes in self.bytes_received.items()),
            *((f"  {name}", _time(seconds)) for name, seconds in list(self.seconds_by_op.items())[:5]),
        ]
        return "\n".join(aligned((f"on {self.device.name}", ""), rows, right=(1,)))


def cost(program: Program, device: Device) -> CostReport:
    """What a program takes on a device. Nothing runs.

    An op takes the longer of its operations at the device's rate and its bytes at the device's bandwidth, and at least
    the overhead (Williams, Waterman and Patterson, "Roofline", 2009). A collective takes what the links of the mesh
    give (`collective_cost`), from its launch on, behind those before it that share an axis; ops run on until its wait.

    Args:
        program: one rank's program.
        device: such as `DEVICES["H100"]`.

    >>> from megalith.core.shard import shard
    >>> from megalith.sharding import Mesh
    >>> step = shard(lambda x, w: x @ w, Mesh("tp=2"), {"w": "e (tp f)"}, backend="virtual")
    >>> report = cost(step.program(torch.ones(64, 32), torch.ones(32, 64)), DEVICES["cpu core"])
    >>> report.flops, report.bytes_moved        # 64 x 32 by 32 x 32
    (131072, 20480)
    """
    now = stalled = busy = moving = 0.0
    flops = traffic = 0
    received = Counter[str]()
    by_op: dict[str, float] = {}
    free: dict[str, float] = {}  # axis -> when its last collective ends
    ends: dict[int, float] = {}
    for instruction, effect in zip(program.instructions, effects(program), strict=True):
        if isinstance(instruction, Compute):
            n, nbytes = flops_of(instruction, effect), traffic_of(instruction, effect)
            took = _op_seconds(n, nbytes, effect, device)
            flops, traffic, busy, now = flops + n, traffic + nbytes, busy + took, now + took
            name = op_name(instruction.fn)
            by_op[name] = by_op.get(name, 0.0) + took
        elif isinstance(instruction, Launch):
            took = collective_seconds(instruction)
            start = max(now, *(free.get(axis, 0.0) for axis in instruction.axes))
            ends[instruction.pending] = start + took
            free.update(dict.fromkeys(instruction.axes, start + took))
            received[" ".join(instruction.axes)] += instruction.bytes_received
            moving += took
        else:
            (pending,) = reads(instruction)
            stalled += max(0.0, ends[pending] - now)
            now = max(now, ends[pending])
    ranked = dict(sorted(by_op.items(), key=lambda item: -item[1]))
    return CostReport(device, now, busy, moving, stalled, flops, traffic, dict(received), ranked)


def collective_seconds(launch: Launch) -> float:
    """Seconds of one collective by the alpha-beta model, on the links of its mesh."""
    mesh = launch.source.mesh
    links = [mesh.link(axis) for axis in launch.axes if mesh.sizes[axis] > 1]
    if not links:
        return 0.0
    latency = collective_cost(launch.kind, mesh, launch.axes, 0, 1).seconds
    return latency + launch.bytes_received / min(link.bandwidth for link in links)


def _op_seconds(flops: int, nbytes: int, effect: Effect, device: Device) -> float:
    if not nbytes:
        return 0.0
    dtype = effect.operands[0].dtype if effect.operands else torch.float32
    return max(flops / device.flops_for(dtype), nbytes / device.bandwidth, device.overhead)


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"
