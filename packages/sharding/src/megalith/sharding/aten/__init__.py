"""The rules of the ATen ops, by family."""

from megalith.sharding.aten import index, linalg, norm, pointwise, reduce, shape

__all__ = ["index", "linalg", "norm", "pointwise", "reduce", "shape"]
