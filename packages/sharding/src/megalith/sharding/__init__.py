"""Mesh, layout, transition, rules, partition and cost: what lives where, as pure data."""

__version__ = "0.1.0"
