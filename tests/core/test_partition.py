"""The collectives of well-known parallelisms, counted, and their bytes against the closed forms."""

import functools

import pytest
import torch
import torch.nn.functional as F
from oracle import close, counts, randn, same_on_mesh

from megalith.core import constrain, grad_and_value, shard
from megalith.core.lower import lower
from megalith.models.gpt import GPT, GPTConfig
from megalith.models.llama import Llama, LlamaConfig
from megalith.sharding import Mesh

TP = {
    "*.[qkv]_proj.weight": "(tp o) i",
    "*.o_proj.weight": "o (tp i)",
    "*.gate_proj.weight": "(tp o) i",
    "*.up_proj.weight": "(tp o) i",
    "*.down_proj.weight": "o (tp i)",
}
VOCAB = {"*embed_tokens.weight": "(tp v) e", "*lm_head.weight": "(tp v) e"}
DP = {"ids": "(dp b) s", "labels": "(dp b) s"}
LAYERS, BATCH, SEQ, DIM, WORDS = 2, 4, 8, 32, 64
NORMS = 2 * LAYERS + 1
TENSORS = 9 * LAYERS + 3


def llama():
    return Llama(LlamaConfig(vocab=WORDS, dim=DIM, hidden=48, n_layers=LAYERS, n_heads=4, n_kv_heads=2)).double()


def gradients(model):
    """A function of parameters, token ids and labels, of a model or of one that is sharded."""

    def step(params, ids, labels):
        def loss(params):
            logits = torch.func.functional_call(model, params, (ids,))
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

        return grad_and_value(loss)(params)

    return step


class Run:
    """A model's gradients on a mesh, exact; `forward` and so on are counts of collectives before any pass."""

    def __init__(self, mesh, specs, model=None):
        torch.manual_seed(0)
        model = model or llama()
        params = {name: p.detach() for name, p in model.named_parameters()}
        ids, labels = torch.randint(0, WORDS, (2, BATCH, SEQ))
        step = gradients(model)
        self.sharded = shard(step, Mesh(mesh), specs, backend="virtual")
        shards = self.sharded.place(params, ids, labels)
        output = self.sharded(*shards)
        close(self.sharded.gather_output(output, *shards), step(params, ids, labels))
        self.program = lower(self.sharded.compiled(*shards).partition, 0)
        self.forward, self.backward, self.update = (counts(self.program, p) for p in ("forward", "backward", "update"))

    def told(self):
        """The collectives, for a failing test."""
        return "\n".join(
            f"{c.origin.phase} {c.kind} {c.axes} {c.origin.module}: {c.source} -> {c.target}; {c.cause}"
            for c in self.program.collectives
        )


@functools.cache
def _run(mesh, specs):
    return Run(mesh, dict(specs))


def run_llama(mesh, specs):
    return _run(mesh, tuple(specs.items()))


# --- models -----------------------------------------------------------------------------------------


def test_megatron_reduces_twice_a_layer_and_direction():
    run = run_llama("tp=2", TP)
    assert run.forward == {"all_reduce tp": 2 * LAYERS}
    assert run.backward == {"all_reduce tp": 2 * LAYERS}  # the gradients of q, k and v are summed before
    assert run.update == {}


def test_the_partial_gradients_of_q_k_and_v_are_reduced_once():
    run = run_llama("tp=2", TP)
    activation = BATCH * SEQ * DIM * 8
    sizes = [c.bytes_received for c in run.program.collectives]
    assert sizes == [activation] * (4 * LAYERS)  # of n = 2 ranks: 2 (n - 1) / n


def test_a_sharded_vocabulary_gathers_no_logits():
    run = run_llama("tp=2", TP | VOCAB)
    # the embedding; the largest logit, the sum of exponentials and the label's logit
    assert run.forward == {"all_reduce tp": 2 * LAYERS + 1 + 3}
    assert run.backward == {"all_reduce tp": 2 * LAYERS + 1}
    assert run.update == {}
    logits = BATCH * SEQ * WORDS * 8
    assert max(c.bytes_received for c in run.program.collectives) < logits


def test_data_parallelism_reduces_each_gradient_once():
    run = run_llama("dp=4", DP)
    assert run.forward == {"all_reduce dp": 1}  # how many labels there are
    assert run.backward == {}
    assert run.update == {"all_reduce dp": TENSORS + 1}  # and the loss
    assert counts(run.sharded.program(*whole())) == {"all_reduce dp": 2}  # the small ones travel together


def whole():
    model = llama()
    ids = torch.zeros(BATCH, SEQ, dtype=torch.int64)
    return {name: p.detach() for name, p in model.named_parameters()}, ids, ids


