"""One workload, all contenders: the gradient gate first, then the clock."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ghostclip.bench.contenders import CannotRun, Contender, Prepared
from ghostclip.bench.measure import Timings, take_turns, timed
from ghostclip.bench.methods import BASELINE
from ghostclip.bench.reference import Reference
from ghostclip.bench.workloads import Workload

__all__ = ["LineUp", "compare", "line_up"]


class LineUp(NamedTuple):
    """Contenders with their own copies of a model, after the gate, and the batch they ran on; tables by name.

    Attributes:
        parameters: how many numbers are trained.
        max_norm, gate: the clipping norm, and the largest error that is not WRONG, as a `Reference` has them.
        prepared: those that can run.
        errors: the error of each one's clipped sum, by the `Reference`; None for one that doesn't clip.
        seconds: what preparing, the gate and a first step took, with compilation where there is any.
        absent: the others: ``{"missing": reason}``, or ``"failed"`` for one that broke at the gate.
    """

    inputs: Tensor
    targets: Tensor
    parameters: int
    max_norm: float
    gate: float
    prepared: dict[str, Prepared]
    errors: dict[str, float | None]
    seconds: dict[str, float]
    absent: dict[str, dict[str, str]]


# TensorFloat-32's ten bits would hide errors of convolutions and recurrences; the clock runs with it.
@torch.backends.cudnn.flags(enabled=True, allow_tf32=False)
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
    model, inputs, targets = workload.on(device, batch_size or workload.batch_size)
    parameters = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    reference = Reference(model, workload.losses, inputs, targets)
    found = LineUp(inputs, targets, parameters, reference.max_norm, reference.gate, {}, {}, {}, {})
    for name, contender in contenders.items():
        started, error = time.perf_counter(), None
        try:
            if (reason := contender.missing()) is not None:
                raise CannotRun(reason)
            # Moving it lays a copied recurrent layer's weights out as cuDNN wants them.
            prepared = contender.prepare(copy.deepcopy(model).to(device), workload.losses, found.max_norm)
            if prepared.clipped_sum is not None:
                error = reference.error(contender.clips, prepared.clipped_sum(inputs, targets))
            prepared.turn(inputs, targets)()
        except CannotRun as why:
            found.absent[name] = {"missing": str(why)}
        except Exception as why:  # another library may fail in any way; the others' figures still count
            if name == BASELINE:
                raise
            found.absent[name] = {"failed": f"{type(why).__name__}: {why}"}
        else:
            found.prepared[name], found.errors[name] = prepared, error
            found.seconds[name] = time.perf_counter() - started
    return found


def compare(
    workload: Workload,
    contenders: Mapping[str, Contender],
    seconds: float,
    device: str = "cpu",
    batch_size: int | None = None,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Times the contenders' steps on one batch of the workload, interleaved.

    Args:
        workload, contenders, device, batch_size: as for `line_up`.
        seconds: how long to measure, gate and warm-up not counted.
        clock: what steps are timed by, as for `timed`.

    Returns:
        Plain values. They are about, batch_size, parameters, max_norm, gate, and for each contender ``ms``,
        ``over_nonprivate`` and, where the loop was timed, ``nxbp_over`` (median, low and high quartile, rounds), then
        ``gradient_error`` and ``correct``, and ``ready_seconds``, which preparing, the gate and the first step took.
        For one that can't run here there is only ``missing``, for one that broke ``failed``: the reason.

    Raises:
        ValueError: ``nonprivate`` is not among the contenders.
    """
    field = line_up(workload, contenders, device, batch_size)
    turns = {name: timed(ready.turn(field.inputs, field.targets), clock) for name, ready in field.prepared.items()}
    timings = take_turns(turns, seconds, baseline=BASELINE)
    rows: dict[str, Any] = field.absent | {name: _row(name, timings, field) for name in timings.seconds}
    return {
        "about": workload.about,
        "batch_size": len(field.targets),
        "parameters": field.parameters,
        "max_norm": field.max_norm,
        "gate": field.gate,
        "contenders": {name: rows[name] for name in contenders},
    }


def _row(name: str, timings: Timings, field: LineUp) -> dict[str, Any]:
    """One contender's figures as plain values."""
    row: dict[str, Any] = {"ms": asdict(timings.milliseconds(name)), "ready_seconds": round(field.seconds[name], 3)}
    if name != BASELINE:
        row["over_nonprivate"] = asdict(timings.ratio(name, BASELINE))
    if "nxbp" in timings.seconds and name not in ("nxbp", BASELINE):
        row["nxbp_over"] = asdict(timings.ratio("nxbp", name))
    if (error := field.errors[name]) is not None:
        row |= {"gradient_error": error, "correct": error <= field.gate}
    return row
