"""What is measured of one model: norms and clipped sums against the loop over single examples, and private steps."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset

import ghostclip

from .subject import Batch, Subject

__all__ = ["Figures", "measure"]

Grads = dict[str, Tensor]
EXAMPLES, STEPS = 4, 3
# A parameter's norm or sum that is this small a share of the whole is held against that share of the whole.
SMALL = 1e-3


class _FloatsAsDoubles(TorchFunctionMode):
    """Arguments that say float32 say float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(_doubled, (args, kwargs or {}))
        return func(*args, **kwargs)


def _doubled(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextmanager
def in_double() -> Iterator[None]:
    """Lets models that work in float32 here and there, whatever their parameters are, do that in float64.

    RMSNorms and rotary embeddings do so; a float32 rounding error of theirs would hide any error of the clipping's. The
    conversions are exchanged as well, since torch leaves the mode aside during a backward.
    """
    convert = Tensor.to

    def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        args, kwargs = tree_map(_doubled, (args, kwargs))
        return convert(tensor, *args, **kwargs)

    Tensor.to, Tensor.float = to, Tensor.double  # type: ignore[method-assign, assignment]
    try:
        with _FloatsAsDoubles():
            yield
    finally:
        del Tensor.to, Tensor.float


@dataclass(frozen=True)
class Figures:
    """Of one model; errors are relative.

    Attributes:
        parameters: how many numbers are trained.
        floor: how far the model's own gradient of a batch is from the sum of the loop's: what rounding leaves.
        norms: worst of per-example norms, of the whole gradient and of each parameter.
        sums: worst of the clipped sums, by {second pass: error}.
        steps: private steps that were taken and moved every trained parameter.
    """

    parameters: int
    floor: float
    norms: float
    sums: dict[str, float]
    steps: int

    @property
    def worst(self) -> float:
        """The worst of the errors of norms and sums."""
        return max(self.norms, *self.sums.values())


def measure(subject: Subject) -> Figures:
    """Compares and trains one model, in float64 throughout; raises what ghostclip raises where it refuses."""
    with in_double():
        return _measure(subject)


def _measure(subject: Subject) -> Figures:
    model, batch = subject.ready(), subject.batch(EXAMPLES)
    model.train(subject.trains)
    if subject.refused:
        clipped = ghostclip.wrap(model, **subject.wrap)
        ghostclip.GhostClipper(clipped).backward(subject.losses(clipped, batch))
    if "replace" in subject.wrap:  # what replaces other layers is part of the model that is compared
        model = ghostclip.unwrap(ghostclip.wrap(model, **subject.wrap))
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    loop = single_gradients(subject, copy.deepcopy(model), batch)
    plain = batch_gradient(subject, copy.deepcopy(model), batch)
    norms = torch.stack([whole_norm(grads) for grads in loop])
    max_norm = float(norms.median())
    expected = weighted_sum(loop, (max_norm / norms).clamp(max=1.0))
    found, sums = {}, {}
    for second_pass in ("reweight", "cached"):
        clipped = copy.deepcopy(model)
        clipper = ghostclip.GhostClipper(clipped, max_norm, second_pass=second_pass)
        losses = subject.losses(clipped, batch)
        found = clipper.norms(losses, per="parameter", retain_graph=True)
        clipper.backward(losses)
        sums[second_pass] = sum_error(gradients(clipped), expected)
    return Figures(
        sum(model.get_parameter(name).numel() for name in trained),
        sum_error(plain, weighted_sum(loop, torch.ones(EXAMPLES))),
        norm_error(found, loop),
        sums,
        private_steps(subject, copy.deepcopy(model), max_norm),
    )


def single_gradients(subject: Subject, model: nn.Module, batch: Batch) -> list[Grads]:
    """The gradient of each example's loss, by a backward of its own."""
    found = []
    for example in range(EXAMPLES):
        one = {name: value[example : example + 1] for name, value in batch.items()}
        found.append(batch_gradient(subject, model, one))
    return found


def batch_gradient(subject: Subject, model: nn.Module, batch: Batch) -> Grads:
    """The plain gradient of the summed losses."""
    model.zero_grad()
    subject.losses(model, batch).sum().backward()
    return gradients(model)


def gradients(model: nn.Module) -> Grads:
    """p.grad of every trained parameter, zeros where there is none."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in named}


def whole_norm(grads: Mapping[str, Tensor]) -> Tensor:
    """The norm over all parameters."""
    return torch.stack([grad.double().norm() for grad in grads.values()]).norm()


def weighted_sum(loop: list[Grads], weights: Tensor) -> Grads:
    """sum_i weights[i] g_i."""
    pairs = list(zip(weights, loop, strict=True))
    return {name: sum(weight * grads[name].double() for weight, grads in pairs) for name in loop[0]}  # type: ignore[misc]


def sum_error(found: Grads, expected: Grads) -> float:
    """Worst relative error of a parameter's sum, as a norm."""
    whole = whole_norm(expected)
    errors = [
        (found[name].double() - value).norm() / torch.maximum(value.norm(), SMALL * whole)
        for name, value in expected.items()
    ]
    return float(torch.stack(errors).max())


def norm_error(found: dict[str, Tensor], loop: list[Grads]) -> float:
    """Worst relative error of an example's norm, over all parameters or of one of them."""
    whole = torch.stack([whole_norm(grads) for grads in loop])
    ours = torch.stack([norms.double() for norms in found.values()]).norm(dim=0)
    errors = [((ours - whole).abs() / whole).max()]
    for name, norms in found.items():
        expected = torch.stack([grads[name].double().norm() for grads in loop])
        errors.append(((norms.double() - expected).abs() / torch.maximum(expected, SMALL * whole)).max())
    return float(torch.stack(errors).max())


class Examples(Dataset[Any]):
    """The examples of a batch, one by one."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return len(next(iter(self._batch.values())))

    def __getitem__(self, index: int) -> Batch:
        return {name: value[index] for name, value in self._batch.items()}


def private_steps(subject: Subject, model: nn.Module, max_norm: float) -> int:
    """Takes STEPS private steps in train mode; returns how many of them moved every trained parameter."""
    model.train(subject.trains)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    engine = ghostclip.PrivacyEngine(
        model, optimizer, Examples(subject.batch(4 * EXAMPLES)), batch_size=EXAMPLES, max_physical_batch_size=3,
        noise_multiplier=1.0, clipping=max_norm, noise="test", seed=1,
    )  # fmt: skip
    moved = 0
    for _, batch in zip(range(STEPS), engine.batches(), strict=False):
        before = [p.detach().clone() for p in model.parameters() if p.requires_grad]
        engine.step(batch, subject.losses)
        after = [p for p in model.parameters() if p.requires_grad]
        moved += all(bool((a != b).any()) and bool(b.isfinite().all()) for a, b in zip(before, after, strict=True))
    return moved
