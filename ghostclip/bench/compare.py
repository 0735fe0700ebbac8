"""One workload, all contenders: the gradient gate first, then the clock."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ghostclip.bench.contenders import CannotRun, Contender, Prepared
from ghostclip.bench.lanes import Entry, in_lanes
from ghostclip.bench.measure import Timings, take_turns
from ghostclip.bench.reference import RULES, loop_norms, loop_sums, relative_error, what_entered, whole_norms
from ghostclip.bench.roster import CONTENDERS
from ghostclip.bench.workloads import WORKLOADS, Workload

__all__ = ["BASELINE", "GATE", "LineUp", "compare", "line_up"]

BASELINE = "nonprivate"
GATE = 1e-4  # the relative error of a clipped sum from which on a contender is marked WRONG
# Where rounding alone moves a gradient by more (a ReLU on the other side of its kink, a maximum at another place), the
# gate opens by so much more than that, and no wider than this.
SLACK, WIDEST = 4.0, 1e-2


@dataclass
class LineUp:
    """Contenders with their own copies of a model, after the gate, and the batch they ran on.

    Attributes:
        inputs, targets: the batch.
        parameters: how many numbers are trained.
        max_norm: the median norm of the batch, so that the gate sees clipped and unclipped examples.
        gate: the largest error that is not WRONG.
        prepared: those that can run.
        errors: relative error of each one's clipped sum, to the loop's or, where that is beyond the gate and the one in
            float64 is within GATE, to that; None for one that doesn't clip.
        seconds: what preparing, the gate and a first step took, with compilation where there is any.
        absent: the others: ``{name: {"missing": reason}}``, or ``"failed"`` for one that broke at the gate.
    """

    inputs: Tensor
    targets: Tensor
    parameters: int
    max_norm: float
    gate: float
    prepared: dict[str, Prepared] = dataclasses.field(default_factory=dict)
    errors: dict[str, float | None] = dataclasses.field(default_factory=dict)
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    absent: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)


class _Truth(NamedTuple):
    """What a clipped sum must equal, and ``sum_i v_i ||g_i||``, which says how exactly float32 can."""

    sums: Mapping[str, Tensor]
    entered: Mapping[str, float]


def _truths(
    model: nn.Module, workload: Workload, inputs: Tensor, targets: Tensor, norms: dict[str, Tensor], max_norm: float
) -> dict[str, _Truth]:
    """The loop's clipped sum under each rule, and its plain sum under the name "sum"."""
    weights = {rule: weigh(norms, max_norm) for rule, weigh in RULES.items()}
    weights["sum"] = {name: torch.ones_like(norm) for name, norm in norms.items()}
    sums = loop_sums(model, workload.losses, inputs, targets, weights)
    return {rule: _Truth(sums[rule], what_entered(norms, weights[rule])) for rule in weights}


def _in_float64(
    model: nn.Module, workload: Workload, inputs: Tensor, targets: Tensor, max_norm: float
) -> dict[str, _Truth] | None:
    """The truths of the same loop in float64, where some ReLU may be on the other side of its kink; None without."""
    try:
        wide = copy.deepcopy(model).double()
        inputs = inputs.double() if inputs.is_floating_point() else inputs
        norms = loop_norms(wide, workload.losses, inputs, targets)
        return _truths(wide, workload, inputs, targets, norms, max_norm)
    except Exception:  # a model may be bound to its type, or too large: the float32 loop stands then
        return None


