"""What keeps a model from being trained privately: by its modules, and by a trial on a batch."""

from __future__ import annotations

import logging
import random
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ghostclip.clipper import per_example_norms
from ghostclip.clipper.first_pass import check_shape, check_type
from ghostclip.clipper.forwards import LossFunction, check_loss_function
from ghostclip.clipper.trial import without_trace
from ghostclip.errors import GhostClipError, LossShapeError
from ghostclip.graph.source_lines import line_of
from ghostclip.self_check.first_steps import CHECKED, MOST
from ghostclip.self_check.loading import LoadedRows, rows_of
from ghostclip.self_check.mixing import MixingTest
from ghostclip.self_check.trial_losses import TrialLosses
from ghostclip.wrap import Finding, listed, obstacles

__all__ = ["LAYERS_ALONE", "check"]

# Messages say what is wrong, and after that what to do.
REMEDY = re.compile(r"; |\. (?=[A-Z])")

NOT_FINITE = (
    "no example's loss and gradient are finite numbers, so none of them would take part in training",
    "look for infinite or NaN values in the data, divisions by zero, or overflow in float16 (see loss_scale)",
)

NOT_COMPARED = (
    "no losses could be compared in other batches: all examples have the same loss, as those of a batch of zeros, or "
    "the same examples have another loss each time; whether losses depend on other examples was not tested"
)
LAYERS_ALONE = (
    "nothing found in its layers; no batch was run, so what its forward does with examples was not tested: {}call "
    "ghostclip.check(model, loss_fn, batch)"
)
COLLATE_ALONE = (
    "nothing found with this batch; what a collate function does, as padding to the longest text, was not tested: give "
    "check the DataLoader in its place"
)

log = logging.getLogger("ghostclip")


class Findings(list[Finding]):
    """Obstacles, which print as numbered lines; [] where there are none, with what was not tested."""

    untested = LAYERS_ALONE.format("")

    def __repr__(self) -> str:
        if self:
            return f"{len(self)} {'obstacle' if len(self) == 1 else 'obstacles'}:\n{listed(self)}"
        return f"[]: {self.untested}" if self.untested else "[]"


def check(model: nn.Module, loss_fn: LossFunction | None = None, batch: Any = None) -> list[Finding]:
    """Lists the obstacles to training ``model`` privately; [] if none is found. It changes nothing.

    ``check(model)`` looks at the layers alone and runs nothing, as its result says when it is printed: examples that
    the forward itself mixes, by ``x - x.mean(0)`` for instance, are found with ``loss_fn`` and ``batch`` only.

    Args:
        model: any torch module.
        loss_fn: (model, batch) -> losses [B]. With it, two further tests run on ``batch``. The first reports losses
            that change with other examples in the batch, or in a smaller batch, and buffers of the model that keep
            something of the examples. The second computes the norms and reports what is refused there. These findings
            name the module and, if it is known, the line of code outside of torch and ghostclip.
        batch: at least two examples, a few are enough: tensors with the examples in dimension 0, or lists with one
            entry for each, in any nesting of lists, dicts, dataclasses and objects. Or a DataLoader, of which up to 32
            random examples are loaded in batches of different company. Only that tests what ``collate_fn`` does, such
            as padding to the longest. ``engine.batches()`` and the loader of Opacus's interface serve as well.

    Raises:
        ValueError: only one of ``loss_fn`` and ``batch`` is given, or the batch has fewer than two examples.
        TypeError: ``model`` is no torch module, ``loss_fn`` no function of (model, batch), or ``batch`` a data set
            or an iterator.
    """
    findings = Findings(obstacles(model))
    if (loss_fn is None) != (batch is None):
        raise ValueError("check takes loss_fn and batch together, to try whether examples mix, or neither of them")
    if loss_fn is None:
        return findings
    check_loss_function(loss_fn, batch)
    findings.untested = COLLATE_ALONE if _loaded_from(batch) is None else ""
    known = {finding.path for finding in findings}
    rows = _rows(model, loss_fn, batch)
    mixing, compared = _mixing(TrialLosses(loss_fn, model, rows))
    findings += [each for each in mixing if each.path not in known]
    if not findings:
        findings += _refusal(model, loss_fn, rows.load(range(len(rows))).batch)
    if not findings and compared:
        CHECKED.add(model)
    elif not findings:
        log.warning("check: %s", NOT_COMPARED)
    return findings


