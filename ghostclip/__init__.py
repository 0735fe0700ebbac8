"""Exact per-example gradient clipping for differentially private training."""

__version__ = "0.1.0"
