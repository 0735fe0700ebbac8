"""Poisson sampling: which examples are in a batch, how they are loaded, and what a step over them is charged as."""

from .poisson import LogicalBatch, PoissonLoader

__all__ = ["LogicalBatch", "PoissonLoader"]
