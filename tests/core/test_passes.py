"""A pass changes how a program runs and never, by a single bit, what it gives."""

import functools

import pytest
import torch
import torch.nn.functional as F
from oracle import counts, randn

from megalith.core import SGD, AdamW, grad_and_value, shard
from megalith.core.backends.backend import PerRank, Virtual
from megalith.core.inputs import donated_outputs
from megalith.core.lower import lower
from megalith.core.ops import adamw
from megalith.core.passes import arrival, bounded, bucket, inplace, overlap, prefetch
from megalith.core.program import Compute, Launch, Wait, reads, writes
from megalith.models.llama import Llama, LlamaConfig
from megalith.sharding import Mesh

TP = {
    "*.[qkv]_proj.weight": "(tp o) i",
    "*.o_proj.weight": "o (tp i)",
    "*.gate_proj.weight": "(tp o) i",
    "*.up_proj.weight": "(tp o) i",
    "*.down_proj.weight": "o (tp i)",
    "*embed_tokens.weight": "(tp v) e",
    "*lm_head.weight": "(tp v) e",
}
DP = {"ids": "(dp b) s"}
CASES = {
    "dp": ("dp=2", DP, AdamW(lr=1e-2)),
    "tp": ("tp=2", TP, SGD(lr=1e-2, momentum=0.9)),
    "dp x tp": ("dp=2 tp=2", TP | DP, AdamW(lr=1e-2)),
    "sequence": ("tp=2", TP | {"model.embed_tokens": "b (tp s) e"}, AdamW(lr=1e-2)),
    "zero": ("dp=2", {"*.weight": "(dp o) ... -> o ..."} | DP, AdamW(lr=1e-2)),
}


class Case:
    """A training step's programs, as lowered and before any pass, and inputs for them."""

    def __init__(self, mesh, specs, optimizer):
        torch.manual_seed(0)
        model = Llama(LlamaConfig(vocab=16, dim=8, hidden=12, n_layers=2, n_heads=2, n_kv_heads=2)).double()
        shards = shard(model, Mesh(mesh), {}, backend="virtual")
        params = {name: p.detach() for name, p in model.named_parameters()}

        def step(params, opt_state, ids):
            def loss(p):
                return F.cross_entropy(shards(p, ids).flatten(0, 1), ids.flatten())

            grads, value = grad_and_value(loss)(params)
            return *optimizer.update(grads, opt_state, params), value

        self.sharded = shard(step, Mesh(mesh), specs, donate=("params", "opt_state"), backend="virtual")
        placed = self.sharded.place(params, optimizer.init(params), torch.randint(0, 16, (4, 6)))
        compiled = self.sharded.compiled(*placed)
        self.inputs = torch.utils._pytree.tree_leaves(placed)
        self.donated, _ = donated_outputs(compiled.traced, compiled.leaves, self.sharded.donate)
        self.passed = compiled.programs
        self.backend = Virtual(Mesh(mesh))
        self.plain = {rank: lower(compiled.partition, rank) for rank in self.backend.ranks}

    def run(self, programs):
        """What all ranks give, on copies of the inputs."""
        inputs = [PerRank(tuple(s.clone() for s in x.shards)) for x in self.inputs]
        return [s for x in self.backend.load(programs)(inputs) for s in x.shards]

    def after(self, *passes):
        programs = self.plain
        for each in passes:
            programs = {rank: each(program) for rank, program in programs.items()}
        return programs


@functools.cache
def case(name):
    return Case(*CASES[name])


def donating(name):
    return lambda program: inplace(program, case(name).donated)


PASSES = {
    "bucket": lambda name: (bucket,),
    "overlap": lambda name: (overlap,),
    "donate": lambda name: (donating(name),),
    "arrival": lambda name: (arrival,),
    "arrival of what is written": lambda name: (donating(name), arrival),
    "all": lambda name: (donating(name), overlap, bucket, arrival, prefetch, bounded),
    "all, otherwise": lambda name: (bucket, donating(name), overlap),
    "prefetch": lambda name: (prefetch,),
    "prefetch of little": lambda name: (overlap, lambda program: prefetch(program, budget=1 << 10)),
    "twice": lambda name: (overlap, bucket, overlap, bucket),
    "tiny buckets": lambda name: (overlap, lambda program: bucket(program, small=1 << 10, limit=1 << 10)),
}


