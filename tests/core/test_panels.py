"""Products in panels give what whole ones give, with as many bytes and a lower peak."""

from functools import lru_cache

import pytest
import torch
from cases import Bound, error, next_token_loss, tokens
from oracle import close

from megalith.core import grad_and_value, shard
from megalith.core.backends.backend import PerRank, Virtual
from megalith.core.lower import lower
from megalith.core.memory import memory
from megalith.core.passes.panels import panels
from megalith.models.huggingface import functional
from megalith.models.llama import Llama, LlamaConfig
from megalith.sharding import Mesh
from megalith.sharding.recipes import specs_for, tensor_parallel, zero

GRIDS = {
    "2d": ("row=2 col=2", (tensor_parallel("row col", "2d"),)),
    "4x2": ("row=4 col=2", (tensor_parallel("row col", "2d"),)),
    "2.5d": ("dep=2 row=2 col=2", (tensor_parallel("dep row col", "2.5d"),)),
    "3d": ("i=2 j=2 k=2", (tensor_parallel("i j k", "3d"),)),
    "zero3": ("dp=2", (zero(3),)),
}


class Case:
    """A Llama's gradients as programs, as lowered, and inputs for them."""

    def __init__(self, grid):
        mesh, recipes = GRIDS[grid]
        torch.manual_seed(0)
        model = Llama(LlamaConfig(vocab=32, dim=32, hidden=48, n_layers=2, n_heads=4, n_kv_heads=4, init_std=0.2))
        fn, params = functional(model.double())
        batch = tokens(32, 8, 6)

        def step(params, batch):
            return grad_and_value(lambda p, b: next_token_loss(Bound(fn, p), b))(params, batch)

        self.sharded = shard(step, Mesh(mesh), specs_for(params, batch, *recipes), backend="virtual")
        placed = self.sharded.place(params, batch)
        self.inputs = torch.utils._pytree.tree_leaves(placed)
        self.backend = Virtual(Mesh(mesh))
        partition = self.sharded.compiled(*placed).partition
        self.plain = {rank: lower(partition, rank) for rank in self.backend.ranks}

    def run(self, programs):
        inputs = [PerRank(tuple(s.clone() for s in x.shards)) for x in self.inputs]
        return [s for x in self.backend.load(programs)(inputs) for s in x.shards]

    def in_panels(self, n):
        return {rank: panels(program, n) for rank, program in self.plain.items()}


case = lru_cache(Case)


@pytest.mark.parametrize(("grid", "n"), [*((grid, 3) for grid in GRIDS), ("2d", 64)])
def test_panels_change_nothing_but_rounding(grid, n):
    close(case(grid).run(case(grid).in_panels(n)), case(grid).run(case(grid).plain), 1e-12)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("grid", GRIDS)
def test_panels_move_as_many_bytes(grid, n):
    plain, cut = case(grid).plain, case(grid).in_panels(n)
    for rank in plain:
        assert cut[rank].bytes_received == plain[rank].bytes_received
        assert len(cut[rank].collectives) > len(plain[rank].collectives)
    assert len({program.digest for program in cut.values()}) == 1


def test_every_gather_that_products_alone_read_comes_in_panels():
    """In 2D what stays whole is the table of the embedding, and what the last layer keeps for the backward."""
    whole = [c for c in case("2d").in_panels(3)[0].collectives if c.kind == "all_gather" and "panels" not in c.cause]
    assert {c.origin.module for c in whole} == {"params.model.embed_tokens.weight", "lm_head", "model.embed_tokens"}


# --- one product ------------------------------------------------------------------------------------------------------


def product(n, m=512, k=1024, o=256):
    """A product in 2D, x over `col` and w over `row` of what is contracted, on one rank before other passes."""
    specs = {"x": "(row m) (col k)", "w": "(row k) (col o)"}
    run = shard(lambda x, w: x @ w, Mesh("row=2 col=2"), specs, backend="count")
    x, w = torch.empty(m, k, device="meta"), torch.empty(k, o, device="meta")
    return panels(lower(run._for_whole((x, w), {}).partition, 0), n)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_the_peak_falls_by_what_was_gathered(n):
    """To a panel of it; but the sum of the panels is there from the first on."""
    gathered, out = 4 * (512 // 2 * 1024 + 1024 * 256 // 2), 4 * (512 // 2 * 256 // 2)
    whole, cut = memory(product(1)).peak, memory(product(n)).peak
    assert whole - cut >= gathered * (n - 1) / n - out


def test_one_product_is_gathered_twice_n_times():
    whole, cut = product(1), product(4)
    assert [c.axes for c in whole.collectives] == [("col",), ("row",)]
    assert [c.axes for c in cut.collectives] == [("col",), ("row",)] * 4
    assert {c.bytes_received * 4 for c in cut.collectives} == {c.bytes_received for c in whole.collectives}


def test_no_panel_is_an_error():
    with pytest.raises(ValueError, match="panels=0: a product has at least one panel; write 1"):
        product(0)


# --- whole models -----------------------------------------------------------------------------------------------------


@lru_cache
def large(n):
    """A Llama of meta tensors in 2D, with all passes."""
    with torch.device("meta"):
        model = Llama(LlamaConfig(vocab=512, dim=4096, hidden=16384, n_layers=2, n_heads=32, n_kv_heads=32))
    fn, params = functional(model)
    batch = {name: torch.empty(2, 64, dtype=torch.long, device="meta") for name in ("input_ids", "labels")}

    def step(params, batch):
        return grad_and_value(lambda p, b: next_token_loss(Bound(fn, p), b))(params, batch)

    mesh, recipes = GRIDS["2d"]
    run = shard(step, Mesh(mesh), specs_for(params, batch, *recipes), backend="count", panels=n)
    return run.program(params, batch)


def test_a_model_in_panels_has_a_lower_peak_and_as_many_bytes():
    whole, cut = large(1), large(4)
    assert cut.bytes_received == whole.bytes_received
    gathered = 3 * 4096 * 16384 // 2 * 4  # what a layer's MLP gathers over rows
    assert memory(whole).peak - memory(cut).peak >= gathered / 2


def on_a_rank(rank):
    """How far loss and gradients of products in panels are from those of whole ones, with all passes."""
    fn, params = functional(Llama(LlamaConfig(vocab=32, dim=32, hidden=48, n_layers=2, n_heads=4)).double())
    batch = tokens(32, 4, 6)

    def step(params, batch):
        return grad_and_value(lambda p, b: next_token_loss(Bound(fn, p), b))(params, batch)

    mesh, recipes = GRIDS["2d"]
    specs = specs_for(params, batch, *recipes)
    grads, loss = shard(step, Mesh(mesh), specs, backend="distributed", panels=2).whole(params, batch)
    expected, value = step(params, batch)
    return max([error(loss, value), *(error(grads[name], expected[name]) for name in expected)])


def test_panels_on_four_processes_give_what_one_device_gives(ranks):
    assert max(ranks.run(on_a_rank, world_size=4, timeout=300)) <= 1e-12
