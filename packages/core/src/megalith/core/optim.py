"""How do parameters move? Optimizers as pairs of pure functions, `init(params)` and `update(grads, state, params)`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megalith.core import ops
from megalith.core._compat import pytree

__all__ = ["SGD", "AdamW"]

Tensor = torch.Tensor
Tree = Any
Rate = float | Callable[[Tensor], Tensor]

def _rate(rate: Rate, step: Tensor) -> Tensor:
    if callable(rate):
        return rate(step)
    return torch.full((), rate, dtype=torch.float64, device=step.device)


def _device(tree: Tree) -> torch.device:
    """Where a tree's tensors are; a count is on the CPU where they are described only."""
    first = next((x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)), None)
    return torch.device("cpu") if first is None or first.device.type == "meta" else first.device


def _unzip(tree: Tree, like: Tree, n: int) -> tuple[Tree, ...]:
    """A tree of n-tuples as n trees."""
    spec = pytree.tree_structure(like)
    leaves = spec.flatten_up_to(tree)
    return tuple(pytree.tree_unflatten([leaf[i] for leaf in leaves], spec) for i in range(n))


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019), one fused pass over each parameter.

    With the gradient g at step t, and m, v the running means of g and g²:

        p <- p (1 - lr wd) - lr / (1 - beta1^t) m / (sqrt(v / (1 - beta2^t)) + eps)

    Args:
        lr: the learning rate, a number or a function of the step (a float32 tensor without dims that counts from 1).
        betas: decay of the running means.
        eps: added to the denominator.
        weight_decay: the decay of a parameter a step, before `lr`.

    >>> opt = AdamW(lr=0.1, weight_decay=0.0)
    >>> params = {"w": torch.ones(2)}
    >>> new, state = opt.update({"w": torch.ones(2)}, opt.init(params), params)
    >>> new["w"], int(state["step"])
    (tensor([0.9000, 0.9000]), 1)
    """

    lr: Rate = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01

    def init(self, params: Tree) -> Tree:
        """The state before the first step: `step`, `mu` and `nu`, of the parameters' shapes and dtypes."""
        return {
            "step": torch.zeros((), dtype=torch.float32, device=_device(params)),
            "mu": pytree.tree_map(torch.zeros_like, params),
            "nu": pytree.tree_map(torch.zeros_like, params),
        }

    def update(self, grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        """New parameters and new state.

        Args:
            grads: gradients, a tree like `params`.
            state: as `init` gives it.
            params: the parameters.
        """
        step = state["step"] + 1
        lr = _rate(self.lr, step)

        def one(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return ops.adamw(p, g, m, v, step, lr, *self.betas, self.eps, self.weight_decay)

        moved = pytree.tree_map(one, params, grads, state["mu"], state["nu"])
        new, mu, nu = _unzip(moved, params, 3)
        return new, {"step": step, "mu": mu, "nu": nu}


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent, with momentum as in Sutskever et al. (2013) as torch writes it.

        b <- momentum b + g + weight_decay p,      p <- p - lr b

    Args:
        lr: the learning rate, a number or a function of the step (a float32 tensor that counts from 1).
        momentum: the decay of the buffer b; 0 keeps no buffer.
        weight_decay: the L2 penalty.

    >>> opt = SGD(lr=0.5)
    >>> params = {"w": torch.ones(2)}
    >>> opt.update({"w": torch.ones(2)}, opt.init(params), params)[0]
    {'w': tensor([0.5000, 0.5000])}
    """

    lr: Rate = 1e-3
    momentum: float = 0.0
    weight_decay: float = 0.0

    def init(self, params: Tree) -> Tree:
        """The state before the first step."""
        state: dict[str, Tree] = {"step": torch.zeros((), dtype=torch.float32, device=_device(params))}
        if self.momentum:
            state["buffer"] = pytree.tree_map(torch.zeros_like, params)
        return state

    def update(self, grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        """New parameters and new state."""
        step = state["step"] + 1
        lr = _rate(self.lr, step)
        decayed = grads
        if self.weight_decay:
            decayed = pytree.tree_map(lambda g, p: g + p * self.weight_decay, grads, params)
        new_state = {"step": step}
        if self.momentum:
            decayed = pytree.tree_map(lambda b, g: b * self.momentum + g, state["buffer"], decayed)
            new_state["buffer"] = decayed
        moved = pytree.tree_map(lambda p, b: p - (b * lr).to(p.dtype), params, decayed)
        return moved, new_state
