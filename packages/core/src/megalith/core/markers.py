"""How does a program say where a value should live? By markers: identities that the partition reads."""

from __future__ import annotations

from typing import Any

import torch

from megalith.core.trace import current_tracer
from megalith.sharding.markers import constrain as constrain_op
from megalith.sharding.markers import like as like_op

__all__ = ["constrain", "like"]


class _Marker(torch.autograd.Function):
    """An identity whose backward is the same identity on the cotangent."""

    generate_vmap_rule = False

    @staticmethod
    def forward(x: torch.Tensor, op: Any, extra: Any) -> torch.Tensor:
        tracer = current_tracer()
        if tracer is None:
            return x.view_as(x)
        return tracer.mark(op, x, extra)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.op, ctx.extra = inputs

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return _Marker.apply(g, ctx.op, ctx.extra), None, None

    @staticmethod
    def jvp(ctx: Any, g: torch.Tensor, *_: Any) -> torch.Tensor:
        return g.view_as(g)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor, op: Any, extra: Any) -> Any:
        return x, in_dims[0]


def constrain(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The same tensor, laid out as the pattern says; so is its cotangent. Outside of `shard` it does nothing.

    Args:
        x: any tensor of a program.
        layout: a layout pattern, such as `"(dp b) (tp s) e"`.

    >>> constrain(torch.ones(2, 3), "(dp b) e").shape
    torch.Size([2, 3])
    """
    return _Marker.apply(x, constrain_op, layout)


def like(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The same tensor, laid out as `other`: a gradient as its parameter."""
    tracer = current_tracer()
    return x if tracer is None else tracer.mark(like_op, x, other)
