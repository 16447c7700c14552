"""The single-device run is the oracle: what a function gives on a mesh is compared with what it gives without."""

from collections import Counter

import torch

from megalith.core import shard
from megalith.core.program import Program
from megalith.core.shard import Sharded
from megalith.sharding import Mesh


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def close(got, wanted, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


def same_on_mesh(fn, *args, mesh: str, specs: dict[str, str] | None = None, **kwargs) -> Sharded:
    """Asserts that the function gives on a mesh what it gives on one device; returns the sharded function."""
    sharded = shard(fn, Mesh(mesh), specs or {}, backend="virtual")
    close(sharded.whole(*args, **kwargs), fn(*args, **kwargs))
    return sharded


def counts(program: Program, phase: str = "") -> dict[str, int]:
    """How many collectives there are of each kind, as `{"all_reduce tp": 4}`."""
    return dict(
        Counter(f"{c.kind} {' '.join(c.axes)}" for c in program.collectives if not phase or c.origin.phase == phase)
    )
