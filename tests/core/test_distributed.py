"""A program runs alike in one process and in one a rank; where ranks part ways, all say so, in time, and none hangs."""

import gc
import os
import random
import signal
import time
import traceback
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import RankDied

from megalith.core._compat import pytree
from megalith.core.backends.distributed import CollectiveError, Distributed
from megalith.core.backends.lockstep import gather, scatter
from megalith.core.backends.virtual import run_virtual
from megalith.core.clean import clean
from megalith.core.codegen import compile_program, program_source
from megalith.core.interpret import run_graph
from megalith.core.lower import lower
from megalith.core.program import Compute, Program, Wait
from megalith.core.trace import trace
from megalith.core.transforms import grad_and_value
from megalith.models.llama import Llama, LlamaConfig
from megalith.sharding.graph import Graph, Origin, Ref, TensorType
from megalith.sharding.layout import Digit, Dim, Layout, replicated
from megalith.sharding.mesh import Link, Mesh, MeshError
from megalith.sharding.partition import Input, Move, Partition, Version, partition

aten = torch.ops.aten

# --- programs of transitions only ------------------------------------------------------------------


def moving(rank, transitions, dtypes=None):
    """The program that brings input i from one layout to another, for each pair of layouts."""
    mesh = transitions[0][0].mesh
    dtypes = dtypes or [torch.float64] * len(transitions)
    types = {i: TensorType(a.shape, dtype) for i, ((a, _), dtype) in enumerate(zip(transitions, dtypes, strict=True))}
    graph = Graph(tuple(types), tuple(f"x{i}" for i in types), (), tuple(map(Ref, types)), types)
    moves = tuple(
        Move(Version(i, a), Version(i, b), types[i].dtype.itemsize, Origin(f"layer{i}", f"model.py:{i}"), "a spec")
        for i, (a, b) in enumerate(transitions)
        if a != b
    )
    inputs = tuple(Version(i, a) for i, (a, _) in enumerate(transitions))
    outputs = tuple(Version(i, b) for i, (_, b) in enumerate(transitions))
    return lower(Partition(graph, mesh, inputs, (), moves, outputs, types), rank)


