"""How much memory did a call really take? Read from torch's own record of allocations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["allocation_peak"]


def allocation_peak(fn: Callable[[], Any]) -> tuple[Any, int]:
    """Runs `fn`; gives its result and the most bytes of CPU tensors that were alive above those alive at the start.

    >>> out, peak = allocation_peak(lambda: torch.ones(1000).sum())
    >>> 4000 <= peak < 6000
    True
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = fn()
    alive = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]" and event.device_type() == torch.autograd.DeviceType.CPU:
            alive += event.nbytes()
            peak = max(peak, alive)
    return result, peak
