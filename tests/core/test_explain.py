"""Each collective of a program is told: what, over which axis, how many bytes, who asked, and what else could be."""

import pytest
import torch
import torch.nn.functional as F

from megalith.core.explain import aligned, amount, explain, merge_names
from megalith.core.shard import shard
from megalith.core.transforms import grad_and_value
from megalith.models.llama import Llama, LlamaConfig
from megalith.sharding import Mesh

MEGATRON = {
    "*.[qkv]_proj.weight": "(tp o) i",
    "*.o_proj.weight": "o (tp i)",
    "*.gate_proj.weight": "(tp o) i",
    "*.up_proj.weight": "(tp o) i",
    "*.down_proj.weight": "o (tp i)",
    "[xy]": "(dp b) s",
}


def megatron(specs, mesh="dp=2 tp=2", n_layers=3, hidden=48):
    model = Llama(LlamaConfig(vocab=64, dim=32, hidden=hidden, n_layers=n_layers, n_heads=4, n_kv_heads=2))
    params = {name: p.detach() for name, p in model.named_parameters()}
    ids = torch.zeros(4, 8, dtype=torch.int64)

    def step(params, x, y):
        def loss(p):
            return F.cross_entropy(torch.func.functional_call(model, p, (x,)).flatten(0, 1), y.flatten())

        return grad_and_value(loss)(params)

    return shard(step, Mesh(mesh), specs, backend="virtual").program(params, ids, ids)


@pytest.fixture(scope="module")
def program():
    return megatron(MEGATRON)


def test_all_gives_a_row_for_each_collective(program):
    rows = explain(program, detail="all").rows
    assert [(r.kind, r.axes, r.bytes) for r in rows] == [
        (c.kind, c.axes, c.bytes_received) for c in program.collectives
    ]
    assert all(r.count == 1 for r in rows)


def test_grouping_merges_layers_and_keeps_the_totals(program):
    everything, grouped = explain(program, detail="all"), explain(program)
    assert len(grouped.rows) < len(everything.rows)
    assert grouped.count == everything.count == len(program.collectives)
    assert grouped.bytes == everything.bytes == program.bytes_received
    assert grouped.by_axis == everything.by_axis
    activation = 2 * 8 * 32 * 4  # bytes of half a batch of 4 x 8 tokens; an all-reduce over two ranks receives as much
    row = next(r for r in grouped.rows if r.phase == "forward" and r.axes == ("tp",))
    assert (row.kind, row.module, row.count, row.bytes) == ("all_reduce", "model.layers.*", 3, 3 * activation)
    assert row.source.startswith("llama.py:")
    assert row.cause == "partial over tp, read by aten.add.Tensor"


def test_an_activation_may_be_kept_sharded(program):
    row = next(r for r in explain(program, detail="all").rows if r.phase == "forward" and r.axes == ("tp",))
    assert row.alternative == 'constrain(x, "(dp d0) (tp d1) d2"): reduce_scatter'
    assert row.alternative_bytes == row.bytes // 2
    assert row.alternative_memory == -row.bytes // 2


def test_the_alternative_that_is_named_is_a_layout(program):
    from megalith.sharding import Layout

    for launch, row in zip(program.collectives, explain(program, detail="all").rows, strict=True):
        if row.alternative.startswith("constrain"):
            pattern = row.alternative.split('"')[1]
            layout = Layout.parse(pattern, launch.source.shape, program.mesh)
            assert set(launch.axes) <= set(layout.axes)


def test_a_gradient_may_be_stored_sharded(program):
    row = next(r for r in explain(program, detail="all").rows if "gradient" in r.cause)
    assert row.kind == "all_reduce"
    assert row.alternative.startswith('":state" and ":grad" sharded over dp (ZeRO): reduce_scatter')
    assert row.alternative_bytes == row.bytes // 2


def test_a_gathered_parameter_may_be_kept_as_used():
    zero = {k: f"{v.replace('(tp ', '(tp dp ')} -> {v}" if k != "[xy]" else v for k, v in MEGATRON.items()}
    explanation = explain(megatron(zero, hidden=4096))  # large enough to travel alone
    row = next(r for r in explanation.rows if r.kind == "all_gather" and "down_proj" in r.cause)
    assert (row.count, row.before, row.after) == (3, "o (tp dp i)", "o (tp i)")
    assert row.module == "params.model.layers.*.mlp.down_proj.weight"
    shard_bytes = 32 * 1024 * 4
    assert row.bytes == row.alternative_memory == 3 * shard_bytes
    assert row.alternative == 'stored as used, "o (tp i)": no gather'
    assert row.alternative_bytes == 0
    scattered = next(r for r in explanation.rows if r.kind == "reduce_scatter" and r.after == "o (tp dp i)")
    assert scattered.alternative == "whole over dp: all_reduce"
    assert scattered.alternative_bytes == 2 * scattered.bytes


def test_what_travels_together_names_all_that_asked_for_it():
    zero = {k: f"{v.replace('(tp ', '(tp dp ')} -> {v}" if k != "[xy]" else v for k, v in MEGATRON.items()}
    causes = [r.cause for r in explain(megatron(zero), detail="all").rows if r.kind == "all_gather"]
    assert all("small ones together" in cause for cause in causes)
    assert all(any(repr(key) in cause for cause in causes) for key in zero if key != "[xy]")


def test_a_gathered_activation_may_change_its_dim():
    def fn(x):
        return x.cumsum(-1)

    program = shard(fn, Mesh("tp=2"), {"x": "b (tp e)"}, backend="virtual").program(torch.zeros(4, 6))
    (row,) = explain(program).rows
    assert row.kind == "all_gather"
    assert row.alternative == 'constrain(x, "(tp d0) d1"), if its reader allows: all_to_all'
    assert row.alternative_bytes == row.bytes // 2


def test_the_table_tells_totals_by_axis_and_what_is_replicated(program):
    names = [f"params.model.layers.{i}.input_layernorm.weight" for i in range(3)]
    text = str(explain(program, replicated=[*names, "params.model.norm.weight"]))
    assert f"{len(program.collectives)} collectives, {amount(program.bytes_received)} received" in text
    n = sum(c.axes == ("tp",) for c in program.collectives)
    nbytes = sum(c.bytes_received for c in program.collectives if c.axes == ("tp",))
    assert f"  tp: {n}, {amount(nbytes)}" in text
    assert "model.layers.* x 3" in text
    assert "params.model.layers.*.input_layernorm.weight, params.model.norm.weight" in text
    columns = [line.index("all_reduce") for line in text.splitlines() if "all_reduce " in line]
    assert len(set(columns)) == 1


def test_a_program_without_collectives_says_so():
    program = shard(lambda x: x.sin(), Mesh("dp=2"), {"x": "(dp b)"}, backend="virtual").program(torch.zeros(4))
    assert str(explain(program)) == "0 collectives, 0 B received by the busiest rank"


def test_an_unknown_detail_is_an_error(program):
    with pytest.raises(ValueError, match="'grouped' or 'all'"):
        explain(program, detail="some")


def test_names_are_merged_where_only_indices_differ():
    assert merge_names(["a.0.b.3", "a.1.b.3", "c"]) == ("a.*.b.3", "c")
    assert merge_names(["a.0.b"]) == ("a.0.b",)
    assert merge_names(["'*.w': 'a b'"]) == ("'*.w': 'a b'",)


def test_a_table_is_aligned():
    assert aligned(("a", "b"), [("xx", 1), ("y", 22)], right=(1,)) == ["a    b", "xx   1", "y   22"]
