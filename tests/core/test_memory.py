"""The memory that a program is predicted to take is what torch's allocator then sees, op by op and at the peak."""

import functools
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

from harness import tensor_memory

from megalith.core import _compat
from megalith.core.backends.direct import is_direct, sums_directly
from megalith.core.effects import Lying, effects
from megalith.core.markers import constrain
from megalith.core.memory import memory
from megalith.core.program import Compute, Launch, Program, Wait, reads, writes
from megalith.core.shard import shard
from megalith.core.transforms import grad_and_value
from megalith.models.gpt import GPT, GPTConfig
from megalith.models.llama import Llama, LlamaConfig
from megalith.sharding import Mesh
from megalith.sharding.graph import map_refs, op_name

TINY = LlamaConfig(vocab=128, dim=64, hidden=176, n_layers=2, n_heads=4, n_kv_heads=2)
MEDIUM = LlamaConfig(vocab=512, dim=128, hidden=352, n_layers=4, n_heads=8, n_kv_heads=4)
ZERO_TP = {
    "*.[qkv]_proj.weight": "(tp dp o) i -> (tp o) i",
    "*.o_proj.weight": "o (tp dp i) -> o (tp i)",
    "*.gate_proj.weight": "(tp dp o) i -> (tp o) i",
    "*.up_proj.weight": "(tp dp o) i -> (tp o) i",
    "*.down_proj.weight": "o (tp dp i) -> o (tp i)",
    "*embed_tokens.weight": "(tp dp v) e -> (tp v) e",
    "*lm_head.weight": "(tp dp v) e -> (tp v) e",
    "[xy]": "(dp b) s",
}


def sgd_step(model, donate=(), mesh="", specs=None, batch=(4, 32)) -> Program:
    """The program of one rank for gradients and an SGD update of a language model."""

    def step(params, x, y):
        def loss(p):
            return F.cross_entropy(torch.func.functional_call(model, p, (x,)).flatten(0, 1), y.flatten())

        grads, value = grad_and_value(loss)(params)
        return {name: p - 0.1 * grads[name] for name, p in params.items()}, value

    params = {name: p.detach() for name, p in model.named_parameters()}
    ids = torch.zeros(batch, dtype=torch.int64)
    sharded = shard(step, Mesh(mesh), specs or {}, donate=donate, backend="virtual")
    return sharded.program(params, ids, ids)


def fed(program: Program) -> list[torch.Tensor]:
    """Inputs of a program: small token ids, and random numbers."""
    kinds = [program.types[slot] for slot in program.inputs]
    return [
        torch.randn(k.shape).to(k.dtype) if k.dtype.is_floating_point else torch.ones(k.shape, dtype=k.dtype)
        for k in kinds
    ]


def compute(instruction: Compute, values: dict) -> tuple:
    args, kwargs = map_refs((instruction.args, dict(instruction.kwargs)), lambda ref: values[ref.id])
    outs = instruction.fn(*args, **kwargs)
    return (outs,) if _compat.returns_one_tensor(instruction.fn) else tuple(outs)


