"""Trace, lower and run: from a single-device program to one program per rank."""

__version__ = "0.1.0"
