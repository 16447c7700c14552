"""Which parts of a model repeat? Tracks module calls; a block that repeats is traced once."""

from __future__ import annotations

from typing import Any

import torch

from megalith.core.trace import Tracer

__all__ = ["call_module"]


def call_module(tracer: Tracer, original: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Runs `module(*args, **kwargs)` under a tracer, which learns its path."""
    path = tracer.module_names.get(id(module))
    if path is None:
        for name, child in module.named_modules():
            tracer.module_names.setdefault(id(child), name)
        path = tracer.module_names[id(module)]
    tracer.modules.append(path)
    try:
        return original(module, *args, **kwargs)
    finally:
        tracer.modules.pop()
