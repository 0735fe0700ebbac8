"""The plan of a clipper as a table: layer, rule, which way to its norms, and what that was measured to cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import nn

from ghostclip.nn.base import GhostLayer
from ghostclip.planner import StrategyChoice

__all__ = ["Row", "StrategyTable", "plan_of"]

HEADER = ("layer", "parameter", "rule of its gradient", "shape", "norm by", "gradients kept", "why", "measured, ms")

# What the names of strategies stand for, and the column beside them.
LEGEND = {
    "one formula": "what the layer was given, and the gradient of its output, give the norm at once",
    "any": "the last batch was empty",
    "direct": "forms each example's gradient, and its norm of that",
    "gram": "forms no gradient: a norm is a sum over pairs of positions",
    "half gram": "gram, over each pair once",
    "patches": "direct, with the pixels under each place of the kernel copied into one row",
    "shifts": "direct, of the images as they lie, shifted for each pixel of the kernel",
    "windows": "gram, of the images' own pixels in place of patches",
}
KEPT = (
    "gradients kept: whether each example's gradient stays in memory for the clipped sum; else what it is made of does"
)


@dataclass(frozen=True)
class Row:
    """One trained parameter's line of the plan.

    Attributes:
        layer: name of the module that owns the parameter.
        parameter: its own name there.
        rule: whose gradient rule is used.
        shape: of the parameter.
        strategy: how its squared norms are computed, "at the first batch" while nothing was chosen.
        kept: whether its per-example gradients are kept for the clipped sum.
        why: the reason for the strategy.
        milliseconds: measured cost by candidate; empty when nothing had to be measured.
        raised: the candidates that raised while they were measured, and what; they are not applicable.
    """

    layer: str
    parameter: str
    rule: str
    shape: tuple[int, ...]
    strategy: str
    kept: bool
    why: str
    milliseconds: dict[str, float]
    raised: dict[str, str] = field(default_factory=dict)

    def cells(self) -> tuple[str, ...]:
        """The line as texts, in the order of the table's columns."""
        costs = _cheapest_first(self.milliseconds)
        costs += "".join([f"; {name} is not applicable ({error})" for name, error in self.raised.items()])
        shape = " x ".join(map(str, self.shape))
        return (self.layer or "(model)", self.parameter, self.rule, shape, self.strategy, "yes" if self.kept else "no",
                self.why, costs)  # fmt: skip


@dataclass(frozen=True)
class StrategyTable:
    """The rows of a plan; ``str()`` prints them as a table, with what the names of its strategies stand for."""

    rows: tuple[Row, ...]

    def __str__(self) -> str:
        table = [HEADER, *(row.cells() for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in table]
        used = {name for row in self.rows for name in (row.strategy, *row.milliseconds, *row.raised)}
        legend = [f"{name}: {words}" for name, words in LEGEND.items() if name in used]
        return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:], *legend, KEPT])

    __repr__ = __str__  # what a notebook shows

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)


def _cheapest_first(costs: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {cost:.3g}" for name, cost in sorted(costs.items(), key=lambda each: each[1]))


def plan_of(model: nn.Module, choices: Mapping[int, StrategyChoice] | None) -> StrategyTable:
    """The plan as the last batch left it (choices by id of Parameter); None before one: what the layers alone tell."""
    rows = []
    none = StrategyChoice("at the first batch" if choices is None else "unused", False, "")
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        layer, _, own = name.rpartition(".")
        module = model.get_submodule(layer)
        ruled = isinstance(module, GhostLayer) and own in module.parameter_names(module)
        user = model.get_submodule(layer.partition("parametrizations.")[0].rstrip("."))
        rule = (str(module.rule) or type(module).__name__) if ruled else f"fallback ({type(module).__name__})"
        if not ruled and isinstance(user, GhostLayer) and user.has_computed_weights():
            rule = f"{user.rule} (computed weight)"
        choice = (choices or {}).get(id(parameter), none)
        of_choice = choice.name, choice.keep, choice.reason, choice.milliseconds, choice.raised
        rows.append(Row(layer, own, rule, tuple(parameter.shape), *of_choice))
    return StrategyTable(tuple(rows))
