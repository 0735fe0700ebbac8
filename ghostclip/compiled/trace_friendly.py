"""The eager passes as a compiled graph wants them: without a look at any value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ghostclip.clipper.collector import Keep, norm_dtype
from ghostclip.clipper.second_pass import TwoPasses
from ghostclip.clipping import Automatic, Flat, Thresholds

__all__ = ["Clipped", "learn", "steps_through_time", "trace_friendly"]


@dataclass
class Clipped:
    """What one physical batch adds.

    Attributes:
        losses: [B].
        norms, weights: [B], or {group: [B]}.
        sums: clipped sums of the trained parameters, in their order, float32 or wider; None for one that took no part.
    """

    losses: Tensor
    norms: Any
    weights: Any
    sums: list[Tensor | None]


def learn(passes: TwoPasses, losses: Tensor, padded: bool) -> str | None:
    """Measures strategies and proves the grouping, so that a graph may take them for granted; else why it can't."""
    policy = passes.clipping
    alone = isinstance(policy, (Flat, Automatic, Thresholds)) or getattr(policy, "weighs_each_alone", False)
    if padded and not alone:
        return f"{type(passes.clipping).__name__} may look at all norms at once, and batches are padded"
    run = passes.first_pass(losses, Keep.ALL, retain_graph=False)
    if run.unkept_calls():
        return (
            "its graph keeps all gradients that it measures, and the memory budget, torch 2.6 or checkpointing forbids "
            "that"
        )
    return "whose rows are whose has to be measured in the next batch, too" if passes.is_open else None


def trace_friendly(passes: TwoPasses, losses: Tensor, keep: Tensor) -> tuple[Tensor, Clipped]:
    """Both passes without a look at any value, so that they can be written down as one graph.

    Args:
        losses: [B].
        keep: [B], 0 for rows that are no examples.

    Returns:
        A number, and the result if it is finite: all norms and losses are, and no gradient came where there had been
        zeros when ownership was measured.
    """
    trained = passes.index.trained()
    keep = keep.to(norm_dtype(trained))
    totals: dict[int, Tensor] = {}
    # Whatever the second pass is, sums are formed of the gradients that were measured.
    run = passes.first_pass(losses, Keep.ALL, retain_graph=False)
    norms, bounds = passes.norms_and_bounds(run)
    weights = tree_map(lambda each: each * keep, passes.clipping.weights(bounds))
    whole = torch.stack(list(norms.values())).sum(0) if isinstance(norms, dict) else norms
    for (owner, rows), amount in passes.weighted_sums(weights, run):
        parameter = next(p for _, p in trained if id(p) == owner)
        wide = torch.promote_types(parameter.dtype, torch.float32)
        amount = amount.to(wide)
        if rows is not None:
            amount, part = torch.zeros_like(parameter, dtype=wide), amount
            amount[slice(*rows)] = part
        totals[owner] = totals[owner] + amount if owner in totals else amount
    fine = (whole + losses.detach()).sum()
    if run.found_nonzero is not None:
        fine = fine.masked_fill(run.found_nonzero, torch.nan)
    return fine, Clipped(losses, norms, weights, [totals.get(id(parameter)) for _, parameter in trained])


def steps_through_time(model: nn.Module) -> str | None:
    """A layer that goes through time step by step: a graph of every step takes minutes to compile, and is slower."""
    for name, module in model.named_modules():
        if isinstance(module, nn.LSTM) and module.proj_size and any(p.requires_grad for p in module.parameters()):
            return f"{name or 'the model'} is an LSTM with projections, whose time steps would be compiled one by one"
    return None
