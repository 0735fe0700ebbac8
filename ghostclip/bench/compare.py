"""One workload, all contenders: the gradient gate first, then the clock."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ghostclip.bench.contenders import Contender, Prepared
from ghostclip.bench.measure import Timings, loop_norms, loop_sum, relative_error, take_turns
from ghostclip.bench.workloads import Workload

__all__ = ["BASELINE", "GATE", "LineUp", "compare", "line_up"]

BASELINE = "nonprivate"
GATE = 1e-4  # the relative error of a clipped sum from which on a contender is marked WRONG


@dataclass
class LineUp:
    """Contenders with their own copies of a model, after the gate, and the batch they ran on.

    Attributes:
        inputs, targets: the batch.
        parameters: how many numbers are trained.
        max_norm: the median norm of the batch, so that the gate sees clipped and unclipped examples.
        prepared: those that can run.
        errors: relative error of each one's clipped sum; None for one that doesn't clip.
        absent: the others: ``{name: {"missing": reason}}``, or ``"failed"`` for one that broke at the gate.
    """

    inputs: Tensor
    targets: Tensor
    parameters: int
    max_norm: float
    prepared: dict[str, Prepared] = dataclasses.field(default_factory=dict)
    errors: dict[str, float | None] = dataclasses.field(default_factory=dict)
    absent: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)


def line_up(
    workload: Workload, contenders: Mapping[str, Contender], device: str = "cpu", batch_size: int | None = None
) -> LineUp:
    """Prepares the contenders on one batch of the workload and compares their clipped sums with the loop's.

    Args:
        workload: what to train.
        contenders: by name; one of them is ``nonprivate``.
        device: "cpu" or "cuda".
        batch_size: None for the workload's own.

    Raises:
        ValueError: ``nonprivate`` is not among the contenders.
    """
    if BASELINE not in contenders:
        raise ValueError(f"contenders must include {BASELINE!r}; got {sorted(contenders)}")
    torch.manual_seed(0)
    model = workload.model().to(device)
    inputs, targets = (tensor.to(device) for tensor in workload.batch(batch_size or workload.batch_size))
    parameters = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    max_norm = float(loop_norms(model, inputs, targets).median())
    expected = loop_sum(model, inputs, targets, max_norm)
    found = LineUp(inputs, targets, parameters, max_norm)
    for name, contender in contenders.items():
        if (reason := contender.missing()) is not None:
            found.absent[name] = {"missing": reason}
        elif name == BASELINE:
            _enter(found, contender, model, expected)
        else:
            try:
                _enter(found, contender, model, expected)
            except Exception as error:  # another library may fail in any way; the others' figures still count
                found.absent[name] = {"failed": f"{type(error).__name__}: {error}"}
    return found


def _enter(field: LineUp, contender: Contender, model: nn.Module, expected: Mapping[str, Tensor]) -> None:
    """Lets a contender take a copy of the model and pass the gate."""
    prepared = contender.prepare(copy.deepcopy(model), field.max_norm)
    error = None
    if prepared.clipped_sum is not None:
        error = relative_error(prepared.clipped_sum(field.inputs, field.targets), expected)
    field.prepared[contender.name], field.errors[contender.name] = prepared, error


def compare(
    workload: Workload,
    contenders: Mapping[str, Contender],
    seconds: float,
    device: str = "cpu",
    batch_size: int | None = None,
) -> dict[str, Any]:
    """Times the contenders' steps on one batch of the workload, interleaved.

    Args:
        workload, contenders, device, batch_size: as for `line_up`.
        seconds: how long to measure, gate and warm-up not counted.

    Returns:
        Plain values: about, batch_size, parameters, max_norm, and for each contender ``ms``, ``over_nonprivate`` and,
        where the loop was timed, ``nxbp_over`` (median, low and high quartile, rounds), then ``gradient_error`` and
        ``correct``. For one that can't run here there is only ``missing``, for one that broke ``failed``: the reason.

    Raises:
        ValueError: ``nonprivate`` is not among the contenders.
    """
    field = line_up(workload, contenders, device, batch_size)
    turns = {name: _turn(ready, field.inputs, field.targets) for name, ready in field.prepared.items()}
    timings = take_turns(turns, seconds, baseline=BASELINE)
    found: dict[str, Any] = field.absent | {name: _row(name, timings, error) for name, error in field.errors.items()}
    return {
        "about": workload.about,
        "batch_size": len(field.targets),
        "parameters": field.parameters,
        "max_norm": field.max_norm,
        "contenders": {name: found[name] for name in contenders},
    }


def _turn(prepared: Prepared, inputs: Tensor, targets: Tensor) -> Callable[[], None]:
    """One step that has ended when it returns."""

    def turn() -> None:
        prepared.step(inputs, targets)
        if inputs.is_cuda:
            torch.cuda.synchronize()

    return turn


def _row(name: str, timings: Timings, error: float | None) -> dict[str, Any]:
    """One contender's figures as plain values."""
    row: dict[str, Any] = {"ms": asdict(timings.milliseconds(name))}
    if name != BASELINE:
        row["over_nonprivate"] = asdict(timings.ratio(name, BASELINE))
    if "nxbp" in timings.seconds and name not in ("nxbp", BASELINE):
        row["nxbp_over"] = asdict(timings.ratio("nxbp", name))
    if error is not None:
        row |= {"gradient_error": error, "correct": error <= GATE}
    return row
