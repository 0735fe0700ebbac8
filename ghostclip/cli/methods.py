"""The five ways to train that `ghostclip train --method` offers, each as a stream of optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import ghostclip
from ghostclip.accounting import Risk, epsilon_of, risk_of
from ghostclip.bench import naive
from ghostclip.events import Event, SampledGaussian
from ghostclip.noise import noise_source
from ghostclip.sampling import LogicalBatches
from ghostclip.validate import nonnegative

__all__ = ["METHODS", "OPTIMIZERS", "Ghost", "Settings", "Steps", "cross_entropy"]

# Examples whose features are computed at a time.
SOME = 1024
MOMENTUM, MOMENTUM_OF_FEW = 0.9, 0.5  # the latter where there are few steps
OPTIMIZERS: dict[str, Callable[[Any, float], torch.optim.Optimizer]] = {
    "sgd": lambda parameters, rate: torch.optim.SGD(parameters, lr=rate, momentum=MOMENTUM),
    "nesterov": lambda parameters, rate: torch.optim.SGD(parameters, lr=rate, momentum=MOMENTUM_OF_FEW, nesterov=True),
    "adam": lambda parameters, rate: torch.optim.Adam(parameters, lr=rate),
    "adamw": lambda parameters, rate: torch.optim.AdamW(parameters, lr=rate),
}


@dataclass(frozen=True)
class Settings:
    """One run's settings; ``target_epsilon`` is what ``noise_multiplier`` was chosen for, ``noise`` the noise's mode.

    All three are None without privacy. ``ledger`` is the file that steps are charged to, if any. ``mean_noise`` is the
    noise multiplier of the mean of the network's features, which is released first; None: none is.
    """

    model: str
    method: str
    epochs: int
    batch_size: int
    max_physical_batch_size: int | str | None
    max_norm: float
    learning_rate: float
    optimizer: str
    seed: int
    delta: float
    noise_multiplier: float | None
    target_epsilon: float | None = None
    noise: str | None = "standard"
    ledger: str | None = None
    memory_limit: int | None = None
    mean_noise: float | None = None

    @property
    def before(self) -> list[SampledGaussian]:
        """What is released before the first step."""
        return [] if self.mean_noise is None else [SampledGaussian(1.0, self.mean_noise)]

    @property
    def of_engine(self) -> dict[str, Any]:
        """What an engine, or an audit of one, is told."""
        return {
            "batch_size": self.batch_size,
            "max_physical_batch_size": self.max_physical_batch_size,
            "noise_multiplier": self.noise_multiplier,
            "target_delta": self.delta,
            "clipping": self.max_norm,
            "second_pass": self.method,
            "noise": self.noise or "standard",
        }


class Steps:
    """A run's optimizer steps, taken while iterating, which gives the losses [n] of the examples of each."""

    def __init__(self, settings: Settings, model: nn.Module, data: TensorDataset) -> None:
        self._settings, self._model, self._data = settings, model, data
        self._optimizer = OPTIMIZERS[settings.optimizer](model.parameters(), settings.learning_rate)

    def __iter__(self) -> Iterator[Tensor]:
        raise NotImplementedError

    @property
    def events(self) -> list[Event] | None:
        """What the steps taken so far are charged as; None where nothing bounds it."""
        return None

    def epsilon(self, accountant: str) -> float:
        """What the steps taken so far spent; inf where nothing bounds it. Composed anew: a report has few of them."""
        events = self.events
        return math.inf if events is None else epsilon_of(events, delta=self._settings.delta, accountant=accountant)

    def risk(self) -> Risk | None:
        """How well membership attacks can do against the steps taken so far; None where nothing bounds it."""
        return None if (events := self.events) is None else risk_of(events)

    @property
    def generator(self) -> str:
        """Where the random numbers of noise come from, in words."""
        return noise_source(self._settings.noise or "standard").generator_for(self._model)

    @property
    def limit(self) -> int | None:
        """The most examples that are in memory at once; None: no limit."""
        return self._settings.max_physical_batch_size  # type: ignore[return-value]  # "auto" is the engine's