def _loaded_from(batch: Any) -> tuple[Any, Callable[[Any], Any], int | None] | None:
    """A loader's data set, its collate function and the number of rows, None for a stream; None for one batch."""
    if hasattr(batch, "source") and hasattr(batch, "dataset_size"):  # `PrivacyEngine.batches`
        return *batch.source, batch.dataset_size
    loader = getattr(batch, "given", batch)  # what the user gave make_private, of the loader that it returned
    if not isinstance(loader, DataLoader):
        return None
    rows = loader.dataset
    stream = isinstance(rows, IterableDataset) or not hasattr(rows, "__getitem__")
    return rows, loader.collate_fn, None if stream else len(rows)  # type: ignore[arg-type]


def _rows(model: nn.Module, loss_fn: LossFunction, batch: Any) -> LoadedRows:
    """The rows to be tried."""
    if (loaded := _loaded_from(batch)) is not None:
        dataset, collate, size = loaded
        if size is None:
            raise TypeError("check takes a DataLoader over a data set that has single examples by number; got a stream")
        return LoadedRows(dataset, collate, random.sample(range(size), min(MOST, size)), lambda found: found)
    if isinstance(batch, (Dataset, Iterator)):
        raise TypeError(
            f"batch must be one batch or a DataLoader; got {type(batch).__name__}: give DataLoader(dataset)"
        )
    with without_trace(model):
        check_type(losses := loss_fn(model, batch))
        return rows_of(batch, losses.numel())


def _mixing(trial: TrialLosses) -> tuple[list[Finding], bool]:
    """How losses depend on other examples, and what the model keeps of them; and whether losses could be compared.

    ValueError for fewer than two.
    """
    try:
        check_shape(trial.first.losses)
    except LossShapeError as error:
        return [Finding("", *_parts(error))], False
    if len(trial.first.losses) < 2:
        raise ValueError(f"batch must have at least two examples, to see whether they mix; got {len(trial.rows)}")
    test = MixingTest(trial, log.warning)
    found = [test.kept(), test.read(), test.mixed(), test.ignored()]
    return [each for each in found if each], test.compared


def _refusal(model: nn.Module, loss_fn: LossFunction, batch: Any) -> list[Finding]:
    """What the norms of a batch are refused for; [] where they aren't."""
    graphs: list[Tensor] = []

    def noted(model: nn.Module, batch: Any) -> Tensor:
        graphs.append(loss_fn(model, batch))
        return graphs[-1]

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Anomaly Detection")
            # In anomaly mode torch keeps the line that each node of the graph comes from.
            with torch.autograd.detect_anomaly(check_nan=False):
                norms = per_example_norms(model, noted, batch)
    except GhostClipError as error:
        line = line_of(getattr(error, "place", None), graphs)
        return [Finding(_module_of(model, getattr(error, "name", "")), *_parts(error), line)]
    finite = norms.isfinite() & graphs[-1].detach().isfinite()
    return [] if bool(finite.any()) else [Finding("", *NOT_FINITE)]


def _parts(error: GhostClipError) -> tuple[str, str]:
    """(problem, remedy) of a message."""
    problem, _, remedy = REMEDY.sub("\0", str(error), count=1).partition("\0")
    return problem, remedy


def _module_of(model: nn.Module, name: str) -> str:
    """The path of a module of that name, or of the one that has a parameter, or the first of several, of that name."""
    first = name.partition(", ")[0]
    known = dict(model.named_modules())
    return next((path for path in (first, first.rpartition(".")[0]) if path in known), "")
