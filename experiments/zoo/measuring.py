"""What is measured of one model: norms and clipped sums against the loop over single examples, and private steps."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset

import ghostclip

from .subject import Batch, Subject, as_floats

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
        measured: whether ownership is measured in every batch of it.
        neighbours: how far the clipped sum of a batch moves with one of its examples left out, in float32, by the
            clipping norm: the worst of the first and the last example, and of both second passes.
    """

    parameters: int
    floor: float
    norms: float
    sums: dict[str, float]
    steps: int
    measured: bool
    neighbours: float = math.nan

    @property
    def worst(self) -> float:
        """The worst of the errors of norms and sums."""
        return max(self.norms, *self.sums.values())


def measure(subject: Subject) -> Figures:
    """Compares and trains one model, in float64 throughout; raises what ghostclip raises where it refuses."""
    with in_double():
        figures, max_norm = _measure(subject)
    return replace(figures, neighbours=neighbours(subject, max_norm))


def _measure(subject: Subject) -> tuple[Figures, float]:
    """The figures in float64, and the clipping norm."""
    model, batch = subject.ready(), subject.batch(EXAMPLES)
    model.train(subject.trains)
    if subject.refused:  # before the loop, which a loss of several examples may not allow
        clip(subject, ghostclip.GhostClipper(prepared(subject, model)), batch)
    model = replaced(subject, model)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    loop = single_gradients(subject, copy.deepcopy(model), batch)
    plain = batch_gradient(subject, copy.deepcopy(model), batch)
    norms = torch.stack([whole_norm(grads) for grads in loop])
    max_norm = float(norms.median())
    expected = weighted_sum(loop, (max_norm / norms).clamp(max=1.0))
    found, sums, measured = {}, {}, False
    for second_pass in ("reweight", "cached"):
        clipped = prepared(subject, model)
        clipper = ghostclip.GhostClipper(clipped, max_norm, second_pass=second_pass)
        clip(subject, clipper, batch)
        measured = clipper.passes.is_open
        rows = subject.index(batch) if subject.index else None
        found = clipper.norms(subject.losses(clipped, batch), batch_index=rows, per="parameter")
        sums[second_pass] = sum_error(gradients(clipped), expected)
    figures = Figures(
        sum(model.get_parameter(name).numel() for name in trained),
        sum_error(plain, weighted_sum(loop, torch.ones(EXAMPLES))),
        norm_error(found, loop),
        sums,
        private_steps(subject, prepared(subject, model), max_norm),
        measured,
    )
    return figures, max_norm


def replaced(subject: Subject, model: nn.Module) -> nn.Module:
    """The model that is compared: what ``subject.wrap`` replaces is part of it."""
    return ghostclip.unwrap(ghostclip.wrap(model, **subject.wrap)) if "replace" in subject.wrap else model


def prepared(subject: Subject, model: nn.Module) -> nn.Module:
    """A wrapped copy of the model, its examples where ``subject.wrap`` says they are."""
    options = {name: value for name, value in subject.wrap.items() if name != "replace"}
    return ghostclip.wrap(copy.deepcopy(model), **options)


def clip(subject: Subject, clipper: ghostclip.GhostClipper, batch: Batch) -> None:
    """Adds the clipped sum of a batch."""
    if subject.index:
        clipper.backward(subject.losses(clipper.model, batch), batch_index=subject.index(batch))
    else:
        clipper.clip(subject.losses, batch)


def single_gradients(subject: Subject, model: nn.Module, batch: Batch) -> list[Grads]:
    """The gradient of each example's loss, by a backward of its own."""
    found = []
    for example in range(EXAMPLES):
        one = subject.taken(batch, example, example + 1)
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


def neighbours(subject: Subject, max_norm: float) -> float:
    """See `Figures`."""
    model, worst, batch = replaced(subject, subject.ready()), 0.0, as_floats(subject.batch(EXAMPLES))
    model.train(subject.trains)
    parts = [subject.taken(batch, start, start + EXAMPLES - 1) for start in (0, 1)]
    for second_pass in ("reweight", "cached"):
        clipped = prepared(subject, model).float()
        clipper = ghostclip.GhostClipper(clipped, max_norm, second_pass=second_pass)
        sums = []
        for each in (batch, *parts):
            clipped.zero_grad()
            clip(subject, clipper, each)
            sums.append(gradients(clipped))
        for part in sums[1:]:
            moved = whole_norm({name: total.double() - part[name].double() for name, total in sums[0].items()})
            worst = max(worst, float(moved) / max_norm)
    return worst


class Examples(Dataset[Any]):
    """The examples of a batch, one by one."""

    def __init__(self, subject: Subject, examples: int) -> None:
        self._subject, self._examples, self._batch = subject, examples, subject.batch(examples)

    def __len__(self) -> int:
        return self._examples

    def __getitem__(self, index: int) -> Batch:
        one = self._subject.taken(self._batch, index, index + 1)
        return one if self._subject.joined else {name: value[0] for name, value in one.items()}


def private_steps(subject: Subject, model: nn.Module, max_norm: float) -> int:
    """Takes STEPS private steps; returns how many of them moved every trained parameter."""
    model.train(subject.trains)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    data: Any = Examples(subject, 4 * EXAMPLES)
    if subject.joined is not None:
        data = DataLoader(data, batch_size=EXAMPLES, collate_fn=subject.joined)
    engine = ghostclip.PrivacyEngine(
        model, optimizer, data, batch_size=EXAMPLES, max_physical_batch_size=3,
        noise_multiplier=1.0, clipping=max_norm, noise="test", seed=1,
    )  # fmt: skip
    rows: Any = {"batch_index": subject.index} if subject.index else {}
    moved = 0
    for _, batch in zip(range(STEPS), engine.batches(), strict=False):
        before = [p.detach().clone() for p in model.parameters() if p.requires_grad]
        engine.step(batch, subject.losses, **rows)
        after = [p for p in model.parameters() if p.requires_grad]
        moved += all(bool((a != b).any()) and bool(b.isfinite().all()) for a, b in zip(before, after, strict=True))
    return moved
