"""The tables of grids are those that a person would write by DESIGN's layouts, and say what they cannot do."""

import pytest

from megalith.sharding import Mesh
from megalith.sharding.grammar import parse_stored_used
from megalith.sharding.recipes import data_parallel, grid_2d, grid_3d, grid_25d, specs_for, tensor_parallel, zero

LLAMA = {
    "model.embed_tokens.weight": (96, 8),
    "model.layers.0.input_layernorm.weight": (8,),
    "model.layers.0.self_attn.q_proj.weight": (16, 8),
    "model.layers.0.self_attn.q_norm.weight": (4,),
    "model.layers.0.self_attn.k_proj.weight": (8, 8),
    "model.layers.0.self_attn.o_proj.weight": (8, 16),
    "lm_head.weight": (96, 8),
}
GPT2 = {
    "h.0.attn.c_attn.weight": (8, 24),
    "h.0.attn.c_attn.bias": (24,),
    "h.0.attn.c_proj.weight": (8, 8),
    "h.0.attn.c_proj.bias": (8,),
    "wpe.weight": (16, 8),
}
BATCH = {"input_ids": (4, 16), "labels": (4, 16), "scale": ()}


def lines(text):
    return [line.split(maxsplit=1) for line in text.strip().splitlines()]


def test_a_llama_in_3d():
    assert lines(str(specs_for(LLAMA, BATCH, grid_3d()))) == lines("""
        model.embed_tokens.weight               (j vocab) (k i embed) -> (j vocab) (k embed)
        model.layers.*.input_layernorm.weight   (k d0)
        model.layers.*.self_attn.q_proj.weight  (j heads) (k i embed) -> (j heads) (k embed)
        model.layers.*.self_attn.q_norm.weight  d0
        model.layers.*.self_attn.k_proj.weight  (j kv_heads) (k i embed) -> (j kv_heads) (k embed)
        model.layers.*.self_attn.o_proj.weight  (k embed) (j i heads) -> (k embed) (j heads)
        lm_head.weight                          (j vocab) (k i embed) -> (j vocab) (k embed)
        input_ids                               (i j d0) d1
        labels                                  (i j d0) d1
        scale                                   ...
        model.embed_tokens                      (i j batch) ... (k embed)
        model.layers.*.self_attn.q_proj         (i k batch) ... (j heads)
        model.layers.*.self_attn.k_proj         (i k batch) ... (j kv_heads)
        model.layers.*.self_attn.o_proj         (i j batch) ... (k embed)
        lm_head                                 (i k batch) ... (j vocab)
    """)


def test_transposed_and_fused_matrices_in_25d():
    assert lines(str(specs_for(GPT2, None, grid_25d("d", "r", "c")))) == lines("""
        h.*.attn.c_attn.weight  (r embed) (3 c heads) -> embed (3 c heads)
        h.*.attn.c_attn.bias    (3 c heads)
        h.*.attn.c_proj.weight  (r heads) (c embed) -> heads (c embed)
        h.*.attn.c_proj.bias    (c embed)
        wpe.weight              d0 (c d1)
        h.*.attn.c_attn         (d r batch) ... (3 c heads)
        h.*.attn.c_proj         (d r batch) ... (c embed)
    """)


def test_data_parallelism_and_zero_lie_around_a_grid():
    table = specs_for(LLAMA, BATCH, data_parallel(), grid_2d(), zero(3))
    assert table["model.layers.*.self_attn.q_proj.weight"] == "(col dp heads) (row embed) -> (col heads) embed"
    assert table["input_ids"] == "(dp row d0) d1"
    assert table["model.embed_tokens"] == "(dp row batch) ... (col embed)"


@pytest.mark.parametrize(
    ("mesh", "recipe"),
    [("row=2 col=2", grid_2d()), ("dep=2 row=2 col=2", grid_25d()), ("i=2 j=2 k=2", grid_3d())],
)
def test_no_rank_holds_a_matrix_that_another_holds_too(mesh, recipe):
    """Each rank rests on its share; only `dep` holds replicas. Elsewhere p ranks have 1/p of each matrix."""
    mesh = Mesh(mesh)
    share = 8 if "k" in mesh.sizes else 4
    for name, leaf in specs_for(LLAMA, None, recipe).params.items():
        if len(leaf.shape) == 2:
            stored, _ = parse_stored_used(leaf.pattern, leaf.shape, mesh, {})
            rows, columns = stored.local_shape(0)
            assert rows * columns * share == leaf.shape[0] * leaf.shape[1], name


@pytest.mark.parametrize(
    ("kind", "axes", "grid"),
    [("2d", "row col", grid_2d()), ("2.5d", "dep row col", grid_25d()), ("3d", "i j k", grid_3d())],
)
def test_kinds_of_tensor_parallelism_are_grids(kind, axes, grid):
    assert dict(specs_for(LLAMA, BATCH, tensor_parallel(axes, kind))) == dict(specs_for(LLAMA, BATCH, grid))


def test_a_wrong_number_of_axes_is_an_error_that_says_which():
    with pytest.raises(ValueError, match=r"tensor_parallel\('tp', kind='2.5d'\): this kind has 3 axes.*'dep row col'"):
        tensor_parallel("tp", "2.5d")


def test_a_grid_after_zero_is_an_error():
    with pytest.raises(ValueError, match=r"'model.embed_tokens.weight' is split at rest already.*apply zero last"):
        specs_for(LLAMA, BATCH, zero(3), grid_2d())
