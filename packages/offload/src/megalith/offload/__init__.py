"""Tiers, chunks and paging: tensors that rest on the host or on disk."""

__version__ = "0.1.0"
