"""Trace, lower, run, train: a single-device program on a mesh of devices."""

from megalith.core.local_map import local_map
from megalith.core.losses import chunked_cross_entropy
from megalith.core.markers import constrain
from megalith.core.optim import SGD, AdamW
from megalith.core.shard import Sharded, shard
from megalith.core.transforms import grad, grad_and_value

__version__ = "0.1.0"

__all__ = [
    "SGD",
    "AdamW",
    "Sharded",
    "chunked_cross_entropy",
    "constrain",
    "grad",
    "grad_and_value",
    "local_map",
    "shard",
]
