"""The training that is audited, none of which is touched: the user's own model, data and settings, and its claim."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, TensorDataset, default_collate

from ghostclip import accounting
from ghostclip.clipper import GhostClipper
from ghostclip.clipping.choice import adapts
from ghostclip.engine import PrivacyEngine
from ghostclip.events import CyclicPoissonGaussian
from ghostclip.noise import Correlation
from ghostclip.sampling import LogicalBatch
from ghostclip.validate import one_of, open_fraction, positive, positive_int

__all__ = ["Claim", "LossFunction", "Training", "endless", "plain_sgd"]

LossFunction = Callable[[nn.Module, Any], Tensor]
_epsilon = lru_cache(maxsize=256)(accounting.epsilon)  # the same claim is asked about again and again
SAMPLINGS = ("poisson", "cyclic_poisson", "cyclic")
NOTHING_SHOWN = 1e4  # a noise multiplier so large that its epsilon is as good as 0


def plain_sgd(parameters: Iterator[nn.Parameter]) -> Optimizer:
    """At rate 0.1."""
    return SGD(parameters, lr=0.1)


@dataclass(frozen=True)
class Claim:
    """``steps`` Poisson-sampled Gaussian releases, neighbours differing by one example's presence.

    Attributes:
        noise_multiplier: standard deviation of the noise over the sensitivity, > 0.
        sample_rate: probability of each example to be in a batch.
        steps: number of releases.
        delta: where epsilon is reported.
    """

    noise_multiplier: float
    sample_rate: float
    steps: int
    delta: float

    @property
    def epsilon(self) -> float:
        """What is claimed, by PLD."""
        return _epsilon(**vars(self))

    def with_noise(self, noise_multiplier: float, sample_rate: float | None = None) -> float:
        """Epsilon if the noise (and the rate) were these: inf for no noise, 0 for endless noise.

        By the same accountant, whose curve is monotone in both: an audited epsilon passes the claimed one exactly where
        the audited noise falls below the claimed one (or the rate rises above it). For full batches it is exact.
        """
        rate = self.sample_rate if sample_rate is None else sample_rate
        if noise_multiplier >= NOTHING_SHOWN or rate <= 0:
            return 0.0
        if noise_multiplier <= 0:
            return math.inf
        return replace(self, noise_multiplier=noise_multiplier, sample_rate=rate).epsilon


@dataclass(frozen=True)
class Training:
    """The arguments of `PrivacyEngine` and the number of steps.

    Attributes:
        model, loss_fn, data, batch_size, noise_multiplier, target_delta, clipping: as `PrivacyEngine` and its ``step``
            take them.
        steps: of the whole training.
        optimizer: parameters -> the optimizer of the training; plain SGD by default.
        options: other arguments of `PrivacyEngine`: second_pass, max_physical_batch_size, noise.
        sampling, correlation: as `PrivacyEngine`; one of ``SAMPLINGS``.

    Raises:
        ValueError, TypeError: an argument is out of range, or the clipping norm is adaptive.
    """

    model: nn.Module
    loss_fn: LossFunction
    data: Any
    batch_size: int
    noise_multiplier: float
    steps: int
    target_delta: float = 1e-5
    clipping: Any = 1.0
    optimizer: Callable[[Iterator[nn.Parameter]], Optimizer] = plain_sgd
    options: Mapping[str, Any] = field(default_factory=dict)
    sampling: str = "poisson"
    correlation: Correlation | None = None

    def __post_init__(self) -> None:
        positive(noise_multiplier=self.noise_multiplier)
        positive_int(steps=self.steps)
        open_fraction(target_delta=self.target_delta)
        one_of(("standard", "hardened"), noise=self.options.get("noise", "standard"))
        one_of(SAMPLINGS, sampling=self.sampling)
        if adapts(self.clipping):
            raise ValueError(
                "an adaptive clipping norm is released along with the gradients, which this audit does not attack; "
                "give the norm that training settled on as a number"
            )
        if positive_int(batch_size=self.batch_size) > self.size:
            raise ValueError(f"batch_size must be at most the {self.size} examples; got {self.batch_size}")

    @property
    def dataset(self) -> Any:
        """The data set, from under a DataLoader."""
        return self.data.dataset if isinstance(self.data, DataLoader) else self.data

    @property
    def size(self) -> int:
        """Number of examples."""
        return len(self.dataset)

    @property
    def by_turns(self) -> bool:
        """Whether each example can be in every so many-th step only."""
        return self.sampling != "poisson"

    @property
    def separation(self) -> int:
        """An example's turns are so many steps apart."""
        if self.sampling == "cyclic":
            return max(1, round(self.size / self.batch_size))
        return 1 if self.correlation is None else self.correlation.bands or 1

    @functools.cached_property
    def claim(self) -> Claim:
        """What the training says it spends: of sampling by turns, the releases of one example's turns."""
        cyclic = self.sampling == "cyclic"
        setting = accounting.Setting(self.batch_size / self.size, self.sampling, bands=1 if cyclic else self.separation)
        event = setting.event(self.noise_multiplier, self.steps)
        if isinstance(event, CyclicPoissonGaussian):
            if cyclic and self.correlation is not None:
                event = replace(event, sensitivity=self.correlation.turn_sensitivity(self.steps, self.separation))
            event = event.turns
        return Claim(event.noise_multiplier, event.sample_rate, event.count, self.target_delta)

    def model_copy(self) -> nn.Module:
        """A copy that shares nothing with the user's model."""
        return copy.deepcopy(self.model)

    def clipper(self) -> GhostClipper:
        """Over a `model_copy`, with the training's clipping; in eval mode, since dropout would only blur a canary."""
        clipper = GhostClipper(self.model_copy(), self.clipping, second_pass=self.options.get("second_pass", "auto"))
        clipper.model.eval()
        return clipper

    def examples(self, indices: Tensor) -> Any:
        """The examples at ``indices`` [B], collated as the user's DataLoader does."""
        collate = self.data.collate_fn if isinstance(self.data, DataLoader) else default_collate
        if type(self.dataset) is TensorDataset and collate is default_collate:
            # Far faster than collating single examples, and gives the same.
            return [tensor[indices] for tensor in self.dataset.tensors]
        return collate([self.dataset[index] for index in indices.tolist()])

    def engine(
        self, model: nn.Module, optimizer: Optimizer, data: TensorDataset, batch_size: int, self_check: bool = True
    ) -> PrivacyEngine:
        """An engine with the training's clipping, noise and passes over another model and other data."""
        options = {**self.options, "sampling": self.sampling}
        if self.correlation is not None:
            options |= {"correlation": self.correlation, "steps": self.steps}
        return PrivacyEngine(
            model,
            optimizer,
            data,
            batch_size=batch_size,
            noise_multiplier=self.noise_multiplier,
            target_delta=self.target_delta,
            clipping=self.clipping,
            self_check=self_check,
            **options,
        )


def endless(engine: PrivacyEngine) -> Iterator[LogicalBatch]:
    """Logical batches, epoch after epoch."""
    while True:
        yield from engine.batches()
