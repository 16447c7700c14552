"""Reference models, adapters and recipes."""

__version__ = "0.1.0"
