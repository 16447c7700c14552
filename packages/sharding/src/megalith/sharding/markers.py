"""Which nodes of a graph only say where a value should live? Identities that the partition reads and lowering drops."""

from __future__ import annotations

import torch

__all__ = ["add_n", "constrain", "like"]


def constrain(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The value is to have the layout that this pattern gives it."""
    return x


def like(x: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The value is the gradient of `parameter` and is to have the layout of its gradients."""
    return x


def add_n(terms: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The sum of several tensors of one shape, in any order: those that are partial alike may be added first."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total