def run_alone(program: Program, inputs: list[torch.Tensor]) -> list:
    """Runs one rank's program, each slot freed after its last use; a collective allocates as gloo's, moves nothing."""
    values = dict(zip(program.inputs, inputs, strict=True)) | dict(program.constants)
    inputs.clear()
    last, sent = program.last_use, {}
    with torch.no_grad():
        for position, i in enumerate(program.instructions):
            if isinstance(i, Compute):
                for slot, out in zip(i.outputs, compute(i, values), strict=True):
                    if slot >= 0:
                        values[slot] = out
                out = None
            elif isinstance(i, Launch):
                buffer, kind = values[i.buffer].contiguous(), program.types[i.pending]
                sent[i.pending] = buffer
                if i.kind == "all_reduce":
                    values[i.pending] = buffer if i.may_overwrite or buffer is not values[i.buffer] else buffer.clone()
                elif i.kind == "reduce_scatter":
                    n = len(i.peers)
                    direct = sums_directly(n, kind.nbytes, kind.dtype)
                    values[i.pending] = buffer.new_ones(kind.shape if direct else (n, *kind.shape))
                    sent[i.pending] = buffer, buffer.new_ones((n - 2) * values[i.pending].numel() if direct else 0)
                else:
                    values[i.pending] = buffer.new_ones(kind.shape)
                    if i.kind == "all_gather" and not is_direct(len(i.peers), kind.nbytes // len(i.peers)):
                        values[i.pending].clone()
                del buffer
            else:
                arrived = values[i.pending]
                values[i.output] = arrived if tuple(arrived.shape) == program.types[i.output].shape else arrived.sum(0)
                del arrived, sent[i.pending]
            for slot in {*reads(i), *writes(i)}:
                if last.get(slot, position) == position:
                    values.pop(slot, None)
    return [map_refs(output, lambda ref: values[ref.id]) for output in program.outputs]


def measured_peak(program: Program) -> int:
    """Bytes at the peak as the allocator sees them, inputs included."""
    kept: list = []

    def make():
        kept.extend(fed(program))

    def run():
        run_alone(program, list(kept))

    return tensor_memory(make, run)[-1].peak


MODELS = {
    "llama": lambda: Llama(TINY),
    "llama in bfloat16": lambda: Llama(TINY).bfloat16(),
    "gpt": lambda: GPT(GPTConfig(vocab=128, dim=64, n_layers=2, n_heads=4, positions=64)),
}


@functools.cache
def program_of(model: str, mesh: str) -> Program:
    return sgd_step(MODELS[model](), mesh=mesh, specs=ZERO_TP if mesh and "llama" in model else {})


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("mesh", ["", "dp=2 tp=2"])
def test_every_output_lies_and_aliases_as_predicted(model, mesh):
    program = program_of(model, mesh)
    values = dict(zip(program.inputs, fed(program), strict=True)) | dict(program.constants)
    with torch.no_grad():
        for i, effect in zip(program.instructions, effects(program), strict=True):
            if isinstance(i, Launch):
                values[i.pending] = torch.ones(program.types[i.pending].shape).to(program.types[i.pending].dtype)
                continue
            if isinstance(i, Wait):
                values[i.output] = values[i.pending]
                continue
            operands = [_compat.storage_id(values[slot]) for slot in reads(i)]
            for slot, out, predicted in zip(i.outputs, compute(i, values), effect.outputs, strict=True):
                if predicted is None:
                    continue
                assert strides(Lying.of(out)) == strides(predicted.lying), op_name(i.fn)
                if predicted.alias is None:
                    assert _compat.storage_id(out) not in operands, op_name(i.fn)
                    assert out.untyped_storage().nbytes() == predicted.nbytes, op_name(i.fn)
                else:
                    assert _compat.storage_id(out) == operands[predicted.alias], op_name(i.fn)
                if slot >= 0:
                    values[slot] = out


def strides(lying: Lying) -> tuple:
    """Shape, dtype and the strides that matter."""
    return lying.shape, lying.dtype, [s for n, s in zip(lying.shape, lying.stride, strict=True) if n != 1]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("mesh", ["", "dp=2 tp=2"])
def test_the_peak_is_the_allocators(model, mesh):
    program = program_of(model, mesh)
    assert memory(program, granularity=1).peak == pytest.approx(measured_peak(program), rel=0.002)


def traced(fn, *args, mesh="", specs=None, donate=()) -> Program:
    return shard(fn, Mesh(mesh), specs or {}, donate=donate, backend="virtual").program(*args)


def test_a_view_shares_and_a_reshape_of_a_permutation_copies():
    x = torch.zeros(16, 32)  # 2048 bytes
    assert memory(traced(lambda x: x.sin().reshape(512).exp(), x)).curve == (4096, 4096, 4096)  # in place
    assert memory(traced(lambda x: x.sin().t().reshape(512).exp(), x)).curve == (4096, 4096, 6144, 4096)


def test_each_buffer_says_what_it_is_for():
    def step(w, x):
        g, _ = grad_and_value(lambda w: (x @ w).sin().sum())(w)
        return w - g

    report = memory(traced(step, torch.zeros(8, 16), torch.zeros(32, 8)))
    kinds = {b.name: b.kind for b in report.buffers}
    assert kinds["w"] == kinds["x"] == "inputs"
    assert kinds["aten.sub.Tensor"] == "outputs"
    assert kinds["aten.mm.default"] == "temporary"  # its cosine takes its place
    assert [sum(parts) for parts in zip(*report.by_kind.values(), strict=True)] == list(report.curve)
    assert sum(b.bytes for b in report.at_peak) == report.peak == max(report.curve)
    assert "peak" in str(report)


def test_a_donated_input_is_written():
    x = torch.zeros(64, 64)  # 16 kB

    def fn(x):
        return x.sin().cos()

    assert memory(traced(fn, x)).curve == (32768, 32768)
    assert memory(traced(fn, x, donate=("x",))).curve == (16384, 16384)  # all of it in place


@pytest.mark.parametrize(("n", "copies"), [(2, 1), (4, 2)])
def test_gloo_gathers_small_shards_of_many_through_a_copy(n, copies):
    x = torch.zeros(64, 64)  # 16384 bytes gathered
    program = traced(lambda x: constrain(x, "a b").sum(), x, mesh=f"tp={n}", specs={"x": "(tp a) b"})
    report = memory(program)
    launch = next(n for n, i in enumerate(program.instructions) if isinstance(i, Launch))
    assert report.curve[launch] == 16384 // n + copies * 16384
    assert report.by_kind["communication"][launch] == copies * 16384


def test_allocations_are_rounded_up():
    program = traced(lambda x: x.sin(), torch.zeros(3))
    assert memory(program).curve == (128,)
    assert memory(program, granularity=1).curve == (24,)
    assert memory(program, granularity=512).curve == (1024,)


def test_the_picture_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    memory(program_of("llama", "dp=2 tp=2")).plot(str(tmp_path / "memory.png"))
    assert (tmp_path / "memory.png").stat().st_size > 1000


def test_the_peak_of_a_medium_model_is_within_a_hundredth():
    for donate in ((), ("params",)):
        program = sgd_step(Llama(MEDIUM), donate=donate, mesh="dp=2 tp=2", specs=ZERO_TP, batch=(8, 64))
        assert memory(program).peak == pytest.approx(measured_peak(program), rel=0.01)
