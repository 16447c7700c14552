"""How does a program differentiate itself? `grad_and_value` with torch.func's signature, on autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megalith.core import _compat
from megalith.core._compat import pytree
from megalith.core.markers import like
from megalith.core.trace import current_tracer

__all__ = ["grad", "grad_and_value"]

_open: list[object] = []  # calls of `grad_and_value` whose function runs now


def grad_and_value(
    fn: Callable[..., Any], argnums: int | tuple[int, ...] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """A function that returns the gradients and the value of `fn`, as `torch.func.grad_and_value`.

    It traces what `torch.func` cannot (checkpointing, autograd functions of the old kind, modules that write buffers),
    and the gradient of a parameter has its parameter's layout. A parameter that the value does not depend on has
    a gradient of zeros. Inside of itself and of the transforms of `torch.func` it is torch's own.

    Args:
        fn: a function that returns a scalar, or a pair of a scalar and anything when `has_aux`.
        argnums: which arguments to differentiate.
        has_aux: whether `fn` returns a pair.

    >>> grad_and_value(lambda x: (x * x).sum())(torch.tensor([1.0, 2.0]))
    (tensor([2., 4.]), tensor(5.))
    """

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if _open or _compat.functorch_levels():
            return torch.func.grad_and_value(fn, argnums, has_aux)(*args, **kwargs)
        numbers = (argnums,) if isinstance(argnums, int) else argnums
        originals, spec = pytree.tree_flatten([args[n] for n in numbers])
        wanted = [i for i, x in enumerate(originals) if isinstance(x, torch.Tensor) and x.dtype.is_floating_point]
        leaves = list(originals)
        for i in wanted:
            leaves[i] = originals[i].detach().requires_grad_()
        new_args = list(args)
        for n, value in zip(numbers, pytree.tree_unflatten(leaves, spec), strict=True):
            new_args[n] = value
        tracer = current_tracer()
        if tracer is not None:
            tracer.differentiating += 1
        _open.append(wrapped)
        try:
            with torch.enable_grad():
                out = fn(*new_args, **kwargs)
                value = out[0] if has_aux else out
                if not isinstance(value, torch.Tensor) or value.numel() != 1:
                    raise TypeError(f"grad_and_value needs a function that returns a scalar, got {_shown(value)}")
                found = torch.autograd.grad(
                    value, [leaves[i] for i in wanted], allow_unused=True, materialize_grads=True
                )
        finally:
            _open.pop()
            if tracer is not None:
                tracer.differentiating -= 1
        grads: list[Any] = [None] * len(leaves)
        for i, g in zip(wanted, found, strict=True):
            grads[i] = like(g, originals[i])
        tree = pytree.tree_unflatten(grads, spec)
        detached = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, out)
        return (tree[0] if isinstance(argnums, int) else tuple(tree)), detached

    return wrapped


def _shown(value: Any) -> str:
    return f"one of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


def grad(fn: Callable[..., Any], argnums: int | tuple[int, ...] = 0, has_aux: bool = False) -> Callable[..., Any]:
    """A function that returns the gradients of `fn`, as `torch.func.grad`; see `grad_and_value`."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        grads, out = grad_and_value(fn, argnums, has_aux)(*args, **kwargs)
        return (grads, out[1]) if has_aux else grads

    return wrapped
