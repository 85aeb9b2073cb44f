"""kvd: a daemon that owns the KV cache of a machine's LLM inference processes."""

__version__ = "0.1.0"
