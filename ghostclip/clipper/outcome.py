"""What a first pass found: norms of the whole gradient, of layers and of parameters, and sums of what it holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from ghostclip.clipper.collector import NormCollector
from ghostclip.clipper.groupwise import POSTPONED_BYTES, Part
from ghostclip.nn.base import LayerCall, Repeat
from ghostclip.norms.affine import LinearPair, weighted_sums_of
from ghostclip.norms.rounding import rounding_margin
from ghostclip.norms.term import wide
from ghostclip.norms.whole import norms
from ghostclip.planner import StrategyChoice

__all__ = ["FirstPass", "add_sums", "add_to_gradient", "norm_dtype", "owners_of"]


def norm_dtype(trained: Sequence[tuple[str, nn.Parameter]]) -> torch.dtype:
    """float64 as soon as one parameter is, else float32."""
    double = any(parameter.dtype == torch.float64 for _, parameter in trained)
    return torch.float64 if double else torch.float32


class FirstPass:
    """The outcome of a first pass, by parameter, layer, or for the whole gradient.

    Args:
        collector: what was gathered.
        trained: the model's trained parameters by name.
        calls: the uses of layers behind the losses.
        row_orders: how each call's rows are grouped, by id(call).
        scale: what the losses were multiplied with, and results are divided by.
        holds_graph: whether the graph is still there, though it may not have been asked for.
        repeat: the pass is the first of these two.
    """

    def __init__(
        self,
        collector: NormCollector,
        trained: Sequence[tuple[str, nn.Parameter]],
        calls: Sequence[LayerCall],
        row_orders: Mapping[int, str],
        scale: float = 1.0,
        holds_graph: bool = True,
        repeat: Repeat | None = None,
    ) -> None:
        self._found, self._trained, self._scale = collector, trained, scale
        self.calls, self.row_orders, self.holds_graph, self.repeat = calls, row_orders, holds_graph, repeat
        self._dtype = norm_dtype(trained)

    @property
    def kept(self) -> frozenset[int]:
        """Ids of parameters whose clipped sums need no second backward."""
        together = [owner for owners, _ in self._found.affines for owner in owners]
        return frozenset((*together, *(owner for owner, _ in self._found.terms)))

    @property
    def keeps_all(self) -> bool:
        """Whether that holds for all of them."""
        return not self.unkept_calls(self.kept)

    def unkept_calls(self, kept: frozenset[int]) -> list[LayerCall]:
        """Uses of layers with parameters that are not among ``kept``."""
        return [call for call in self.calls if not kept.issuperset(owners_of(call))]

    @property
    def choices(self) -> Mapping[int, StrategyChoice]:
        """What the planner chose, by the id of the parameter."""
        return self._found.choices

    def _root(self, squared: Sequence[Tensor]) -> Tensor:
        if not squared:
            return torch.zeros(self._found.examples, dtype=self._dtype, device=self._found.device)
        return self._unscaled(norms(squared, self._dtype))

    def _of_parameters(self) -> dict[int, list[Tensor]]:
        """Squared norms [B] by the id of the parameter."""
        found: dict[int, list[Tensor]] = {}
        for owners, squared in self._found.squared:
            for owner, row in zip(owners, squared if squared.dim() == 2 else [squared], strict=True):
                found.setdefault(owner, []).append(row)
        return found

    def measure_exactly(self) -> None:
        """Has norms measured in no form that may cancel, where it `keeps_all`."""
        self._found.measure_exactly()

    def norms(self) -> Tensor:
        """||g_i||, [B]."""
        return self._root([squared for _, squared in self._found.squared])

    def norms_and_bounds(self) -> tuple[Tensor, Tensor]:
        """||g_i|| [B] as measured, and with the rounding margin that weights are computed with.

        Where the margin is not finite, neither is the norm.
        """
        return self._with_margin(self.norms(), [each for _, each in self._found.absolute])

    def _with_margin(self, norms: Tensor, absolute: list[Tensor]) -> tuple[Tensor, Tensor]:
        if not absolute:
            return norms, norms
        margin = self._unscaled(rounding_margin(absolute)).to(norms.dtype)
        return norms + 0.0 * margin, norms + margin

    def norms_by_parameter(self) -> dict[str, Tensor]:
        """{parameter name: [B]}, zeros for parameters that took no part."""
        squared = self._of_parameters()
        return {name: self._root(squared.get(id(parameter), [])) for name, parameter in self._trained}

    def norms_by_layer(self) -> dict[str, Tensor]:
        """{name of the module that owns the parameters: [B]}."""
        return self.norms_by_group({name: name.rpartition(".")[0] for name, _ in self._trained})

    def norms_by_group(self, partition: Mapping[str, str]) -> dict[str, Tensor]:
        """{group: [B]} for {parameter name: group}."""
        groups: dict[str, list[Tensor]] = {}
        found = self._of_parameters()
        for name, parameter in self._trained:
            groups.setdefault(partition[name], []).extend(found.get(id(parameter), []))
        return {group: self._root(squared) for group, squared in groups.items()}

    def norms_and_bounds_by_group(self, partition: Mapping[str, str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The same as measured, and with the rounding margin; as `norms_and_bounds`."""
        absolute: dict[str, list[Tensor]] = {}
        group_of = {id(parameter): partition[name] for name, parameter in self._trained}
        for owner, each in self._found.absolute:
            absolute.setdefault(group_of[owner], []).append(each)
        found = {
            group: self._with_margin(norms, absolute.get(group, []))
            for group, norms in self.norms_by_group(partition).items()
        }
        return {group: norms for group, (norms, _) in found.items()}, {group: b for group, (_, b) in found.items()}

    @torch.no_grad()
    def per_example_grads(self) -> dict[str, Tensor]:
        """{parameter name: [B, *shape]}, zeros for parameters that took no part."""
        found: dict[str, Tensor] = {}
        for name, parameter in self._trained:
            parts = {part: term for part, term in self._found.terms.items() if part[0] == id(parameter)}
            if (whole := parts.get((id(parameter), None))) is not None and len(parts) == 1:
                found[name] = whole.per_example()
                continue
            full = wide(parameter.detach()).new_zeros(self._found.examples, *parameter.shape)
            for (_, rows), term in parts.items():
                full[:, slice(*rows) if rows else slice(None)] += term.per_example()
            found[name] = full
        return {name: self._unscaled(gradients) for name, gradients in found.items()}

    def weighted_sums(self, weights: Tensor, finite: Tensor | None) -> Iterator[tuple[Part, Tensor]]:
        """``sum_i weights[i] g_i`` of each part, letting go of the terms one after another.

        Args:
            weights: [B], zero for examples that are left out.
            finite: [B] bool, False where an example must not touch the sum (0 * inf would be NaN); None when all may.
        """
        terms = self._found.terms
        for part in list(terms):
            term = terms.pop(part)
            with torch.no_grad():
                amount = self._found.weighted_sum(term if finite is None else term.keep_only(finite), weights)
            yield part, self._unscaled(amount)
        while self._found.affines:
            yield from self._of_several(weights, finite)

    @torch.no_grad()
    def _of_several(self, weights: Tensor, finite: Tensor | None) -> list[tuple[Part, Tensor]]:
        """The sums of the last linear layers that are held, of so many that they are small together."""
        taken: list[tuple[list[int], LinearPair]] = []
        left = POSTPONED_BYTES
        while self._found.affines and (left > 0 or not taken):
            taken.append(self._found.affines.pop())
            left -= taken[-1][1].nbytes
        affines = [affine if finite is None else affine.keep_only(finite) for _, affine in taken]
        found: list[tuple[Part, Tensor]] = []
        for (owners, _), amounts in zip(taken, weighted_sums_of(affines, [weights] * len(affines)), strict=True):
            found += [((owner, None), self._unscaled(each)) for owner, each in zip(owners, amounts, strict=True)]
        return found

    def _unscaled(self, found: Tensor) -> Tensor:
        return found if self._scale == 1.0 else found / self._scale


def owners_of(call: LayerCall) -> list[int]:
    """Ids of the parameters a call used."""
    return [id(call.layer._parameters[name]) for name in call.parameters]


def add_sums(trained: Sequence[tuple[str, nn.Parameter]], sums: Sequence[Tensor | None]) -> None:
    """Each parameter's sum, where it has one, added to its p.grad."""
    for (_, parameter), total in zip(trained, sums, strict=True):
        if total is not None:
            add_to_gradient(parameter, None, total)


def add_to_gradient(parameter: nn.Parameter, rows: tuple[int, int] | None, amount: Tensor) -> None:
    """``amount`` added to p.grad, or to the given rows of it, in the parameter's dtype."""
    if amount.dtype != parameter.dtype:
        amount = amount.to(parameter.dtype)
    if rows is None:
        if parameter.grad is None:
            parameter.grad = amount if amount.is_contiguous() else amount.contiguous()
        else:
            parameter.grad += amount
        return
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    parameter.grad[slice(*rows)] += amount
