"""Norms, weights and clipped sums of one batch, compared with its truth."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .outcome import Outcome
from .policies import Expected
from .settings import Setting
from .truth import SPREAD, UNITS, Truth

__all__ = ["Judge", "Mismatch"]

# How often more draws of the rounding error are made for what those so far don't explain.
LOOKS = 3
# Mixing below this share of an example's gradient isn't told from rounding (SECURITY.md).
FAINT = {torch.float64: 1e-10, torch.float32: 1e-3}
# Types of a larger eps are narrow.
NARROW = 1e-6

# Examples times backwards that a case may add up in one p.grad: the sensitivity in narrow types grows with them.
MOST_ADDED = 64 * 6 * 6


class Mismatch(AssertionError):
    """A result that rounding doesn't explain."""


class Judge:
    """Compares one batch's results with its truth; looks at rounding again before it speaks.

    Attributes:
        loose: whether an example could only be compared to within a hundredth of itself.
        mixes: whether the model mixes examples, and was not refused for this batch.
    """

    def __init__(self, truth: Truth, policy: Expected, setting: Setting, outcome: Outcome, changed: Tensor,
                 mixes: bool = False) -> None:  # fmt: skip
        self.truth, self.policy, self.setting, self.outcome = truth, policy, setting, outcome
        self.changed, self.excused = changed, torch.zeros_like(changed)
        self.looks, self.mixes, self.sensitivity = 0, mixes, policy.bound
        self.norms = truth.by_group(truth.norms(), policy.group_of)

    def _repeatedly(self, check: Any, *arguments: Any) -> None:
        while True:
            try:
                return check(*arguments)
            except Mismatch:
                if self.looks == LOOKS:
                    raise
                self.looks += 1
                self.truth.look_again()

    @property
    def sharp(self) -> Tensor:
        """[B]: finite in every type, not left out for what its numbers did on the way, and more than rounding."""
        return self.truth.finite & self.truth.possible & ~self.excused & ~self._lost

    @property
    def _lost(self) -> Tensor:
        """[B]: of whose gradients rounding or an overflow on the way leaves nothing.

        In wide types only numbers made to be extreme do so. An overflowing square may be inf by one kernel, and a
        finite number by another.
        """
        extreme = self.truth.extreme & self.changed
        nothing = SPREAD * self.truth.errors.norm(dim=1) > self.truth.grads.norm(dim=1)
        nothing &= extreme if self.truth.eps < NARROW else torch.tensor(True)
        return nothing | (extreme & self.truth.overflows)

    @property
    def gone(self) -> Tensor:
        """[B]: finite in none."""
        return ~self.truth.finite & ~self.truth.possible

    def _slack(self) -> dict[str, Tensor]:
        """{group: [B]}, what rounding may do to a group's gradient."""
        return {g: SPREAD * e for g, e in self.truth.by_group(self.truth.errors, self.policy.group_of).items()}

    def _allowed(self) -> dict[str, Tensor]:
        """{group: [B]}, what a measured norm may be off by."""
        slack, relative = self._slack(), self.truth.relative
        floor = self.truth.floor + self._share_of_whole()
        return {g: slack[g] + relative * norm + floor for g, norm in self.norms.items()}

    def _share_of_whole(self) -> Tensor:
        """[B]: rounding of what a part's gradient is left of, as a share of the example's whole one."""
        share = FAINT[self.truth.norm_dtype] if self.mixes else 1e-3 * self.truth.relative
        return share * self.truth.grads.norm(dim=1).nan_to_num(0.0, 0.0, 0.0)

    @property
    def loose_examples(self) -> int:
        """How many can only be compared to within a hundredth of a gradient."""
        whole = self.truth.grads.norm(dim=1)
        slack = SPREAD * self.truth.errors.norm(dim=1)
        return int((self.sharp & (slack > 1e-2 * whole + self.truth.floor)).sum())

    @property
    def loose(self) -> bool:
        """Whether there is one."""
        return self.loose_examples > 0

    def first_pass(self, clipper: Any, losses: Tensor) -> None:
        """Norms for each parameter, and materialised gradients, with the graph kept."""
        per = clipper.norms(losses, per="parameter", retain_graph=True)
        if list(per) != self.truth.names:
            raise Mismatch(f"norms are for {list(per)}, expected {self.truth.names}")
        own = {name: name for name in self.truth.names}
        expected, errors = self.truth.by_group(self.truth.norms(), own), None

        def check() -> None:
            nonlocal errors
            errors = self.truth.by_group(self.truth.errors, own)
            for name, found in per.items():
                off = (found.double() - expected[name]).abs()
                allowed = SPREAD * errors[name] + self.truth.relative * expected[name] + self.truth.floor
                # Rounding of a norm taken apart from a joint one is a share of the whole.
                off = torch.where(found.isfinite() | ~(self.truth.extreme & self.changed), off, 0.0)
                self._refuse(off, allowed + self._share_of_whole(), f"norm of {name}", expected[name])

        self._repeatedly(check)

    def _refuse(self, off: Tensor, allowed: Tensor, what: str, expected: Tensor) -> None:
        wrong = self.sharp & ~(off <= allowed)
        if wrong.any():
            example = int(wrong.nonzero()[0])
            raise Mismatch(
                f"{what} of example {example} is off by {float(off[example]):.3g} from {float(expected[example]):.6g}; "
                f"rounding explains {float(allowed[example]):.3g}"
            )

    def result(self, result: Any, sensitivity: float) -> None:
        """Norms and weights; the share of each example."""
        norms, weights = ({"": v} if isinstance(v, Tensor) else v for v in (result.norms, result.weights))
        most = 1.0 if self.truth.dtype == self.truth.norm_dtype else 1 + MOST_ADDED * torch.finfo(self.truth.dtype).eps
        if not 1 - 1e-9 <= sensitivity / self.policy.bound <= most + 1e-9:
            raise Mismatch(f"sensitivity {sensitivity}, expected {self.policy.bound}")
        self.sensitivity = sensitivity
        if set(norms) != set(self.norms) or set(weights) != set(self.norms):
            raise Mismatch(f"groups {sorted(norms)}, expected {sorted(self.norms)}")
        self._excuse(norms, weights)
        self._repeatedly(self._norms, norms)
        self._repeatedly(self._weights, weights)
        self._repeatedly(self._shares, weights)
        self._note_worst(norms, weights)

    def _excuse(self, norms: dict[str, Tensor], weights: dict[str, Tensor]) -> None:
        """Examples of huge numbers may be left out though their gradients are finite: products on the way were not."""
        left_out = torch.stack([w == 0 for w in weights.values()]).all(0) if weights else self.excused
        not_finite = ~torch.stack([n.isfinite() for n in norms.values()]).all(0) if norms else self.excused
        # So may those of which rounding on the way leaves nothing, as of a saturated product of large numbers.
        nothing = self.truth.errors.norm(dim=1) > self.truth.grads.norm(dim=1)
        self.excused = left_out & not_finite & (self.truth.extreme | nothing) & self.changed

    def _norms(self, norms: dict[str, Tensor]) -> None:
        allowed = self._allowed()
        for group, found in norms.items():
            if found.shape != (self.truth.examples,):
                raise Mismatch(f"norms of shape {list(found.shape)}")
            off = (found.double() - self.norms[group]).abs()
            self._refuse(off, allowed[group], f"norm{f' of {group}' if group else ''}", self.norms[group])

    def _weights(self, weights: dict[str, Tensor]) -> None:
        allowed = self._allowed()
        most = self.policy.weights({g: (n - allowed[g]).clamp_min(0.0) for g, n in self.norms.items()})
        least = self.policy.weights({g: n + 8 * allowed[g] for g, n in self.norms.items()})
        for group, found in weights.items():
            found = found.double()
            if bool((self.gone & (found != 0)).any()):
                raise Mismatch(f"an example that is not finite has weight {found[self.gone].tolist()[:3]}")
            if bool((self.sharp & (self.norms[group] > 0) & ~(found <= most[group] * (1 + 1e-5))).any()):
                raise Mismatch(
                    f"weight {found[self.sharp].tolist()[:4]}, at most {most[group][self.sharp].tolist()[:4]}"
                )
            if bool(
                (self.sharp & ~self.changed & (self.norms[group] > 0) & ~(found >= least[group] * (1 - 1e-2))).any()
            ):
                raise Mismatch(
                    f"weight {found[self.sharp].tolist()[:4]}, at least {least[group][self.sharp].tolist()[:4]}"
                )

    def _contributions(self, weights: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The size of each example's part of the sum [B], and what rounding may add to it."""
        slack = self._slack()
        sizes = torch.stack([weights[g].double() * norm for g, norm in self.norms.items()]).norm(dim=0)
        return sizes, torch.stack([weights[g].double() * slack[g] for g in self.norms]).norm(dim=0)

    def _shares(self, weights: dict[str, Tensor]) -> None:
        if not self.norms:
            return
        # What the noise is scaled by: in narrow types it has room for their rounding.
        (sizes, more), bound = self._contributions(weights), self.sensitivity
        wrong = self.sharp & ~(sizes <= bound * (1 + 1e-5) + more)
        if wrong.any():
            raise Mismatch(f"one example contributes {float((sizes[wrong] / bound).max()):.6f} of the sensitivity")

    def _note_worst(self, norms: dict[str, Tensor], weights: dict[str, Tensor]) -> None:
        if not self.norms or not self.truth.examples:
            return
        (sizes, more), bound = self._contributions(weights), self.policy.bound
        fine = self.sharp & (more < 1e-6 * bound)
        if fine.any():
            self.outcome.worst_share = max(self.outcome.worst_share, float((sizes[fine] / bound).max()))
            for group, norm in self.norms.items():
                slack = self._slack()[group]
                own = fine & (norm > 1e6 * self.truth.floor) & (slack < 0.1 * self.truth.relative * norm)
                if own.any():
                    error = float(((norms[group].double() - norm).abs() / norm)[own].max())
                    known = self.outcome.worst_error.get(self.setting.dtype, 0.0)
                    self.outcome.worst_error[self.setting.dtype] = max(known, error)

    def sums(self, sums: list[Tensor], weights: Any, before: list[Tensor | None]) -> None:
        """The clipped sum of each parameter."""
        given = {"": weights} if isinstance(weights, Tensor) else weights
        self._repeatedly(self._sums, sums, {g: w.double() for g, w in given.items()}, before)

    def _sums(self, sums: list[Tensor], weights: dict[str, Tensor], before: list[Tensor | None]) -> None:
        truth, kept = self.truth, self.sharp
        doubtful = ~self.sharp & ~self.gone
        sizes = truth.norms()
        eps = torch.finfo(truth.dtype).eps
        for place, (name, grads) in enumerate(zip(truth.names, truth.split(truth.grads), strict=True)):
            weight = weights[self.policy.group_of[name]]
            mine = weight[kept]
            expected = mine @ grads[kept]
            if expected.numel() and float(expected.abs().max()) > torch.finfo(truth.dtype).max:
                continue  # no p.grad of that type can hold it
            off = float((sums[place].flatten() - expected).norm())
            # Near to where a function is saturated an ulp of its value is a share of its derivative.
            share = UNITS[truth.norm_dtype] * eps + truth.relative * self.changed[kept]
            rounding = share * sizes[kept, place] + self._share_of_whole()[kept]
            allowed = float((mine * (SPREAD * truth.errors[kept, place] + rounding)).sum())
            allowed += truth.floor + 4 * eps * float(expected.norm())
            allowed += eps * torch.finfo(truth.dtype).tiny * expected.numel() ** 0.5  # smaller numbers have no digits
            if (earlier := before[place]) is not None:
                allowed += 4 * eps * float(earlier.double().norm())
            if bool((doubtful & (weight != 0)).any()):
                allowed += (1.001 + eps) * self.policy.bound * int((doubtful & (weight != 0)).sum())
            if not off <= allowed:
                raise Mismatch(
                    f"clipped sum of {name} is off by {off:.3g} from {float(expected.norm()):.6g} (bound "
                    f"{self.policy.bound:.3g}); rounding explains {allowed:.3g}"
                )
