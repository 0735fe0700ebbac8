"""The five ways to train that `ghostclip train --method` offers, each as a stream of optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import ghostclip
from ghostclip.accounting import epsilon_of
from ghostclip.bench import naive
from ghostclip.noise import noise_source
from ghostclip.sampling import LogicalBatches
from ghostclip.validate import nonnegative

__all__ = ["METHODS", "OPTIMIZERS", "Settings", "Step", "Steps", "cross_entropy", "steps_of"]

MOMENTUM = 0.9
OPTIMIZERS: dict[str, Callable[[Any, float], torch.optim.Optimizer]] = {
    "sgd": lambda parameters, rate: torch.optim.SGD(parameters, lr=rate, momentum=MOMENTUM),
    "adam": lambda parameters, rate: torch.optim.Adam(parameters, lr=rate),
    "adamw": lambda parameters, rate: torch.optim.AdamW(parameters, lr=rate),
}


@dataclass(frozen=True)
class Settings:
    """One run's settings; ``target_epsilon`` is what ``noise_multiplier`` was chosen for, ``noise`` the noise's mode.

    All three are None without privacy. ``ledger`` is the file that steps are charged to, if any.
    """

    model: str
    method: str
    epochs: int
    batch_size: int
    max_physical_batch_size: int | None
    max_norm: float
    learning_rate: float
    optimizer: str
    seed: int
    delta: float
    noise_multiplier: float | None
    target_epsilon: float | None = None
    noise: str | None = "standard"
    ledger: str | None = None


@dataclass(frozen=True)
class Step:
    """One optimizer step: how many examples it saw and their mean loss (NaN for none)."""

    examples: int
    loss: float


class Steps(Protocol):
    """A run's optimizer steps, taken while iterating."""

    private: bool
    noise_multiplier: float | None

    def __iter__(self) -> Iterator[Step]: ...

    def epsilon(self, accountant: str) -> float:
        """What the steps taken so far spent."""
        ...


def steps_of(settings: Settings, model: nn.Module, data: TensorDataset) -> Steps:
    """The steps of the method the settings name."""
    return METHODS[settings.method](settings, model, data)


class Nonprivate:
    """Ordinary training: shuffled batches of a fixed size, the mean loss."""

    private: bool = False
    noise_multiplier: float | None = None

    def __init__(self, settings: Settings, model: nn.Module, data: TensorDataset) -> None:
        self._model, self._epochs = model, settings.epochs
        self._optimizer = OPTIMIZERS[settings.optimizer](model.parameters(), settings.learning_rate)
        self._batches = DataLoader(data, batch_size=min(settings.batch_size, len(data)), shuffle=True)

    def __iter__(self) -> Iterator[Step]:
        for _ in range(self._epochs):
            for batch in self._batches:
                loss = cross_entropy(self._model, batch).mean()
                loss.backward()
                self._optimizer.step()
                self._optimizer.zero_grad()
                yield Step(len(batch[1]), float(loss.detach()))

    def epsilon(self, accountant: str) -> float:
        """Nothing bounds it."""
        return math.inf


class Ghost:
    """PrivacyEngine with one of its second passes, from the first epoch that isn't over."""

    private: bool = True
    noise_multiplier: float | None

    def __init__(self, settings: Settings, model: nn.Module, data: TensorDataset) -> None:
        self.noise_multiplier = settings.noise_multiplier
        self._epochs, self.first_epoch = settings.epochs, 0
        self.engine = ghostclip.PrivacyEngine(
            model,
            OPTIMIZERS[settings.optimizer](model.parameters(), settings.learning_rate),
            data,
            batch_size=settings.batch_size,
            max_physical_batch_size=settings.max_physical_batch_size,
            noise_multiplier=settings.noise_multiplier,
            target_delta=settings.delta,
            clipping=settings.max_norm,
            second_pass=settings.method,
            noise=settings.noise or "standard",
            ledger=settings.ledger,
        )

    def __iter__(self) -> Iterator[Step]:
        for _ in range(self.first_epoch, self._epochs):
            for batch in self.engine.batches():
                losses = self.engine.step(batch, cross_entropy).losses
                yield Step(len(losses), float(losses.mean()))

    def epsilon(self, accountant: str) -> float:
        """What the steps taken so far spent."""
        return self.engine.epsilon(accountant=accountant)


class Naive:
    """One of the two slow ways to the clipped sum, with the engine's own sampling, noise and accounting."""

    private: bool = True
    noise_multiplier: float | None

    def __init__(self, settings: Settings, model: nn.Module, data: TensorDataset) -> None:
        self.noise_multiplier = self._sigma = nonnegative(noise_multiplier=settings.noise_multiplier)
        self._settings, self._model = settings, ghostclip.unwrap(model)
        self._clipped_sum = {"nxbp": naive.nxbp, "multiloss": naive.multiloss}[settings.method]
        self._optimizer = OPTIMIZERS[settings.optimizer](model.parameters(), settings.learning_rate)
        self._noise, self._charged = noise_source(settings.noise or "standard"), 0
        self._batches = LogicalBatches(
            data,
            batch_size=settings.batch_size,
            max_physical_batch_size=settings.max_physical_batch_size,
            generator=self._noise.generator,
        )

    def __iter__(self) -> Iterator[Step]:
        for _ in range(self._settings.epochs):
            for batch in self._batches:
                losses: list[Tensor] = []
                for examples in batch.physical():
                    self._clipped_sum(self._model, _noting(losses), examples, self._settings.max_norm)
                self._release()
                seen = torch.cat(losses) if losses else torch.zeros(0)
                yield Step(len(seen), float(seen.mean()))

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

    def epsilon(self, accountant: str) -> float:
        """What the steps taken so far spent."""
        if not self._charged:
            return 0.0
        event = replace(self._batches.event(self._sigma), count=self._charged)
        return epsilon_of([event], delta=self._settings.delta, accountant=accountant)


def _noting(seen: list[Tensor]) -> naive.LossFunction:
    """The loss function, which keeps the losses of the examples."""

    def noted(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        losses = cross_entropy(model, batch)
        seen.append(losses.detach())
        return losses

    return noted


def cross_entropy(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """Losses [B] of a batch (inputs, labels)."""
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels, reduction="none")


METHODS: dict[str, Callable[[Settings, nn.Module, TensorDataset], Steps]] = {
    "nonprivate": Nonprivate,
    "nxbp": Naive,
    "multiloss": Naive,
    "auto": Ghost,
    "cached": Ghost,
    "reweight": Ghost,
}