def _gate(model: nn.Module, workload: Workload, inputs: Tensor, targets: Tensor, truth: _Truth) -> float:
    """The gate's width, from how far rounding brings the gradient of the batch's summed loss from the loop's sum."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    total = workload.losses(model(inputs), targets).sum()
    whole = dict(zip(trained, torch.autograd.grad(total, list(trained.values())), strict=True))
    rounding = relative_error(whole, truth.sums, truth.entered)
    return min(max(GATE, SLACK * rounding), WIDEST)


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
    with _full_precision():
        return _line_up(workload, contenders, device, batch_size)


def _line_up(workload: Workload, contenders: Mapping[str, Contender], device: str, batch_size: int | None) -> LineUp:
    torch.manual_seed(0)
    model, inputs, targets = workload.on(device, batch_size or workload.batch_size)
    parameters = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    norms = loop_norms(model, workload.losses, inputs, targets)
    max_norm = float(whole_norms(norms).median())
    truths = _truths(model, workload, inputs, targets, norms, max_norm)
    wide_truths = functools.cache(lambda: _in_float64(model, workload, inputs, targets, max_norm))
    found = LineUp(inputs, targets, parameters, max_norm, _gate(model, workload, inputs, targets, truths["sum"]))
    for name, contender in contenders.items():
        if (reason := contender.missing()) is not None:
            found.absent[name] = {"missing": reason}
            continue
        try:
            # Moving it lays a copied recurrent layer's weights out as cuDNN wants them.
            _enter(found, contender, copy.deepcopy(model).to(device), workload, truths, wide_truths)
        except CannotRun as error:
            found.absent[name] = {"missing": str(error)}
        except Exception as error:  # another library may fail in any way; the others' figures still count
            if name == BASELINE:
                raise
            found.absent[name] = {"failed": f"{type(error).__name__}: {error}"}
    return found


@contextmanager
def _full_precision() -> Iterator[None]:
    """Convolutions and recurrences without TensorFloat-32, whose ten bits would hide errors; the clock runs with it."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def _enter(
    field: LineUp,
    contender: Contender,
    model: nn.Module,
    workload: Workload,
    truths: Mapping[str, _Truth],
    wide_truths: Callable[[], Mapping[str, _Truth] | None],
) -> None:
    """Lets a contender take the model, pass the gate and make a step.

    Who is not where the loop is may be within GATE of the same loop in float64: in float32 the loop's own rounding may
    have put a ReLU of a single example on the other side of its kink.
    """
    started = time.perf_counter()
    prepared = contender.prepare(model, workload.losses, field.max_norm)
    error = None
    if prepared.clipped_sum is not None:
        found = prepared.clipped_sum(field.inputs, field.targets)
        error = relative_error(found, *truths[contender.clips])
        if error > field.gate and (wide := wide_truths()) is not None:
            exact = relative_error(found, *wide[contender.clips])
            error = exact if exact <= GATE else error
    prepared.turn(field.inputs, field.targets)()
    field.prepared[contender.name], field.errors[contender.name] = prepared, error
    field.seconds[contender.name] = time.perf_counter() - started


def compare(
    workload: Workload,
    contenders: Mapping[str, Contender],
    seconds: float,
    device: str = "cpu",
    batch_size: int | None = None,
    *,
    apart: bool = False,
) -> dict[str, Any]:
    """Times the contenders' steps on one batch of the workload, interleaved.

    Args:
        workload, contenders, device, batch_size: as for `line_up`.
        seconds: how long to measure, gate and warm-up not counted.
        apart: whether each contender's steps are timed in a process of its own, as a user trains: in one process a
            contender's page faults depend on what the others freed. The gate is passed in this process all the same.
            A script that asks for it does so under ``if __name__ == "__main__"``, as multiprocessing needs it.

    Returns:
        Plain values: about, batch_size, parameters, max_norm, gate, and for each contender ``ms``, ``over_nonprivate``
        and, where the loop was timed, ``nxbp_over`` (median, low and high quartile, rounds), then ``gradient_error``
        and ``correct``, and ``ready_seconds``, which preparing, the gate (not where apart) and the first step took.
        For one that can't run here there is only ``missing``, for one that broke ``failed``: the reason.

    Raises:
        ValueError: ``nonprivate`` is not among the contenders; or a process of its own couldn't find the workload or
            a contender by name.
        Retired: ``nonprivate`` broke in its process.
    """
    if apart:
        _check_names(workload, contenders)
    field = line_up(workload, contenders, device, batch_size)
    timings = _apart(field, workload, seconds, device) if apart else _together(field, seconds)
    found: dict[str, Any] = field.absent | {name: _row(name, timings, field) for name in timings.seconds}
    return {
        "about": workload.about,
        "batch_size": len(field.targets),
        "parameters": field.parameters,
        "max_norm": field.max_norm,
        "gate": field.gate,
        "contenders": {name: found[name] for name in contenders},
    }


def _check_names(workload: Workload, contenders: Mapping[str, Contender]) -> None:
    """Refuses what a new process couldn't find again."""
    foreign = [name for name, contender in contenders.items() if CONTENDERS.get(name) is not contender]
    if WORKLOADS.get(workload.name) is not workload:
        foreign.insert(0, workload.name)
    if foreign:
        raise ValueError(
            "apart=True: a process of its own finds workloads and contenders by name, in WORKLOADS and CONTENDERS of "
            f"ghostclip.bench; got others: {', '.join(foreign)}; register them, or leave apart out"
        )


def _together(field: LineUp, seconds: float) -> Timings:
    """Times those that passed the gate in this process."""
    turns = {name: prepared.turn(field.inputs, field.targets) for name, prepared in field.prepared.items()}
    return take_turns(turns, seconds, baseline=BASELINE)


def _apart(field: LineUp, workload: Workload, seconds: float, device: str) -> Timings:
    """Times those that passed the gate in processes of their own; what they held in this one is let go of before."""
    entries = {
        name: Entry.here(workload.name, name, len(field.targets), field.max_norm, device) for name in field.prepared
    }
    field.prepared.clear()
    gc.collect()
    laps = in_lanes(entries, seconds, baseline=BASELINE)
    field.seconds |= laps.ready
    field.absent |= laps.retired
    return laps.timings


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