@pytest.mark.parametrize("passes", PASSES)
@pytest.mark.parametrize("name", CASES)
def test_passes_keep_every_bit(name, passes):
    wanted = case(name).run(case(name).plain)
    got = case(name).run(case(name).after(*PASSES[passes](name)))
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_shard_uses_them(name):
    wanted = case(name).run(case(name).plain)
    assert all(torch.equal(a, b) for a, b in zip(case(name).run(case(name).passed), wanted, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_ranks_agree_on_the_order_of_collectives(name):
    for passes in PASSES.values():
        assert len({program.digest for program in case(name).after(*passes(name)).values()}) == 1


# --- overlap ----------------------------------------------------------------------------------------


def positions_of_reads(program):
    found = {}
    for i, instruction in enumerate(program.instructions):
        for slot in reads(instruction):
            found.setdefault(slot, []).append(i)
    return found


def reorders(instruction):
    return isinstance(instruction, Compute) and len(reads(instruction)) == len(instruction.outputs) == 1


def packs(program):
    """For each launch its operand before the ops that pack it, and all these ops, by id; as lowering writes them."""
    users, operands, ops = positions_of_reads(program), {}, set()
    for i, instruction in enumerate(program.instructions):
        if isinstance(instruction, Launch):
            slot, k = instruction.buffer, i - 1
            before = program.instructions[k]
            while reorders(before) and before.outputs == (slot,) and users[slot] == [k + 1]:
                ops.add(id(before))
                (slot,), k = reads(before), k - 1
                before = program.instructions[k]
            operands[instruction.pending] = slot
    return operands, ops


def unpacks(program):
    """For each wait what arrives after the ops that unpack it, and all these ops, by id."""
    users, results, ops = positions_of_reads(program), {}, set()
    for i, instruction in enumerate(program.instructions):
        if isinstance(instruction, Wait):
            slot, k = instruction.output, i + 1
            while users.get(slot) == [k] and reorders(program.instructions[k]):
                ops.add(id(program.instructions[k]))
                (slot,), k = program.instructions[k].outputs, k + 1
            results[instruction.pending] = slot
    return results, ops


@pytest.mark.parametrize("name", CASES)
def test_overlap_only_reorders(name):
    before, after = case(name).plain[0], overlap(case(name).plain[0])
    assert sorted(map(id, before.instructions)) == sorted(map(id, after.instructions))
    assert (after.outputs, after.types, after.inputs) == (before.outputs, before.types, before.inputs)


@pytest.mark.parametrize("name", CASES)
def test_a_reduction_is_launched_as_soon_as_its_operand_is_made(name):
    operands, packing = packs(case(name).plain[0])
    _, unpacking = unpacks(case(name).plain[0])
    instructions = overlap(case(name).plain[0]).instructions
    producer = {slot: i for i, x in enumerate(instructions) for slot in writes(x)}
    for i, launch in enumerate(instructions):
        if isinstance(launch, Launch) and launch.kind in ("all_reduce", "reduce_scatter"):
            made = producer[operands[launch.pending]]
            if isinstance(instructions[made], Compute) and id(instructions[made]) not in unpacking:
                between = instructions[made + 1 : i]
                assert all(isinstance(x, (Launch, Wait)) or id(x) in packing for x in between), launch


@pytest.mark.parametrize("name", CASES)
def test_a_result_is_awaited_right_before_it_is_read(name):
    results, unpacking = unpacks(case(name).plain[0])
    program = overlap(case(name).plain[0])
    readers = positions_of_reads(program)
    for i, wait in enumerate(program.instructions):
        if isinstance(wait, Wait):
            first = min(readers.get(results[wait.pending], [len(program.instructions)]))
            between = program.instructions[i + 1 : first]
            assert all(isinstance(x, Wait) or id(x) in unpacking for x in between), wait


@pytest.mark.parametrize("name", ["dp", "zero"])
def test_gradients_travel_while_the_backward_computes(name):
    program = overlap(case(name).plain[0])
    flying, most = 0, 0
    for instruction in program.instructions:
        flying += isinstance(instruction, Launch) - isinstance(instruction, Wait)
        most = max(most, flying)
    assert most > 5


@pytest.mark.parametrize("name", ["zero", "sequence"])
def test_gathers_are_launched_no_earlier_than_they_were(name):
    """What a gather brings takes memory: as many ops have run before it as before."""

    plain = case(name).plain[0]
    moved = packs(plain)[1] | unpacks(plain)[1]
    computing = {id(x) for x in plain.instructions if isinstance(x, Compute) and id(x) not in moved}

    def ops_before(program):
        n, found = 0, {}
        for instruction in program.instructions:
            if isinstance(instruction, Launch) and instruction.kind == "all_gather":
                found[instruction.pending] = n
            n += id(instruction) in computing
        return found

    before, after = ops_before(plain), ops_before(overlap(plain))
    assert all(after[slot] >= n for slot, n in before.items())


# --- prefetch ---------------------------------------------------------------------------------------


def ahead_of_use(program):
    """The most bytes that are gathered, or on their way, before the first op that reads them is next to run."""
    order = program.instructions
    readers = positions_of_reads(program)
    waits = {i.pending: i for i in order if isinstance(i, Wait)}
    launched = [(n, i) for n, i in enumerate(order) if isinstance(i, Launch) and i.kind == "all_gather"]
    use = {i.pending: readers[waits[i.pending].output][0] for _, i in launched}
    flying = [
        sum(program.types[i.pending].nbytes for n, i in launched if n <= now < use[i.pending])
        for now in range(len(order))
    ]
    return max(flying)


def test_parameters_are_gathered_ahead_of_their_use_within_the_budget():
    plain = overlap(case("zero").plain[0])
    largest = max(plain.types[i.pending].nbytes for i in plain.instructions if isinstance(i, Launch))
    due, *most = (ahead_of_use(overlap(prefetch(plain, n * largest))) for n in (0, 3, 10))  # a whole block is due
    assert due + largest <= most[0] <= due + 3 * largest < most[1] <= due + 10 * largest


def test_gathers_keep_their_order():
    plain = overlap(case("zero").plain[0])

    def gathers(program):
        return [i.pending for i in program.instructions if isinstance(i, Launch) and i.kind == "all_gather"]

    assert gathers(prefetch(plain)) == gathers(plain) and len(gathers(plain)) > 20


# --- bucket -----------------------------------------------------------------------------------------


def all_reduces(program):
    return [c for c in program.collectives if c.kind == "all_reduce"]


@pytest.mark.parametrize("name", ["dp", "dp x tp"])
def test_small_gradients_travel_together(name):
    plain, joined = case(name).plain[0], bucket(overlap(case(name).plain[0]))
    assert counts(joined)["all_reduce dp"] <= 3 < counts(plain)["all_reduce dp"]
    assert joined.bytes_received == plain.bytes_received


def test_a_bucket_has_a_limit():
    plain = overlap(case("dp").plain[0])
    for limit in (512, 2048):
        for launch in all_reduces(bucket(plain, small=limit, limit=limit)):
            nbytes = bucket(plain, small=limit, limit=limit).types[launch.buffer].nbytes
            assert nbytes <= limit or launch in all_reduces(plain)


def test_large_sums_stay_alone():
    plain = case("dp").plain[0]
    assert bucket(plain, small=0) is plain
    small = 600
    large = [c for c in all_reduces(plain) if plain.types[c.buffer].nbytes >= small]
    assert large and all(c in all_reduces(bucket(plain, small=small)) for c in large)


def test_sums_that_wait_for_each_other_are_not_joined():
    def fn(x, w):
        return (((x @ w).sin() @ w.T) @ w).sin()

    specs = {"x": "b (tp i)", "w": "(tp i) o"}
    program = shard(fn, Mesh("tp=2"), specs, backend="virtual").program(randn(4, 6), randn(6, 8))
    assert counts(program)["all_reduce tp"] == 2


def test_sums_of_different_dtypes_and_groups_are_not_joined():
    def fn(a, b, c):
        return a.sum(), b.sum(), c.sum()

    specs = {"a": "(dp b)", "b": "(dp b)", "c": "(tp b)"}
    step = shard(fn, Mesh("dp=2 tp=2"), specs, backend="virtual")
    program = step.program(randn(4), randn(4).float(), randn(4))
    assert len(program.collectives) == 3


# --- arrival ---------------------------------------------------------------------------------------


def test_updates_run_in_the_order_in_which_gradients_are_sent():
    program = arrival(overlap(case("dp").plain[0]))
    order = program.instructions
    maker = {slot: i for i in order for slot in writes(i)}
    sent = {i.pending: position for position, i in enumerate(order) if isinstance(i, Launch)}
    updates = [i for i in order if isinstance(i, Compute) and i.fn is adamw]
    launches = [sent[maker[update.args[1].id].pending] for update in updates]
    assert len(launches) > 10 and launches == sorted(launches)
    assert launches != [sent[maker[u.args[1].id].pending] for u in case("dp").plain[0].instructions if u in updates]


# --- donate -----------------------------------------------------------------------------------------


def in_place(program):
    return [i for i in program.instructions if isinstance(i, Compute) and "_." in str(i.fn)]


@pytest.mark.parametrize("name", ["dp x tp", "zero"])
def test_each_parameter_is_stepped_in_place(name):
    chosen = case(name)
    program = inplace(chosen.plain[0], chosen.donated)
    n_params = sum(name.startswith("params.") for name in program.input_names)
    assert len([i for i in in_place(program) if "adamw_" in str(i.fn)]) == n_params
    assert program.donated == tuple(chosen.donated)


def test_nothing_is_written_that_is_not_donated():
    chosen = case("dp x tp")
    assert not in_place(chosen.plain[0])
    fed = {*chosen.plain[0].inputs, *chosen.plain[0].constants}
    assert not {i.args[0].id for i in in_place(inplace(chosen.plain[0], ()))} & fed
    free = {chosen.plain[0].inputs[i] for i, _ in chosen.donated}
    written = {i.args[0].id for i in in_place(inplace(chosen.plain[0], chosen.donated))}
    made = {slot for i in chosen.plain[0].instructions for slot in writes(i)}
    assert written <= free | made


@pytest.mark.parametrize(
    "fn",
    [
        lambda w, x: (w - x, (w * x).sum()),  # read beside
        lambda w, x: (w - x, w.reshape(-1)),  # a view of the old value comes out
        lambda w, x: (w + w, x),
        lambda w, x: ((w - x) * 2 + x, x),
        lambda w, x: (w - w[0] * x, x),
    ],
)
def test_an_old_value_that_is_read_is_not_overwritten(fn):
    w, x = randn(4), randn(4)
    step = shard(fn, Mesh("tp=2"), {"w": "(tp o)"}, donate="w", backend="virtual")
    got = step.whole(w, x)
    torch.testing.assert_close(got, fn(w, x), rtol=1e-12, atol=1e-12)


def test_nothing_is_written_while_another_operand_lies_in_the_same_memory():
    def shifted(x):
        y = x.cumsum(-1)
        return (y[:, 1:] - y[:, :-1]) * (y[:, 1:] + y[:, :-1])

    x = torch.randn(4, 9, dtype=torch.float64)
    on_mesh = shard(shifted, Mesh("dp=2"), {"x": "(dp b) s"}, backend="virtual").whole(x)
    assert torch.equal(on_mesh, shifted(x))
