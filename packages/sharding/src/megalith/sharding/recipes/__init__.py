"""How is a model split over a mesh? Recipes: pure functions that write spec tables, and compose."""

from megalith.sharding.recipes.data import data_parallel
from megalith.sharding.recipes.experts import expert_parallel
from megalith.sharding.recipes.grid import grid_2d, grid_3d, grid_25d
from megalith.sharding.recipes.sequence import sequence_parallel
from megalith.sharding.recipes.table import Leaf, Recipe, Specs, specs_for
from megalith.sharding.recipes.tensor import tensor_parallel
from megalith.sharding.recipes.zero import zero

__all__ = [
    "Leaf",
    "Recipe",
    "Specs",
    "data_parallel",
    "expert_parallel",
    "grid_25d",
    "grid_2d",
    "grid_3d",
    "sequence_parallel",
    "specs_for",
    "tensor_parallel",
    "zero",
]
