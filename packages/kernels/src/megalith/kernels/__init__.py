"""Fused operations with their sharding rules and a torch reference for each."""

__version__ = "0.1.0"
