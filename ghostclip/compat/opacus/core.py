"""The engine below Opacus's interface: `ghostclip.PrivacyEngine` with Opacus's sampling rate and denominators."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from ghostclip.compat.opacus.accountants import Accountant
from ghostclip.engine import PrivacyEngine
from ghostclip.events import Event
from ghostclip.sampling import LogicalBatch, LogicalBatches, Scheme
from ghostclip.sampling.schemes import Poisson, WithoutReplacement

__all__ = ["CoreEngine", "expected_batch_size"]

# Of batches of one size one in so many has some examples less.
SMALLER = 16


def expected_batch_size(examples: int, steps: int) -> int:
    """How many examples Opacus expects in a batch: the data set's size over the loader's length, rounded down."""
    return max(1, int(examples * (1 / steps)))


@dataclass(frozen=True)
class LoaderPoisson(Poisson):
    """Each example with probability 1 / ``steps``; ``batch_size`` is the denominator only."""

    steps: int = 1

    @property
    def sample_rate(self) -> float:
        """1 / ``steps``."""
        return 1 / self.steps


@dataclass(frozen=True)
class LoaderWithoutReplacement(WithoutReplacement):
    """``drawn`` different examples, drawn anew each time; ``batch_size`` is the denominator only.

    The first batch, and every 16th after it, has one to eight less, and is charged as the others. An output of the
    model that has as many rows as a batch only by chance, as those of ten public descriptions of classes, hardly has
    as many rows as these, and is refused.
    """

    described = "sampling without replacement ({0.drawn} different {0.unit}s, drawn anew for each batch)"
    drawn: int = 1

    @property
    def sample_rate(self) -> float:
        """``drawn`` over the number of examples."""
        return self.drawn / self.population

    def count(self, generator: np.random.Generator) -> int:
        """``drawn``."""
        return self.drawn

    def draw(self, generator: np.random.Generator, step: int = 0) -> list[int]:
        """See `Scheme.draw`."""
        less = 0
        if self.drawn > 1 and step % SMALLER == 0:  # by what numpy's generators and secure_mode's both have
            less = 1 + int(generator.choice(min(self.drawn, 9) - 1, 1, replace=False, shuffle=False)[0])
        return np.sort(generator.choice(self.population, self.drawn - less, replace=False, shuffle=False)).tolist()

    @property
    def largest(self) -> int:
        """``drawn``."""
        return self.drawn


class LoaderBatches(LogicalBatches):
    """Logical batches at the rate that Opacus reads off a DataLoader: 1 over its length.

    ``batch_size`` is what noisy sums are divided by; the other arguments are those of `LogicalBatches`.
    """

    def __init__(self, data: Any, **options: Any) -> None:
        self._steps = len(data)
        with warnings.catch_warnings():
            if options["sampling"] == "poisson":  # what Opacus does with every loader, too
                warnings.filterwarnings("ignore", "the DataLoader's")
            super().__init__(data, **options)

    def _scheme(self, sampling: str, neighboring: str, max_batch_size: int | None, batch_size: int) -> Scheme:
        if sampling == "poisson":
            return LoaderPoisson(self.dataset_size, batch_size, neighboring, steps=self._steps)
        drawn = expected_batch_size(self.dataset_size, self._steps)
        return LoaderWithoutReplacement(self.dataset_size, batch_size, neighboring, drawn=drawn)

    def __len__(self) -> int:
        return self._steps


class CoreEngine(PrivacyEngine):
    """The engine that samples, clips, charges and adds noise; its losses come from `ScalarLosses`.

    Args:
        model: in training. Engines of the same accountant that trained it before are taken over from.
        counted_by: the accountant that counts its steps.
        args, options: as for `PrivacyEngine`.

    Raises:
        PrivacyError: trained parameters changed since the last step of such an engine, or as `PrivacyEngine`.
    """

    _sampled_by = LoaderBatches

    def __init__(self, model: nn.Module, *args: Any, counted_by: Accountant, **options: Any) -> None:
        self._counted_by = counted_by
        self._later: list[CoreEngine] = []  # engines that watch all parameters of this one, too
        parameters = set(model.parameters())
        earlier = [
            each
            for each in counted_by.engines
            if isinstance(each, CoreEngine) and parameters.issuperset(each.model.parameters())
        ]
        for each in earlier:
            each.charged()
        super().__init__(model, *args, **options)
        counted_by.follow(self)
        for each in earlier:
            each._later.append(self)

    def _how_to_count(self, earlier: PrivacyEngine) -> str | None:
        """What makes the accountant count the steps of an earlier engine; None where it does."""
        if isinstance(earlier, CoreEngine) and self._counted_by.follows(earlier):
            return None
        return "Call accountant.load_state_dict(...) of the new one with the state_dict() of the earlier one's"

    @property
    def batch(self) -> LogicalBatch | None:
        """The current logical batch, of which a physical batch was handed out, or which is empty."""
        batch = self._steps.release.batch
        if batch is None or not batch.state.is_open:
            return None
        return batch if batch.handed or not batch.sizes else None

    @property
    def is_detached(self) -> bool:
        """Whether the run is over, and later steps are not private."""
        return self._loader is None

    @property
    def rows(self) -> int:
        """How many examples the physical batch handed out last has; 0 in an empty batch, or without one."""
        batch = self.batch
        return batch.sizes[batch.handed - 1] if batch is not None and batch.sizes else 0

    @property
    def gathered(self) -> int:
        """Of how many physical batches of the logical batch the clipped sums were gathered."""
        return self._steps.release.sums.count

    def charged(self) -> Sequence[Event]:
        """What was charged; raises PrivacyError where trained parameters moved outside of charged steps.

        Once a later engine takes steps, they are its to watch.
        """
        if not self.is_detached and not any(each.steps_taken for each in self._later):
            self._steps.updates.check()
        return self.events
