"""What `ghostclip train` reached and spent, for its report and as a table."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from importlib.metadata import version

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import ghostclip
from ghostclip import accounting
from ghostclip.bench.losses import class_losses
from ghostclip.bench.machine import commit, describe
from ghostclip.bench.measure import take_turns, timed
from ghostclip.bench.methods import CONTENDERS
from ghostclip.cli.methods import Settings
from ghostclip.cli.training import Outcome, build, norms_of, predicted
from ghostclip.datasets import Data
from ghostclip.report import NormSnapshot, PrivacyCurve, Record, ShownExample, TrainingRun, grouped

__all__ = ["confusion", "misread_digits", "record_of", "run_table", "with_forecast"]

SPEED_SECONDS, SPEED_BATCH = 2.0, 128
BASELINE = "nonprivate"
TIMED = (BASELINE, "cached", "reweight", "nxbp")
# How far epsilon is forecast, as shares of the steps taken.
FURTHER = (1.0, 1.25, 1.5, 1.75, 2.0)
DEPENDENCIES = ("numpy", "scipy", "dp-accounting")

log = logging.getLogger("ghostclip")


def record_of(
    data: Data,
    outcomes: Sequence[Outcome],
    *,
    page: bool,
    speeds: bool,
    command: str | None = None,
    weights: str | None = None,
) -> Record:
    """Everything a report tells, of all runs, the main one first.

    For a ``page`` it counts the test examples of each class by their predicted class, too, and where the first run was
    private measures every training example's gradient norm. With ``speeds`` it times a step of the main methods.
    """
    first, main, timed, snapshot = outcomes[0], outcomes[0].settings, {}, None
    runs, shown = _counted(data, outcomes) if page else ([outcome.run for outcome in outcomes], [])
    machine = describe()
    if speeds:
        log.info("timing a step of each method; this takes about %d s", SPEED_SECONDS)
        timed = _examples_per_second(build(main.model, data, main.seed), data.train)
    if page and main.noise_multiplier is not None:
        snapshot = NormSnapshot(norms_of(first, data.train), main.max_norm)
    return Record(
        title=f"{main.model.upper() if len(main.model) < 5 else main.model.title()} on {data.name}",
        settings=asdict(main) | {"training examples": len(data.train), "test examples": len(data.test)},
        runs=runs,
        speeds=timed,
        speed_batch_size=min(SPEED_BATCH, len(data.train)) if speeds else 0,
        privacy=with_forecast(first.curve, main, len(data.train)),
        norms=snapshot,
        machine=machine,
        versions=_versions(),
        command=command,
        shown=shown,
        weights=weights,
        date=f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
    )


def _counted(data: Data, outcomes: Sequence[Outcome]) -> tuple[list[TrainingRun], list[ShownExample]]:
    """The runs with their errors by class, and examples to look at, by the first run of each name."""
    found = [predicted(outcome.model, data.test) for outcome in outcomes]
    labels = data.test.tensors[1]
    first: dict[str, Tensor] = {}
    for outcome, classes in zip(outcomes, found, strict=True):
        first.setdefault(outcome.run.name, classes)
    runs = [
        replace(outcome.run, confusion=confusion(classes, labels, data.classes))
        for outcome, classes in zip(outcomes, found, strict=True)
    ]
    return runs, misread_digits(data, first)


def confusion(classes: Tensor, labels: Tensor, number: int) -> list[list[int]]:
    """How many examples of each class [K] were taken for each class [K], of predicted classes [N] and labels [N]."""
    return torch.bincount(labels * number + classes, minlength=number**2).view(number, number).tolist()


def misread_digits(data: Data, predictions: Mapping[str, Tensor]) -> list[ShownExample]:
    """Of each digit the test image that most models misread, the first of several; public images, so digits alone.

    ``predictions`` is {training: predicted classes [N]}.
    """
    if data.name != "digits":
        return []
    images, labels = data.test.tensors
    wrong = torch.stack([classes != labels for classes in predictions.values()]).sum(0)
    places = [int(torch.where(labels == digit, wrong, -1).argmax()) for digit in range(data.classes)]
    return [
        ShownExample(
            pixels=images[place, 0].tolist(),
            label=int(labels[place]),
            predicted={training: int(classes[place]) for training, classes in predictions.items()},
        )
        for place in places
    ]


def _examples_per_second(model: nn.Module, data: TensorDataset) -> dict[str, float]:
    """{method: examples a second} of a step (clipping, noise and Adam included) on copies of ``model``, in turns.

    The batch is the data's first examples; a method's figure is by the median of its times.
    """
    inputs, labels = (tensor[:SPEED_BATCH] for tensor in data.tensors)
    state = torch.get_rng_state()
    turns = {
        name: timed(CONTENDERS[name].prepare(copy.deepcopy(model), class_losses, 1.0).turn(inputs, labels))
        for name in TIMED
    }
    timings = take_turns(turns, SPEED_SECONDS, baseline=BASELINE)
    torch.set_rng_state(state)
    return {name: 1e3 * len(labels) / timings.milliseconds(name).median for name in turns}


def with_forecast(curve: PrivacyCurve | None, settings: Settings, examples: int) -> PrivacyCurve | None:
    """The curve, continued to twice the steps taken; as it is where other runs of a ledger are counted in it."""
    if curve is None or settings.ledger is not None or not settings.noise_multiplier:
        return curve
    marks = [round(curve.steps[-1] * share) for share in FURTHER]
    event = accounting.Setting(settings.batch_size / examples).event(settings.noise_multiplier)
    further = {
        name: accounting.epsilons_of(settings.before, event, marks, delta=settings.delta, accountant=name.lower())
        for name in curve.epsilons
    }
    return replace(curve, forecast_steps=marks, forecasts=further)


def _versions() -> dict[str, str]:
    """What decides results beside torch and Python, which `describe` has."""
    found = {"ghostclip": ghostclip.__version__} | {name: version(name) for name in DEPENDENCIES}
    return found | ({"commit": name} if (name := commit()) is not None else {})


def run_table(runs: Sequence[TrainingRun], delta: float, speeds: Mapping[str, float], batch_size: int) -> str:
    """One line a training: accuracy, epsilon, seconds, and a step's time over that of ordinary training.

    ``speeds`` is {method: examples a second} of a step of ``batch_size`` examples; {} where none was timed.
    """
    groups = grouped(runs)
    several = any(len(group.runs) > 1 for group in groups)
    by = f"epsilon is an upper bound by privacy loss distributions (PLD) at delta {delta:g}"
    notes = [by] if any(run.epsilons for run in runs) else []
    rows = []
    for group in groups:
        run, range_of = group.first, f"{min(group.accuracies):.1%} to {max(group.accuracies):.1%}"
        row = {"training": run.name, "mean accuracy" if several else "test accuracy": f"{group.mean('accuracy'):.1%}"}
        row |= {f"range of {len(group.runs)} runs": range_of} if several else {}
        row |= {"epsilon": f"{run.epsilons['PLD']:.2f}" if "PLD" in run.epsilons else "none"} if notes else {}
        row["seconds"] = f"{group.mean('seconds'):.1f}"
        if speeds:
            # "auto" keeps what it can, as "cached" does.
            speed = speeds.get("cached" if run.method == "auto" else run.method)
            other = run.model != groups[0].first.model
            row["step time"] = "-" if speed is None or other else f"{speeds[BASELINE] / speed:.2f}"
        rows.append(row)
    if not several:
        notes.append("each row is one training, and another one gives another accuracy (--seeds repeats them)")
    if speeds:
        notes.append(f"step time is over an ordinary step's of the same {batch_size} examples")
    apart = {name: sum(group.total(f"{name}_seconds") for group in groups) for name in ("calibration", "compilation")}
    notes.append("seconds are without " + " and ".join(f"{seconds:.1f} s of {name}" for name, seconds in apart.items()))
    return "\n".join([_aligned([list(rows[0]), *(list(row.values()) for row in rows)]), *notes])


def _aligned(table: list[list[str]]) -> str:
    """The first column to the left, the others to the right, under a rule."""
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    texts = [
        "  ".join(cell.ljust(width) if column == 0 else cell.rjust(width)
                  for column, (cell, width) in enumerate(zip(line, widths, strict=True)))
        for line in table
    ]  # fmt: skip
    return "\n".join([texts[0], "-" * len(texts[0]), *texts[1:]])
