"""The rules of the ATen ops, by family."""

from megalith.sharding.aten import experts, index, linalg, norm, pointwise, reduce, shape

__all__ = ["experts", "index", "linalg", "norm", "pointwise", "reduce", "shape"]
