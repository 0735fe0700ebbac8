"""What keeps a model from being trained privately: by its modules, and by a trial on a batch."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ghostclip.clipper.one_call import per_example_norms
from ghostclip.clipper.replay import Replay
from ghostclip.errors import GhostClipError
from ghostclip.graph.data_swap import exchanged, exchanges, mixed_examples
from ghostclip.graph.source_lines import line_of
from ghostclip.wrap import Finding, obstacles

__all__ = ["check"]

# Messages say what is wrong, and after that what to do.
REMEDY = re.compile(r"; |\. (?=[A-Z])")


def check(
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Any], Tensor] | None = None,
    batch: Any = None,
) -> list[Finding]:
    """Lists all obstacles to training ``model`` privately; [] if there are none. It changes nothing.

    Args:
        model: any torch module.
        loss_fn: (model, batch) -> losses [B]. With it, two further tests run on ``batch``. The first exchanges the
            data of single examples and reports losses of other examples, and buffers of the model, that change. The
            second computes the norms and reports what is refused there. These findings name the module and, if it is
            known, the line of code outside of torch and ghostclip.
        batch: at least two examples, in dimension 0 of its tensors; a few are enough.

    Raises:
        ValueError: only one of ``loss_fn`` and ``batch`` is given, or the batch has fewer than two examples.
        TypeError: ``model`` is no torch module.
    """
    findings = obstacles(model)
    if (loss_fn is None) != (batch is None):
        raise ValueError("check takes loss_fn and batch together, to try whether examples mix, or neither of them")
    if loss_fn is not None:
        known = {finding.path for finding in findings}
        with Replay(model).again():
            found = [Finding(*mixed) for mixed in mixed_examples(model, loss_fn, batch)]
        found += _remembering(model, loss_fn, batch)
        findings += [finding for finding in found if finding.path not in known]
    if loss_fn is not None and not findings:
        findings += _refusal(model, loss_fn, batch)
    return findings


def _remembering(model: nn.Module, loss_fn: Callable[[nn.Module, Any], Tensor], batch: Any) -> list[Finding]:
    """Buffers that get other values when an example's data are exchanged."""
    replay = Replay(model)

    def after(batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        with replay.again():
            losses = loss_fn(model, batch)
            return losses, {name: buffer.clone() for name, buffer in model.named_buffers()}

    losses, first = after(batch)
    examples = losses.numel()
    others = [after(exchanged(batch, example, examples))[1] for example in exchanges(examples)]
    found = []
    for name, value in first.items():
        if any(name in other and not _equal(other[name], value) for other in others):
            path, _, own = name.rpartition(".")
            problem = f"the forward puts something of the batch's data into the buffer {own!r}, which gets no noise"
            remedy = "don't update it in training (put its module into eval mode, or take the update out)"
            found.append(Finding(path, problem, remedy))
    return found


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether two buffers have the same values; one that changes its shape with its batch is a cache."""
    return one.shape != other.shape or bool(torch.isclose(one, other, rtol=0, atol=0, equal_nan=True).all())


def _refusal(model: nn.Module, loss_fn: Callable[[nn.Module, Any], Tensor], batch: Any) -> list[Finding]:
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
                per_example_norms(model, noted, batch)
    except GhostClipError as error:
        problem, _, remedy = REMEDY.sub("\0", str(error), count=1).partition("\0")
        line = line_of(getattr(error, "place", None), graphs)
        return [Finding(_module_of(model, getattr(error, "name", "")), problem, remedy, line)]
    return []


def _module_of(model: nn.Module, name: str) -> str:
    """The path of a module of that name, or of the one that has a parameter, or the first of several, of that name."""
    first = name.partition(", ")[0]
    known = dict(model.named_modules())
    return next((path for path in (first, first.rpartition(".")[0]) if path in known), "")