def test_data_and_tensor_parallelism_are_the_sum_of_both():
    run = run_llama("dp=2 tp=2", TP | VOCAB | DP)
    assert run.forward == {"all_reduce tp": 2 * LAYERS + 4, "all_reduce dp": 1}
    assert run.backward == {"all_reduce tp": 2 * LAYERS + 1}
    assert run.update == {"all_reduce dp": TENSORS + 1}


def test_zero_3_gathers_a_parameter_once_a_phase_and_scatters_its_gradient_once():
    run = run_llama("dp=2", {"params.*": "(dp o) ... -> o ..."} | DP)
    assert run.forward == {"all_gather dp": TENSORS, "all_reduce dp": 1}
    assert run.backward == {"all_gather dp": TENSORS - 1}  # the embedding's backward does not read it
    assert run.update == {"reduce_scatter dp": TENSORS, "all_reduce dp": 1}


def test_zero_3_moves_three_times_the_parameters():
    model = llama()
    run = run_llama("dp=2", {"params.*": "(dp o) ... -> o ..."} | DP)
    nbytes = sum(p.numel() * 8 for p in model.parameters())
    embedding = WORDS * DIM * 8  # not read in the backward
    moved = sum(c.bytes_received for c in run.program.collectives if c.source.shape)
    assert moved == (3 * nbytes - embedding) // 2  # a rank of n receives (n - 1) / n


def test_zero_3_over_tensor_parallelism_gathers_only_the_storage_axis():
    specs = TP | VOCAB
    run = run_llama("dp=2 tp=2", {k: f"{v.replace('(tp ', '(tp dp ')} -> {v}" for k, v in specs.items()} | DP)
    stored = TENSORS - NORMS
    assert run.forward == {"all_gather dp": stored, "all_reduce tp": 2 * LAYERS + 4, "all_reduce dp": 1}
    assert run.backward == {"all_gather dp": stored - 1, "all_reduce tp": 2 * LAYERS + 1}
    assert run.update == {"reduce_scatter dp": stored, "all_reduce dp": NORMS + 1}


def test_a_sharded_gradient_is_scattered():
    run = run_llama("dp=2", {"params.*": "...", "params.*:grad": "(dp o) ..."} | DP)
    assert run.backward == {}
    assert run.update == {"reduce_scatter dp": TENSORS, "all_reduce dp": 1}


def test_sequence_parallelism_follows_from_one_anchor():
    run = run_llama("tp=2", TP | VOCAB | {"model.embed_tokens": "b (tp s) e"})
    assert run.forward == {"reduce_scatter tp": 2 * LAYERS + 1, "all_gather tp": 2 * LAYERS + 1, "all_reduce tp": 3}
    assert run.update == {"all_reduce tp": NORMS}


def gpt():
    return GPT(GPTConfig(vocab=WORDS, positions=SEQ, dim=DIM, n_layers=LAYERS, n_heads=4)).double()


FUSED = {
    "*.qkv_proj.weight": "(3 tp o) i",
    "*.qkv_proj.bias": "(3 tp o)",
    "*.o_proj.weight": "o (tp i)",
    "*.up_proj.weight": "(tp o) i",
    "*.up_proj.bias": "(tp o)",
    "*.down_proj.weight": "o (tp i)",
    "*embed_tokens.weight": "(tp v) e",
}


def test_a_fused_projection_is_cut_in_each_of_its_parts():
    run = Run("tp=2", FUSED, gpt())
    assert run.forward == {"all_reduce tp": 2 * LAYERS + 4}
    assert run.backward == {"all_reduce tp": 2 * LAYERS + 1}
    assert run.update == {}


GQA = TP | {"*.q_proj.weight": "(tp o) i", "*.[kv]_proj.weight": "(kv o) i"}


def test_fewer_key_value_heads_than_ranks_move_no_head():
    run = run_llama("tp=(kv=2 rep=2)", GQA)
    assert run.forward == {"all_reduce kv rep": 2 * LAYERS}
    assert {name.split()[0] for name in counts(run.program)} == {"all_reduce"}


# --- one matrix product -----------------------------------------------------------------------------

