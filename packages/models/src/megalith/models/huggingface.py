"""How does a Hugging Face model shard, unmodified? As a pure function of its parameters, whose names recipes know.

`megalith.sharding.recipes` writes the spec table: `specs_for(params, batch, tensor_parallel("tp"), zero(3, "dp"))`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megalith.sharding.recipes.names import unknown

__all__ = ["functional", "head_counts", "unmatched"]


def functional(model: nn.Module) -> tuple[Callable[..., Any], dict[str, Tensor]]:
    """A module as a pure function `fn(params, *inputs, **inputs)`, and its trainable parameters.

    Tied parameters appear once, under the first of their names, and stay tied.

    >>> fn, params = functional(nn.Linear(2, 3))
    >>> fn(params, torch.ones(1, 2)).shape, list(params)
    (torch.Size([1, 3]), ['weight', 'bias'])
    """

    def call(params: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        return torch.func.functional_call(model, dict(params), args, kwargs)

    return call, {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def head_counts(config: Any) -> dict[str, int]:
    """A config's attention heads, as `tensor_parallel` takes them: `heads`, and `kv_heads`.

    Raises:
        ValueError: a config that does not say.

    >>> from types import SimpleNamespace
    >>> head_counts(SimpleNamespace(num_attention_heads=9, num_key_value_heads=3))
    {'heads': 9, 'kv_heads': 3}
    """
    heads = getattr(config, "num_attention_heads", None)
    if heads is None:
        raise ValueError(
            f"{type(config).__name__} has no num_attention_heads; pass heads= (and kv_heads=) to tensor_parallel"
        )
    return {"heads": heads, "kv_heads": getattr(config, "num_key_value_heads", None) or heads}


def unmatched(model: nn.Module | Mapping[str, Tensor]) -> list[str]:
    """The parameters that no table of recipes knows; `tensor_parallel` guesses by shapes, or leaves them replicated.

    >>> unmatched({"h.0.q_proj.weight": torch.empty(4, 2), "h.0.mystery.weight": torch.empty(4, 2)})
    ['h.0.mystery.weight']
    """
    named = model.named_parameters() if isinstance(model, nn.Module) else model.items()
    return unknown({name: tuple(tensor.shape) for name, tensor in named})
