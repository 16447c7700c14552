"""What does one collective cost? Exact bytes, and seconds by the alpha-beta model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megalith.sharding.mesh import Mesh

__all__ = ["Cost", "collective_cost"]


@dataclass(frozen=True, slots=True)
class Cost:
    """What a rank receives and sends, in bytes, and how long that takes, in seconds."""

    bytes_received: int = 0
    bytes_sent: int = 0
    seconds: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.bytes_received + other.bytes_received,
            self.bytes_sent + other.bytes_sent,
            self.seconds + other.seconds,
        )


def collective_cost(kind: str, mesh: Mesh, axes: Sequence[str], elements: int, itemsize: int) -> Cost:
    """The cost, per rank, of one collective over the group that `axes` span.

    With n ranks in the group and L the elements that a rank has *in transport* before the step:

    | kind | received (= sent) | latencies |
    | --- | --- | --- |
    | `all_gather` | L (n-1) | 1 + log2 n |
    | `reduce_scatter` | L (n-1)/n | 1 + log2 n |
    | `all_reduce` | 2 L (n-1)/n | 1 + 2 log2 n |
    | `all_to_all` | L (n-1)/n | 1 + log2 n |
    | `exchange` | `elements`, counted by the caller | 2 + log2 n |
    | `slice`, `zero` | 0 | 0 |

    One latency starts the collective; then come as many rounds, in which the messages of an all-to-all overlap. The
    many pieces of an exchange cost one more.
    (Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005.)
    A group of several axes is as fast as the slowest of them. Shards that are not equally large are padded in
    transport to the largest of the group, an all-reduce to a multiple of n: the padding counts as moved. `elements` is
    L after that padding; for `reduce_scatter` and `all_to_all` it is therefore a multiple of n, n equal chunks.

    Args:
        kind: one of the kinds above.
        mesh: the mesh, whose `link` gives the bandwidth and latency of each axis.
        axes: the axes that span the group.
        elements: L, in elements (for `exchange` the elements that the busiest rank receives).
        itemsize: bytes of an element.

    >>> collective_cost("all_gather", Mesh("dp=2 tp=4"), ("tp",), elements=16, itemsize=4).bytes_received
    192
    >>> collective_cost("all_reduce", Mesh("dp=2 tp=4"), ("dp", "tp"), elements=16, itemsize=4).bytes_received
    112
    """
    n = math.prod(mesh.sizes[axis] for axis in axes)
    if kind in ("slice", "zero") or n == 1:
        return Cost()
    rounds = math.ceil(math.log2(n))
    if kind == "all_gather":
        moved, messages = elements * (n - 1), 1 + rounds
    elif kind in ("reduce_scatter", "all_to_all"):
        moved, messages = elements // n * (n - 1), 1 + rounds
    elif kind == "all_reduce":
        moved, messages = 2 * -(-elements // n) * (n - 1), 1 + 2 * rounds
    elif kind == "exchange":
        moved, messages = elements, 2 + rounds
    else:
        raise ValueError(f"{kind!r} is not a kind of step; the kinds are those of transition.KINDS")
    links = [mesh.link(axis) for axis in axes if mesh.sizes[axis] > 1]
    bandwidth = min(link.bandwidth for link in links)
    latency = max(link.latency for link in links)
    return Cost(moved * itemsize, moved * itemsize, moved * itemsize / bandwidth + messages * latency)