GRIDS = {
    "2D": ("row={q} col={q}", "(row b) (col e)", "(row e) (col f)", "(row b) (col f)"),
    "2.5D": ("dep=2 row={q} col={q}", "(dep row b) (col e)", "(row e) (col f)", "(dep row b) (col f)"),
    "3D": ("i={q} j={q} k={q}", "(i j b) (k e)", "(k i e) (j f)", "(i k b) (j f)"),
}
PRODUCTS = {  # which two operands, and what they give
    "y": (0, 1, 2, lambda x, w: x @ w),
    "dx": (2, 1, 0, lambda dy, w: dy @ w.T),
    "dw": (0, 2, 1, lambda x, dy: x.T @ dy),
}
VOLUMES = {  # elements that a rank receives, n = 64, q = 4
    "2D": {"y": 1536, "dx": 1536, "dw": 1536},
    "2.5D": {"y": 1152, "dx": 1152, "dw": 1152 + 256},  # three products of (q-1)/q^2 (be/d + ef); dW over depth
    "3D": {"y": 576, "dx": 576, "dw": 576},
}


def product(grid, which, q):
    mesh, *layouts = GRIDS[grid]
    first, second, out, fn = PRODUCTS[which]
    specs = {"a": layouts[first], "b": layouts[second], "output": layouts[out]}
    return (lambda a, b: fn(a, b)), mesh.format(q=q), specs


@pytest.mark.parametrize("which", PRODUCTS)
@pytest.mark.parametrize("grid", GRIDS)
def test_a_product_on_a_grid_is_exact(grid, which):
    fn, mesh, specs = product(grid, which, 2)
    same_on_mesh(fn, randn(16, 16), randn(16, 16), mesh=mesh, specs=specs)


@pytest.mark.parametrize("grid, which", [(g, w) for g in GRIDS for w in PRODUCTS])
def test_a_product_on_a_grid_moves_the_closed_form(grid, which):
    fn, mesh, specs = product(grid, which, 4)
    program = shard(fn, Mesh(mesh), specs, backend="virtual").program(randn(64, 64), randn(64, 64))
    told = [(c.kind, c.axes, str(c.source), str(c.target), c.bytes_received // 8) for c in program.collectives]
    assert program.bytes_received // 8 == VOLUMES[grid][which], told


@pytest.mark.parametrize("grid", GRIDS)
def test_the_gradients_of_a_product_on_a_grid_are_exact(grid):
    mesh, x, w, y = GRIDS[grid]

    def step(params, dy):
        return grad_and_value(lambda p: (constrain(p["x"] @ p["w"], y) * dy).sum())(params)

    specs = {"params.x": x, "params.w": w, "dy": y}
    same_on_mesh(step, {"x": randn(16, 16), "w": randn(16, 16)}, randn(16, 16), mesh=mesh.format(q=2), specs=specs)


# --- single rules -----------------------------------------------------------------------------------


def moves(fn, mesh, specs, *args):
    return counts(same_on_mesh(fn, *args, mesh=mesh, specs=specs).program(*args))


def test_a_partial_value_with_several_users_is_reduced_once():
    def fn(x, w):
        y = x @ w
        return y.sin() + y.cos() * y

    assert moves(fn, "tp=2", {"x": "b (tp i)", "w": "(tp i) o"}, randn(4, 6), randn(6, 8)) == {"all_reduce tp": 1}


def test_partial_sums_are_added_before_they_are_reduced():
    def fn(x, w, v, r):
        return (r + x @ w) + x @ v + (x * 2) @ w

    args = randn(4, 6), randn(6, 8), randn(6, 8), randn(4, 8)
    assert moves(fn, "tp=2", {"x": "b (tp i)", "w": "(tp i) o", "v": "(tp i) o"}, *args) == {"all_reduce tp": 1}


def test_a_parameter_stays_and_the_activation_comes():
    def fn(params, x):
        return x @ params["w"]

    sharded = same_on_mesh(
        fn, {"w": randn(6, 8)}, randn(64, 6), mesh="tp=2", specs={"params.w": "i (tp o)", "x": "(tp b) i"}
    )
    (launch,) = sharded.program({"w": randn(6, 8)}, randn(64, 6)).collectives
    assert (launch.kind, launch.source.shape) == ("all_gather", (64, 6))


def test_sequence_parallelism_gathers_each_cotangent_and_each_saved_activation_once():
    """A block saves its norms' outputs as shards, and gathers them again for weights' gradients, as Megatron does."""
    run = Run("tp=2", TP | VOCAB | {"model.embed_tokens": "b (tp s) e"})
    cotangents, saved = 2 * LAYERS + 1, 2 * LAYERS
    assert run.backward == {"reduce_scatter tp": 2 * LAYERS + 1, "all_gather tp": cotangents + saved}, run.told()


def test_fewer_key_value_heads_than_ranks_reduce_each_gradient_once():
    run = Run("tp=(kv=2 rep=2)", GQA)
    wanted = {"all_reduce kv rep": 2 * LAYERS, "all_reduce rep": 2 * LAYERS}  # activations; k and v of each layer
    assert {**run.backward, **run.update} == wanted, run.told()