def random_layout(draw, mesh, shape, op):
    """Uneven cuts, local digits, zigzags; axes left over hold terms or replicas."""
    free = draw.sample(mesh.axes, len(mesh.axes))
    dims = []
    for size in shape:
        digits, extent = [], size
        for _ in range(draw.randint(0, len(free))):
            if draw.random() < 0.3:
                k = draw.randint(2, 3)
                extent = max(-(-extent // k), 1)
                digits.append(Digit(None, k, extent))
            axis = free.pop()
            extent = max(-(-extent // mesh.sizes[axis]), 1)
            digits.append(Digit(axis, mesh.sizes[axis], extent, draw.random() < 0.2))
        dims.append(Dim.of(size, tuple(digits)))
    return Layout(mesh, tuple(dims)).with_partial({axis: op for axis in free if op and draw.random() < 0.7})


DTYPES = [torch.float64, torch.float32, torch.int64, torch.bfloat16, torch.bool, torch.int16, torch.complex64]
KINDS = {("all_gather", ""), ("all_to_all", ""), ("exchange", "")} | {
    (kind, op) for kind in ("all_reduce", "reduce_scatter") for op in ("sum", "max", "min")
}


def random_transitions(seed, n):
    draw = random.Random(seed)
    mesh = Mesh(draw.choice(["a=4", "a=2 b=2", "a=2 b=2", "a=2 b=1 c=2"]))
    if seed % 2:  # where bytes are all that counts, small tensors too move by exchange
        mesh = Mesh(mesh.pattern, {axis: Link(bandwidth=1.0, latency=0.0) for axis in mesh.axes})
    transitions, dtypes = [], []
    for _ in range(n):
        op, dtype = draw.choice(["", "sum", "max", "min"]), draw.choice(DTYPES)
        if not op:
            dtype = draw.choice([*DTYPES, *[torch.float8_e4m3fn] * (seed % 2 == 0)])  # no index_copy for float8
        elif op != "sum" and dtype.is_complex:
            dtype = torch.float32
        shape = tuple(draw.choice([0, 1, 2, 3, 5, 8, 12]) for _ in range(draw.randint(0, 3)))
        transitions.append((random_layout(draw, mesh, shape, op), random_layout(draw, mesh, shape, None)))
        dtypes.append(dtype)
    return transitions, dtypes


def local_values(program, rank):
    """Small integers: sums of them are exact in every dtype, so that results are equal to the bit."""
    generator = torch.Generator().manual_seed(rank)
    kinds = [program.types[slot] for slot in program.inputs]
    return [torch.randint(-3, 4, kind.shape, generator=generator).to(kind.dtype) for kind in kinds]


def bits(tensor):
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def moved_as_virtual(rank):
    seen = set()
    for seed in range(12):
        transitions, dtypes = random_transitions(seed, 40)
        programs = [moving(r, transitions, dtypes) for r in range(4)]
        inputs = [local_values(program, r) for r, program in enumerate(programs)]
        runtime = Distributed(programs[0].mesh, timeout=20)
        for _ in range(2):  # the second time, inputs have to be what they were
            got = runtime.run(programs[rank], inputs[rank])
            wanted = run_virtual(programs, inputs)[rank]
            for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
                assert a.shape == b.shape and a.dtype == b.dtype, (seed, i)
                assert torch.equal(bits(a), bits(b)), (seed, i, transitions[i], dtypes[i], a, b)
        seen |= {(launch.kind, launch.op) for launch in programs[rank].collectives}
    return seen


def test_every_collective_gives_what_the_virtual_backend_gives(ranks):
    assert set().union(*ranks.run(moved_as_virtual, world_size=4, timeout=120)) >= KINDS


# --- a model ---------------------------------------------------------------------------------------

TP = {
    "*.[qkv]_proj.weight": "(tp o) i",
    "*.o_proj.weight": "o (tp i)",
    "*.gate_proj.weight": "(tp o) i",
    "*.up_proj.weight": "(tp o) i",
    "*.down_proj.weight": "o (tp i)",
    "*embed_tokens.weight": "(tp v) e",
    "*lm_head.weight": "(tp v) e",
}
DP = {"batch.*": "(dp b) s"}
ZERO = {"params.*norm.weight": "(dp e) -> e", "params.*weight": "(dp o) i -> o i"}
TP_ZERO = {name: f"{to.replace('(tp', '(tp dp')} -> {to}" for name, to in TP.items()}
CASES = {
    "dp=2 tp=2": TP | DP,
    "tp=4": TP,
    "dp=4": DP,
    "dp=4, ZeRO": ZERO | DP,
    "dp=2 tp=2, ZeRO": TP_ZERO | DP,
}


def laid_out(graph, mesh, specs):
    from fnmatch import fnmatch

    inputs = []
    for value, name in zip(graph.inputs, graph.names, strict=True):
        shape = graph.types[value].shape
        stored = used = replicated(shape, mesh)
        pattern = next((to for key, to in specs.items() if fnmatch(name, key)), None)
        if pattern:
            first, _, second = pattern.partition("->")
            stored = Layout.parse(first.strip(), shape, mesh)
            used = Layout.parse(second.strip(), shape, mesh) if second else stored
        inputs.append(Input(stored, used, None, name.startswith("params"), name))
    return inputs


def traced(dtype):
    """Loss and gradients of a small Llama as a graph, and values for its inputs."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab=64, dim=32, hidden=48, n_layers=2, n_heads=4, n_kv_heads=4)
    model = Llama(config).to(dtype)
    params = {name: p.detach() for name, p in model.named_parameters()}
    batch = {"x": torch.randint(0, 64, (8, 16)), "y": torch.randint(0, 64, (8, 16))}

    def loss(params, batch):
        logits = torch.func.functional_call(model, params, (batch["x"],))
        return F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten())

    graph = clean(trace(grad_and_value(loss), (params, batch), names=("params", "batch")).graph)
    return graph, pytree.tree_leaves((params, batch))


def furthest(got, wanted):
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(got, wanted, strict=True))


def model_errors(rank):
    """Per case, the largest relative difference from the virtual backend at fp64, and from one device at fp32."""
    errors = {}
    for dtype in (torch.float64, torch.float32):
        graph, leaves = traced(dtype)
        for case, specs in CASES.items():
            mesh = Mesh(case.partition(",")[0])
            inputs = laid_out(graph, mesh, specs)
            made = partition(graph, mesh, inputs)
            programs = [lower(made, r) for r in range(mesh.size)]
            shards = [scatter(leaf, i.stored) for leaf, i in zip(leaves, inputs, strict=True)]
            got = Distributed(mesh, timeout=30).run(programs[rank], [s[rank] for s in shards])
            if dtype is torch.float64:
                virtual = run_virtual(programs, [[s[r] for s in shards] for r in range(mesh.size)])
                errors[case, "virtual"] = furthest(got, virtual[rank])
                continue
            layouts = programs[rank].output_layouts
            whole = [whole_of(x, layout) for x, layout in zip(got, layouts, strict=True)]
            errors[case, "one device"] = furthest(whole, run_graph(graph, leaves))
    return errors


def whole_of(shard, layout):
    shards = [None] * dist.get_world_size()
    dist.all_gather_object(shards, shard)
    return gather(shards, layout)


def test_a_model_on_four_processes_gives_what_one_device_gives(ranks):
    for errors in ranks.run(model_errors, world_size=4, timeout=300):
        assert {case for case, _ in errors} == set(CASES)
        for (case, against), error in errors.items():
            assert error <= (1e-12 if against == "virtual" else 1e-5), (case, against, error)


# --- ranks that part ways ----------------------------------------------------------------------------


def rows(mesh, axis, n=8):
    return Layout(mesh, (Dim.of(n, (Digit(axis, mesh.sizes[axis], -(-n // mesh.sizes[axis])),)),))


def three_moves(rank, order=(0, 1, 2)):
    """A gather over dp, a sum over tp, a gather over tp; in another order where asked for."""
    mesh = Mesh("dp=2 tp=2")
    whole = replicated((8,), mesh)
    moves = [(rows(mesh, "dp"), whole), (whole.with_partial({"tp": "sum"}), whole), (rows(mesh, "tp"), whole)]
    return moving(rank, [moves[i] for i in order])


def caught(runtime, program, values=None):
    """The error of a run and the seconds until it came."""
    began = time.monotonic()
    try:
        runtime.run(program, values or local_values(program, 0))
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "no error", "", time.monotonic() - began


def meddled(program, at, act):
    """The program with `act()` before its instruction `at`."""

    def meddle(x):
        act()
        return x

    slot = max(program.types) + 1
    body = list(program.instructions)
    body.insert(at, Compute(meddle, (Ref(program.inputs[0]),), {}, (slot,)))
    types = {**program.types, slot: program.types[program.inputs[0]]}
    fields = {name: getattr(program, name) for name in Program.__dataclass_fields__}
    return Program(**{**fields, "instructions": tuple(body), "types": types, "outputs": (*program.outputs, Ref(slot))})


def with_other_programs(rank):
    runtime = Distributed(Mesh("dp=2 tp=2"), timeout=20)
    reordered = three_moves(rank, (0, 2, 1) if rank == 2 else (0, 1, 2))
    shorter = three_moves(rank, (0, 1) if rank in (0, 1) else (0, 1, 2))
    results = [caught(runtime, program) for program in (reordered, shorter)]
    got = runtime.run(three_moves(rank), local_values(three_moves(rank), rank))  # and the ranks may go on
    return [*results, [x.tolist() for x in got]]


def test_other_collectives_on_one_rank_are_an_error_on_every_rank_that_names_the_first(ranks):
    results = ranks.run(with_other_programs, world_size=4)
    for reordered, shorter, _ in results:
        assert reordered[0] == shorter[0] == "DigestMismatch"
        assert reordered[1] == results[0][0][1], "the same message everywhere"
        lines = reordered[1].splitlines()
        assert "collective 1 is the first that differs" in lines[0]
        assert lines[1].strip().startswith("rank 0, 1, 3: all_reduce sum torch.float64 over tp")
        assert lines[2].strip().startswith("rank 2: all_gather  torch.float64 over tp")
        assert "model.py:1" in lines[1] and "in layer1" in lines[1]
        assert "collective 2 is the first" in shorter[1]
        assert "rank 0, 1: none, its program ends after 2" in shorter[1]
        assert "rank 2, 3: all_gather" in shorter[1]
    assert all(isinstance(x, list) for _, _, got in results for x in got)


def killed(rank):
    program = three_moves(rank)
    if rank == 2:
        program = meddled(program, 0, lambda: os.kill(os.getpid(), signal.SIGKILL))
    Distributed(program.mesh, timeout=20).run(program, local_values(program, rank))


def test_a_killed_rank_is_an_error_on_all_others(ranks):
    with pytest.raises(RankDied) as error:
        ranks.run(killed, world_size=4)
    reports = error.value.reports
    assert error.value.rank == 2 and sorted(reports) == [0, 1, 2, 3]
    for rank in (0, 1, 3):
        assert "PeerLost" in reports[rank], reports[rank]
    assert "all_gather over dp (collective 0 of 3: in layer0, forward, at model.py:0" in reports[0]
    assert "its group is ranks 0, 2" in reports[0]


def hung(rank):
    program = three_moves(rank)
    if rank == 1:
        program = meddled(program, 0, lambda: time.sleep(6))
    runtime = Distributed(program.mesh, timeout=2)
    runtime.compile(program)
    return caught(runtime, program, local_values(program, rank))


def test_a_hanging_rank_is_an_error_that_names_the_collective_within_the_deadline(ranks):
    results = ranks.run(hung, world_size=4)
    kind, message, seconds = results[3]  # waits for rank 1
    assert kind == "CollectiveTimeout" and 1.9 < seconds < 40
    assert "all_gather over dp (collective 0 of 3: in layer0, forward, at model.py:0, because: a spec)" in message
    assert "its group is ranks 1, 3" in message and "within 2 s" in message
    for kind, message, seconds in (results[0], results[2]):  # these wait for rank 3 or rank 1 in what follows
        assert kind in ("CollectiveTimeout", "PeerLost") and seconds < 40
        assert "(collective 1 of 3" in message
    assert results[1][0] in ("PeerLost", "CollectiveTimeout"), "the late one finds nobody"


def failing(rank):
    program = three_moves(rank)

    def fail():
        raise ZeroDivisionError("a bug on one rank")

    if rank == 0:
        program = meddled(program, 3, fail)
    return caught(Distributed(program.mesh, timeout=20), program, local_values(program, rank))


def test_an_exception_on_one_rank_is_told_to_all(ranks):
    results = ranks.run(failing, world_size=4)
    assert results[0][0] == "ZeroDivisionError"
    kind, message, seconds = results[1]  # waits for rank 0; ranks 2 and 3 never depend on it
    assert kind == "PeerLost" and seconds < 40
    assert "another rank has failed: all_reduce sum over tp (collective 1 of 3" in message
    assert "rank 0 failed: ZeroDivisionError: a bug on one rank" in message


def astray(rank):
    """Without the handshake, which would have found it: rank 3 leaves the last collective out."""
    program = three_moves(rank, (0, 1) if rank == 3 else (0, 1, 2))
    runtime = Distributed(program.mesh, timeout=3)
    runtime._board.agree = lambda program: None
    return caught(runtime, program, local_values(program, rank))


def test_a_rank_that_leaves_a_collective_out_hangs_nobody(ranks):
    results = ranks.run(astray, world_size=4)
    kinds = {result[0] for result in results[2:]}
    assert kinds & {"CollectiveTimeout", "PeerLost"} and kinds <= {"CollectiveTimeout", "PeerLost", "no error"}
    assert all(seconds < 40 for *_, seconds in results)


def absent(rank):
    runtime = Distributed(Mesh("dp=2"), timeout=2)
    program = moving(rank, [(rows(runtime.mesh, "dp"), replicated((8,), runtime.mesh))])
    if rank == 0:
        return caught(runtime, program)
    time.sleep(4)
    return None


def test_a_rank_that_never_comes_to_the_handshake_is_named(ranks):
    kind, message, seconds = ranks.run(absent, world_size=2)[0]
    assert kind == "CollectiveTimeout" and seconds < 40
    assert "rank 1 has not come to it within 2 s" in message


def mistaken(rank):
    errors = []
    for pattern in ("dp=2 tp=4", "dp=1"):
        with pytest.raises(MeshError) as error:
            Distributed(Mesh(pattern))
        errors.append(str(error.value))
    runtime = Distributed(Mesh("dp=2"), timeout=20)
    layouts = rows(runtime.mesh, "dp"), replicated((8,), runtime.mesh)
    with pytest.raises(ValueError, match=rf"this is rank {rank} .* program is for rank {1 - rank}"):
        runtime.compile(moving(1 - rank, [layouts]))
    program = moving(rank, [layouts])
    with pytest.raises(ValueError, match=r"x0: the program expects the local shard, torch.float64 of shape \(4,\)"):
        runtime.run(program, [torch.zeros(8, dtype=torch.float64)])
    with pytest.raises(ValueError, match="has 1 inputs and was given 0"):
        runtime.run(program, [])
    time.sleep(2.5 * rank)  # longer than a look at what others report: a mistake put right is no failure
    assert runtime.run(program, [torch.full((4,), rank, dtype=torch.float64)])[0].tolist() == [0] * 4 + [1] * 4
    return errors


def test_a_mesh_of_another_size_and_inputs_of_another_shape_are_errors_that_say_what_to_do(ranks):
    for larger, smaller in ranks.run(mistaken, world_size=2):
        assert "has 8 ranks and 2 processes run" in larger
        assert "torchrun --nproc-per-node=8" in larger and "a mesh of 2" in larger
        assert "has 1 ranks and 2 processes run" in smaller


def test_without_a_process_group_the_error_says_how_to_start_one():
    with pytest.raises(MeshError, match="torchrun --nproc-per-node=4"):
        Distributed(Mesh("dp=4"))
    assert issubclass(CollectiveError, RuntimeError)


# --- the generated code --------------------------------------------------------------------------------


def straight(*body, inputs, outputs, types, constants=None):
    """A program on one rank."""
    mesh = Mesh("tp=1")
    layouts = tuple(replicated(types[i].shape, mesh) for i in inputs)
    names = tuple(f"x{i}" for i in inputs)
    return Program(mesh, 0, inputs, names, layouts, constants or {}, body, outputs, (None,) * len(outputs), types)


def f32(*shape):
    return TensorType(shape, torch.float32)


def test_a_slot_is_freed_right_after_its_last_use():
    alive = {}
    seen = []

    def watch(name, x):
        seen.append({n for n, ref in alive.items() if ref() is not None})
        out = x + 1
        alive[name] = weakref.ref(out)
        return out

    steps = [Compute(partial(watch, f"v{i + 1}"), (Ref(i),), {}, (i + 1,)) for i in range(4)]
    program = straight(*steps, inputs=(0,), outputs=(Ref(4),), types={i: f32(3) for i in range(5)})
    assert compile_program(program)([torch.zeros(3)])[0].tolist() == [4.0] * 3
    assert seen == [set(), {"v1"}, {"v2"}, {"v3"}]


def test_inputs_are_kept():
    program = straight(
        Compute(aten.add.Tensor, (Ref(0), 1), {}, (1,)), inputs=(0,), outputs=(Ref(1),), types={0: f32(3), 1: f32(3)}
    )
    run = compile_program(program)
    inputs = [torch.zeros(3)]
    assert run(inputs)[0].tolist() == run(tuple(inputs))[0].tolist() == [1.0] * 3
    assert len(inputs) == 1 and run is compile_program(program)


def test_outputs_of_any_form_come_out():
    constant = torch.arange(3.0)
    norm = Compute(aten.native_layer_norm.default, (Ref(0), [4], None, None, 1e-5), {}, (1, -1, 2))
    split = Compute(aten.split.Tensor, (Ref(0), 1), {}, (3, 4), Origin("layers.0"))
    one = Compute(aten.native_layer_norm.default, (Ref(0), [4], None, None, 1e-5), {}, (-1, 5, -1))
    types = {0: f32(2, 4), 1: f32(2, 4), 2: f32(2, 1), 3: f32(1, 4), 4: f32(1, 4), 5: f32(2, 1), 6: f32(3)}
    outputs = (Ref(1), Ref(2), None, 3, Ref(4), Ref(5), Ref(6), Ref(0))
    program = straight(norm, split, one, inputs=(0,), outputs=outputs, types=types, constants={6: constant})
    x = torch.randn(2, 4)
    got = compile_program(program)([x])
    y, mean, rstd = torch.native_layer_norm(x, [4], None, None, 1e-5)
    wanted = [y, rstd, None, 3, x[1:], mean, constant, x]
    assert all(a.equal(b) if isinstance(b, torch.Tensor) else a == b for a, b in zip(got, wanted, strict=True))
    assert "v4 = split_Tensor(v0, 1)[1]  # layers.0" in program_source(program)


X = Ref(0)
CALLS = {
    "a view of what is not contiguous": (aten.reshape.default, (X, [12]), {}),
    "a slice of a late dim": (aten.slice.Tensor, (X, -1, 1, 9223372036854775807), {}),
    "a slice from the end": (aten.slice.Tensor, (X, 0, -2, -1), {}),
    "a slice in steps": (aten.slice.Tensor, (X, 1, 0, 3, 2), {}),
    "a slice that takes all": (aten.slice.Tensor, (X, 0, 0, 9223372036854775807), {}),
    "a cast": (aten._to_copy.default, (X,), {"dtype": torch.float64}),
    "a copy": (aten._to_copy.default, (X,), {"dtype": torch.float32}),
    "a scalar": (aten.mul.Scalar, (X, 2), {}),
    "a scaled sum": (aten.add.Tensor, (X, X), {"alpha": 2}),
    "a number first": (aten.pow.Scalar, (2.5, X), {}),
    "infinity": (aten.where.ScalarOther, (Ref(1), X, float("-inf")), {}),
    "from nothing": (aten.full.default, ([2, 2], 3), {"dtype": torch.int64}),
    "a tuple of axes": (aten.sum.dim_IntList, (X, [0, 1]), {"dtype": torch.float64}),
    "a list of tensors": (aten.cat.default, ([X, X], 1), {}),
    "indices with holes": (aten.index.Tensor, (X, [None, Ref(2)]), {}),
    "an expansion": (aten.expand.default, (X, [2, -1, 4]), {}),
    "rounding": (aten.div.Tensor_mode, (X, 0.7), {"rounding_mode": "floor"}),
    "a cumulative op": (aten.cumsum.default, (X, 1), {}),
    "in place": (aten.mul_.Tensor, (X, 3.0), {}),
    "an op of no public name": (aten.silu_backward.default, (X, X), {}),
}


@pytest.mark.parametrize("case", CALLS)
def test_the_quick_way_to_call_an_op_is_the_same_call(case):
    fn, args, kwargs = CALLS[case]
    values = [torch.randn(4, 3).t(), torch.rand(3, 4) > 0.5, torch.tensor([2, 0])]
    assert not values[0].is_contiguous()
    types = {0: f32(3, 4), 1: TensorType((3, 4), torch.bool), 2: TensorType((2,), torch.int64), 3: f32(0)}
    program = straight(Compute(fn, args, kwargs, (3,)), inputs=(0, 1, 2), outputs=(Ref(3),), types=types)
    (wanted,) = run_virtual([program], [[v.clone() for v in values]])[0]
    (got,) = compile_program(program)([v.clone() for v in values])
    assert got.dtype == wanted.dtype and got.stride() == wanted.stride()
    assert torch.equal(got, wanted)


def test_no_gradient_is_recorded():
    program = straight(
        Compute(aten.mul.Tensor, (X, X), {}, (1,)), inputs=(0,), outputs=(Ref(1),), types={0: f32(3), 1: f32(3)}
    )
    assert not compile_program(program)([torch.ones(3, requires_grad=True)])[0].requires_grad


def test_a_failing_op_is_quoted_with_its_module():
    body = Compute(aten.mm.default, (X, X), {}, (1,), Origin("layers.3.mlp"))
    program = straight(body, inputs=(0,), outputs=(Ref(1),), types={0: f32(2, 2), 1: f32(2, 2)})
    with pytest.raises(RuntimeError) as error:
        compile_program(program)([torch.ones(2, 3)])
    text = "".join(traceback.format_exception(error.value))
    assert "v1 = mm(v0, v0); del v0  # layers.3.mlp" in text


def test_a_program_lets_go_of_its_code_and_constants():
    constant = torch.ones(3)
    program = straight(
        Compute(aten.add.Tensor, (X, Ref(1)), {}, (2,)),
        inputs=(0,), outputs=(Ref(2),), types={0: f32(3), 1: f32(3), 2: f32(3)}, constants={1: constant},
    )  # fmt: skip
    assert compile_program(program)([torch.ones(3)])[0].tolist() == [2.0] * 3
    watched = weakref.ref(constant)
    del program, constant
    gc.collect()
    assert watched() is None


def test_collectives_need_something_to_carry_them_out():
    program = three_moves(0)
    assert sum(isinstance(i, Wait) for i in program.instructions) == 3
    with pytest.raises(ValueError, match="3 collectives"):
        compile_program(program)