class Nonprivate(Steps):
    """Ordinary training: shuffled batches of a fixed size, the mean loss."""

    def __iter__(self) -> Iterator[Tensor]:
        size = min(self._settings.batch_size, len(self._data))
        batches = DataLoader(self._data, batch_size=size, shuffle=True)
        for _ in range(self._settings.epochs):
            for batch in batches:
                losses = cross_entropy(self._model, batch)
                losses.mean().backward()
                self._optimizer.step()
                self._optimizer.zero_grad()
                yield losses.detach()


class Ghost(Steps):
    """PrivacyEngine with one of its second passes, from the first epoch that isn't over."""

    def __init__(self, settings: Settings, model: nn.Module, data: TensorDataset) -> None:
        super().__init__(settings, model, data)
        self.first_epoch = 0
        self.engine = ghostclip.PrivacyEngine(
            model,
            self._optimizer,
            data,
            ledger=settings.ledger,
            # What the ledger has from other runs isn't part of what the noise was calibrated for.
            max_epsilon=None if settings.ledger is None else settings.target_epsilon,
            memory_limit=settings.memory_limit,
            before=[] if settings.mean_noise is None else [self._centred(settings.mean_noise)],
            **settings.of_engine,
        )

    @torch.no_grad()
    def _centred(self, noise_multiplier: float) -> ghostclip.PrivateMean:
        """Releases the mean of the untrained network's features, which the network takes off from now on."""
        model: Any = self._model
        features = torch.cat([model.features(inputs) for inputs in self._data.tensors[0].split(SOME)])
        noise = self._settings.noise or "standard"
        released = ghostclip.private_mean(features, noise_multiplier=noise_multiplier, noise=noise)
        model.centre.mean.copy_(released.mean)
        return released

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(self.first_epoch, self._settings.epochs):
            for batch in self.engine.batches():
                yield self.engine.step(batch, cross_entropy).losses

    @property
    def events(self) -> list[Event]:
        """See `Steps.events`: with all else that is in the ledger."""
        return self.engine.events

    @property
    def limit(self) -> int | None:
        """See `Steps.limit`."""
        return self.engine.batches().limit


class Naive(Steps):
    """One of the two slow ways to the clipped sum, with the engine's own sampling, noise and accounting."""

    def __init__(self, settings: Settings, model: nn.Module, data: TensorDataset) -> None:
        super().__init__(settings, ghostclip.unwrap(model), data)
        self._sigma = nonnegative(noise_multiplier=settings.noise_multiplier)
        self._clipped_sum = {"nxbp": naive.nxbp, "multiloss": naive.multiloss}[settings.method]
        self._noise, self._charged = noise_source(settings.noise or "standard"), 0
        self._batches = LogicalBatches(
            data,
            batch_size=settings.batch_size,
            max_physical_batch_size=self.limit,
            generator=self._noise.generator,
        )

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(self._settings.epochs):
            for batch in self._batches:
                self._seen = [torch.zeros(0)]
                for examples in batch.physical():
                    self._clipped_sum(self._model, self._losses, examples, self._settings.max_norm)
                self._release()
                yield torch.cat(self._seen)

    def _losses(self, model: nn.Module, examples: Sequence[Tensor]) -> Tensor:
        """Losses [n], which the step gives."""
        losses = cross_entropy(model, examples)
        self._seen.append(losses.detach())
        return losses

    def _release(self) -> None:
        """Charges a step, adds its noise, and takes it."""
        self._charged += 1
        parameters = list(self._model.parameters())
        sums = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        released = self._noise.release(sums, self._sigma * self._settings.max_norm, self._settings.batch_size)
        for parameter, gradient in zip(parameters, released, strict=True):
            parameter.grad = gradient
        self._optimizer.step()
        self._optimizer.zero_grad()

    @property
    def events(self) -> list[Event]:
        """See `Steps.events`."""
        return [replace(self._batches.event(self._sigma), count=self._charged)]


def cross_entropy(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """Losses [B] of a batch (inputs, labels)."""
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels, reduction="none")


METHODS: dict[str, type[Steps]] = {"nonprivate": Nonprivate, "nxbp": Naive, "multiloss": Naive}
METHODS |= {"auto": Ghost, "cached": Ghost, "reweight": Ghost}
