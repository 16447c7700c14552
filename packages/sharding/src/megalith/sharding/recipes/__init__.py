"""How is a model split over a mesh? Recipes: pure functions that write spec tables, and compose."""

from megalith.sharding.recipes.table import Leaf, Recipe, Specs, specs_for

__all__ = ["Leaf", "Recipe", "Specs", "specs_for"]
