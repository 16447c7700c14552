"""Which ops does core add to torch's? The fused optimizer step, and the transpose of a look-up."""

from __future__ import annotations

from typing import Any

import torch

from megalith.core import _compat

__all__ = ["ADAMW_WRITES", "adamw", "adamw_", "index_sum"]

Tensor = torch.Tensor

_library = torch.library.Library("megalith", "FRAGMENT")
_SCHEMA = "Tensor g, {m} m, {v} v, Tensor step, Tensor lr, float beta1, float beta2, float eps, float weight_decay"
_library.define(
    f"adamw(Tensor p, {_SCHEMA.format(m='Tensor', v='Tensor')}) -> (Tensor, Tensor, Tensor)",
    tags=[torch.Tag.pt2_compliant_tag],
)
_library.define(
    f"adamw_(Tensor(a!) p, {_SCHEMA.format(m='Tensor(b!)', v='Tensor(c!)')}) -> (Tensor(a!), Tensor(b!), Tensor(c!))"
)

_library.define(
    "index_sum(Tensor values, Tensor?[] indices, int[] shape) -> Tensor", tags=[torch.Tag.pt2_compliant_tag]
)


def _index_sum(values: Tensor, indices: Any, shape: Any) -> Tensor:
    """Zeros of a shape, and each value added where its index says: the transpose of `x[indices]`."""
    return torch.ops.aten.index_put_(values.new_zeros(shape), indices, values, True)


def _adamw_inplace(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, step: Tensor, lr: Tensor, b1: float, b2: float, eps: float, wd: float
) -> tuple[Tensor, Tensor, Tensor]:
    if p.numel():
        dense = [t.contiguous() for t in (p, m, v)]  # torch's kernel reads memory in order, whatever the strides
        _compat.fused_adamw(dense[0], g.contiguous(), dense[1], dense[2], step, lr, b1, b2, eps, wd)
        for target, result in zip((p, m, v), dense, strict=True):
            if result is not target:
                target.copy_(result)
    return p, m, v


def _adamw(p: Tensor, g: Tensor, m: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    own = [t.clone(memory_format=torch.contiguous_format) for t in (p, m, v)]
    return _adamw_inplace(own[0], g, own[1], own[2], *rest)


def _adamw_meta(p: Tensor, g: Tensor, m: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(p), torch.empty_like(m), torch.empty_like(v)


for _key in ("CPU", "CUDA"):
    _library.impl("adamw", _adamw, _key)
    _library.impl("adamw_", _adamw_inplace, _key)
    _library.impl("index_sum", _index_sum, _key)
_library.impl("index_sum", lambda values, indices, shape: values.new_empty(shape), "Meta")
_library.impl("adamw", _adamw_meta, "Meta")
_library.impl("adamw_", lambda p, g, m, v, *_: (p, m, v), "Meta")

adamw = torch.ops.megalith.adamw.default
adamw_ = torch.ops.megalith.adamw_.default
ADAMW_WRITES = (0, 2, 3)
"""Of the operands of `adamw_`, those that it writes: the parameter and the two moments, in the order of its outputs."""
index_sum = torch.ops.megalith.index_sum.default
