"""Ops that work element by element, with broadcasting."""

from __future__ import annotations

from megalith.sharding.graph import Node, TensorType
from megalith.sharding.rule import Rule, register_rule

__all__ = ["POINTWISE", "pointwise"]

POINTWISE = """
abs acos acosh asin asinh atan atanh ceil cos cosh erf erfc erfinv exp exp2 expm1 floor frac gelu gelu_backward
isinf isnan log log10 log1p log2 logical_not logit mish mish_backward neg reciprocal relu round rsqrt sgn sigmoid
sigmoid_backward sign silu silu_backward sin sinh softplus softplus_backward sqrt tan tanh tanh_backward trunc
hardswish hardswish_backward hardsigmoid hardsigmoid_backward elu elu_backward bitwise_not hardtanh hardtanh_backward
leaky_relu leaky_relu_backward threshold threshold_backward clamp clamp.Tensor clamp_min clamp_max clamp_min.Tensor
clamp_max.Tensor nan_to_num _to_copy log_sigmoid_forward log_sigmoid_backward polar complex
add.Tensor add.Scalar sub.Tensor sub.Scalar mul.Tensor mul.Scalar div.Tensor div.Scalar div.Tensor_mode
div.Scalar_mode floor_divide fmod.Tensor fmod.Scalar remainder.Tensor remainder.Scalar pow.Tensor_Scalar
pow.Tensor_Tensor pow.Scalar atan2 maximum minimum fmax fmin copysign.Tensor hypot logaddexp xlogy.Tensor
eq.Tensor eq.Scalar ne.Tensor ne.Scalar lt.Tensor lt.Scalar le.Tensor le.Scalar gt.Tensor gt.Scalar ge.Tensor ge.Scalar
logical_and logical_or logical_xor bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor bitwise_and.Scalar
bitwise_or.Scalar bitwise_xor.Scalar __lshift__.Scalar __rshift__.Scalar bitwise_left_shift.Tensor
bitwise_right_shift.Tensor where.self masked_fill.Scalar masked_fill.Tensor addcmul addcdiv lerp.Scalar lerp.Tensor
fill.Scalar isposinf isneginf signbit lgamma digamma
""".split()

# Through these a partial sum of the first operand passes.
_LINEAR = {"aten.neg.default"}
# Through these it passes when the other operand is a number (a Python scalar or a tensor without dims).
_SCALED = {"aten.mul.Tensor", "aten.mul.Scalar", "aten.div.Tensor", "aten.div.Scalar"}
# Sums of operands that are all partial alike are partial.
_SUMS = {"aten.add.Tensor", "aten.sub.Tensor"}


def pointwise(node: Node, operands: tuple[TensorType, ...], outputs: tuple[TensorType, ...]) -> Rule:
    """Operand dims are aligned from the right; a dim of size one that is broadcast has no factor."""
    shape = outputs[0].shape
    rank = len(shape)

    def factors(t: TensorType) -> tuple[str | None, ...]:
        offset = rank - len(t.shape)
        return tuple(
            None if n == 1 and shape[offset + d] != 1 else f"d{offset + d}" for d, n in enumerate(t.shape)
        )

    linear: tuple[int, ...] = ()
    full = len(operands) > 0 and operands[0].shape == shape
    if node.name in _LINEAR or (node.name in _SCALED and full and all(not t.shape for t in operands[1:])):
        linear = (0,)
    elif node.name in _SUMS and len(operands) == 2 and all(t.shape == shape for t in operands):
        linear = (0, 1)
    return Rule(tuple(map(factors, operands)), tuple(factors(t) for t in outputs), linear=linear)


for _name in POINTWISE:
    register_rule(f"aten.{_name}" if "." in _name else f"aten.{_name}.default", pointwise)


def _add_n(node: Node, operands: tuple[TensorType, ...], outputs: tuple[TensorType, ...]) -> Rule:
    dims = tuple(f"d{i}" for i in range(len(outputs[0].shape)))
    return Rule((dims,) * len(operands), (dims,), linear=tuple(range(len(operands))))


register_rule("add_n", _add_n)


def _adamw(node: Node, operands: tuple[TensorType, ...], outputs: tuple[TensorType, ...]) -> Rule:
    dims = tuple(f"d{i}" for i in range(len(operands[0].shape)))
    return Rule((dims, dims, dims, dims, (), ()), (dims, dims, dims))


register_rule("megalith.adamw.default", _adamw)
