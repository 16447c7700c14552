"""Passes over a rank's program: each takes a program and gives an equal one that is better in one respect."""

from megalith.core.passes.accumulate import accumulate
from megalith.core.passes.arrival import arrival
from megalith.core.passes.blocking import blocking
from megalith.core.passes.bucket import bucket
from megalith.core.passes.delay import delay
from megalith.core.passes.flight import bounded
from megalith.core.passes.inplace import inplace
from megalith.core.passes.merge import merge
from megalith.core.passes.overlap import overlap
from megalith.core.passes.panels import panels
from megalith.core.passes.prefetch import prefetch

__all__ = [
    "accumulate",
    "arrival",
    "blocking",
    "bounded",
    "bucket",
    "delay",
    "inplace",
    "merge",
    "overlap",
    "panels",
    "prefetch",
]
