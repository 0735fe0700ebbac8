"""Who is in the logical batches of a loader."""

from typing import Any

import numpy as np

from ghostclip.sampling import LogicalBatches


def rows(batch: Any) -> list[int]:
    """Those of a logical batch, over its physical ones."""
    return [row for part in batch.rows for row in part]


def members(loader: LogicalBatches, steps: int) -> np.ndarray:
    """[steps, examples] of booleans: who was in which logical batch."""
    found: list[np.ndarray] = []
    while len(found) < steps:
        found += [np.isin(np.arange(loader.dataset_size), rows(batch)) for batch in loader]
    return np.array(found[:steps])
