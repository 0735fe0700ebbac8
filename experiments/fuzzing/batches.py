"""One case: a random model, clipped batch after batch in a random way, each compared with its truth."""

from __future__ import annotations

import copy
import random
import re
import warnings
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import ghostclip
from ghostclip.errors import GhostClipError, UnsupportedModelError

from .examples import spoil
from .policies import Expected, draw_policy
from .settings import Setting, draw_setting, forced
from .subjects import Subject, draw_subject
from .truth import RELATIVE, SPREAD, UNITS, NotRun, Truth

__all__ = ["Mismatch", "Outcome", "batch_case", "in_short"]


class Mismatch(AssertionError):
    """A result that rounding doesn't explain."""


@dataclass
class Outcome:
    """What came of one case.

    Attributes:
        counts: batches (or pairs) by what they were, "batches" and "pairs" in all among them.
        refusals: how often each message came.
        findings: differences that nothing explains, in words.
        worst_error: largest relative error of a norm, {type: error}, of examples that are judged sharply.
        worst_share: largest share of the sensitivity that one of them contributed.
    """

    seed: int
    recipe: str = ""
    counts: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    worst_error: dict[str, float] = field(default_factory=dict)
    worst_share: float = 0.0


def batch_case(seed: int, show: bool = False) -> Outcome:
    """Several batches of one random model through one random clipper."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    outcome = Outcome(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        subject = draw_subject(choose)
        in_dimension_0 = set(subject.batch_dims()) == {0} and not subject.wrap
        setting = draw_setting(choose, in_dimension_0 and not subject.mixing)
        if subject.random:
            setting.compile = setting.autocast = False
            setting.call = "backward" if setting.call == "clip" else setting.call
        outcome.recipe = f"{subject.recipe} | {setting}"
        if show:
            print(subject.model, setting, sep="\n")
        with forced(setting):
            Run(choose, subject, setting, outcome, show).batches()
    return outcome


def in_short(error: BaseException) -> str:
    """An error's message without what is different each time."""
    first = str(error).strip().split("\n")[0]
    first = re.sub(r"'[^']*'|\"[^\"]*\"|\[[^\]]*\]|\([^)]*\)|`[^`]*`", "..", first)
    first = re.sub(r"[0-9]+(\.[0-9]+)?(e[-+]?[0-9]+)?", "N", first)
    return f"{type(error).__name__}: {first[:110]}"


@dataclass
class Run:
    """The batches of one case."""

    choose: random.Random
    subject: Subject
    setting: Setting
    outcome: Outcome
    show: bool

    def __post_init__(self) -> None:
        # One function for all batches: a compiled graph is for one function.
        self.loss_fn = self.subject.losses_of

    def batches(self) -> None:
        """Draws batches of two or three shapes, and clips and judges each."""
        choose, subject = self.choose, self.subject
        model = subject.model.to(self.setting.torch_dtype)
        plain = copy.deepcopy(model)
        most = 64 if choose.random() < 0.03 else choose.choice([4, 8, 8, 12])
        shapes = [(choose.choice([0, 1, 2, 3, 4, 5, 6, 7, 8, most]), choose.choice(subject.lengths)) for _ in range(3)]
        if self.setting.compile or self.setting.knobs.get("halves:LEAST"):
            shapes = [(max(examples, 7), length) for examples, length in shapes[: 1 + (not self.setting.compile)]]
        order = [choose.choice(shapes) for _ in range(8 if self.setting.compile else choose.choice([3, 4, 5, 6]))]
        clipper: Any = None
        refused = 0
        for number, (examples, length) in enumerate(order):
            inputs, changes = self._inputs(examples, length)
            self.changed = torch.zeros(examples, dtype=torch.bool)
            self.changed[list(changes)] = True
            mask_seed = choose.randrange(1 << 30) if subject.random else None
            try:
                truth = Truth(
                    plain, subject.losses_of, inputs, subject.batch_dims(), mask_seed, self.setting.autocast,
                    self.setting.loss_scale,
                )  # fmt: skip
            except NotRun as error:
                if self.show:
                    print("torch:", error)
                self.outcome.counts["torch can't run it in that type"] += 1
                return
            what = f"batch {number} [{examples}, {length}] {changes or ''}"
            try:
                if clipper is None:
                    policy = draw_policy(choose, self.setting.policy, truth.names, self._bound(truth))
                    clipper = ghostclip.GhostClipper(ghostclip.wrap(model, **subject.wrap), policy.policy, **self.setting.options())
                self._clip(clipper, model, policy, truth, inputs, mask_seed)
            except UnsupportedModelError as error:
                self.outcome.refusals[in_short(error)] += 1
                refused += 1
                if self.show:
                    print(what, "refused:", error)
                if clipper is None:
                    return
                continue
            except Mismatch as error:
                self.outcome.findings.append(f"{what}: {error}")
                if self.show:
                    print(what, error)
                return
            except (GhostClipError, RuntimeError, ValueError, TypeError, AssertionError, LookupError, AttributeError) as error:
                if not self._runs(plain, inputs):
                    self.outcome.counts["the model itself can't run the batch"] += 1
                    continue
                self.outcome.findings.append(f"{what}: raised {in_short(error)}")
                if self.show:
                    raise
                return
            if self.show:
                print(what, "as expected")
            if choose.random() < 0.3:
                self._train(model, plain)
        if 0 < refused < len(order):
            self.outcome.counts["models refused at some batches only"] += 1

    def _runs(self, plain: nn.Module, inputs: list[Tensor]) -> bool:
        """Whether the plain model takes the batch at all; some of users' operations don't take an empty one."""
        try:
            self.subject.losses_of(plain, [value.detach() for value in inputs])
        except RuntimeError:
            return False
        return True

    def _inputs(self, examples: int, length: int) -> tuple[list[Tensor], dict[int, str]]:
        """A batch, and what was changed of which examples."""
        choose, subject = self.choose, self.subject
        inputs = subject.draw(choose.randrange(1 << 30), examples, length, self.setting.torch_dtype)
        changes: dict[int, str] = {}
        if examples and choose.random() < 0.5:
            for example in choose.sample(range(examples), choose.randint(1, min(3, examples))):
                inputs, how = spoil(choose, inputs, subject.batch_dims(), example)
                changes[example] = how
        return inputs, changes

    def _bound(self, truth: Truth) -> float:
        """A norm that clips some examples, all or none."""
        norms = truth.grads[truth.finite & truth.possible].norm(dim=1)
        typical = float(norms.median()) if len(norms) else 1.0
        typical = typical if 1e-12 < typical < 1e12 else 1.0
        return typical * 10 ** self.choose.choice([-3.0, -1.0, -0.3, 0.0, 0.3, 2.0])

    def _train(self, model: nn.Module, plain: nn.Module) -> None:
        """Moves the parameters a little, in both models alike."""
        with torch.no_grad():
            for own, other in zip(model.parameters(), plain.parameters(), strict=True):
                own.add_(0.01 * torch.randn(own.shape).to(own.dtype))
                other.copy_(own)

    def _clip(
        self, clipper: Any, model: nn.Module, policy: Expected, truth: Truth, inputs: list[Tensor], mask_seed: int | None
    ) -> None:
        """Clips one batch and judges what came of it; counts it."""
        trained = [p for p in model.parameters() if p.requires_grad]
        if not self.setting.accumulate:
            model.zero_grad()
        before = [None if p.grad is None else p.grad.clone() for p in trained]
        judge = Judge(truth, policy, self.setting, self.outcome, self.changed)
        if self.setting.call == "clip":
            result = clipper.clip(self.loss_fn, tuple(inputs))
        else:
            if mask_seed is not None:
                torch.manual_seed(mask_seed)
            given = [value.detach().requires_grad_(value.requires_grad) for value in inputs]
            with torch.autocast("cpu", torch.bfloat16, enabled=self.setting.autocast):
                losses = self.subject.losses_of(model, given)
            if self.setting.call == "retained":
                judge.first_pass(clipper, losses)
            result = clipper.backward(losses)
        judge.result(result, clipper.sensitivity)
        sums = [_difference(p.grad, earlier, p) for p, earlier in zip(trained, before, strict=True)]
        judge.sums(sums, result.weights, before)
        self._count(judge, clipper)

    def _count(self, judge: Judge, clipper: Any) -> None:
        counts, setting = self.outcome.counts, self.setting
        counts["batches"] += 1
        for what in (setting.dtype, setting.policy, setting.second_pass, setting.call):
            counts[f"batches, {what}"] += 1
        counts["batches, compiled"] += setting.compile
        if setting.compile and clipper.compiled is not None:
            used = [plan for plan in clipper.compiled._plans.values() if plan.region is not None and not plan.trial.left]
            counts["batches, compiled and the graph in use"] += bool(used)
        counts["batches, with examples that aren't finite"] += bool((~judge.truth.finite).any())
        counts["batches, a comparison loosened by conditioning"] += judge.loose
        counts["batches, a second look at rounding"] += judge.looked_again
        counts["examples"] += judge.truth.examples
        counts["examples, loosened"] += judge.loose_examples


def _difference(grad: Tensor | None, before: Tensor | None, parameter: Tensor) -> Tensor:
    found = torch.zeros(parameter.shape, dtype=torch.float64) if grad is None else grad.detach().double()
    return found if before is None else found - before.double()


class Judge:
    """Compares one batch's results with its truth; looks at rounding again before it speaks.

    Attributes:
        loose: whether an example could only be compared to within a hundredth of itself.
    """

    def __init__(self, truth: Truth, policy: Expected, setting: Setting, outcome: Outcome, changed: Tensor) -> None:
        self.truth, self.policy, self.setting, self.outcome = truth, policy, setting, outcome
        self.changed, self.excused = changed, torch.zeros_like(changed)
        self.looked_again = False
        self.norms = truth.by_group(truth.norms(), policy.group_of)

    def _twice(self, check: Any, *arguments: Any) -> None:
        try:
            check(*arguments)
        except Mismatch:
            if self.looked_again:
                raise
            self.looked_again = True
            self.truth.look_again()
            check(*arguments)

    @property
    def sharp(self) -> Tensor:
        """[B]: finite in every type, and not left out for what its numbers did on the way."""
        return self.truth.finite & self.truth.possible & ~self.excused

    @property
    def gone(self) -> Tensor:
        """[B]: finite in none."""
        return ~self.truth.finite & ~self.truth.possible

    def _slack(self) -> dict[str, Tensor]:
        """{group: [B]}, what rounding may do to a group's gradient."""
        return {g: SPREAD * e for g, e in self.truth.by_group(self.truth.errors, self.policy.group_of).items()}

    def _allowed(self) -> dict[str, Tensor]:
        """{group: [B]}, what a measured norm may be off by."""
        slack, relative = self._slack(), RELATIVE[self.truth.norm_dtype]
        return {g: slack[g] + relative * norm + self.truth.floor for g, norm in self.norms.items()}

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
            whole = self.truth.grads.norm(dim=1)
            for name, found in per.items():
                off = (found.double() - expected[name]).abs()
                allowed = SPREAD * errors[name] + RELATIVE[self.truth.norm_dtype] * expected[name] + self.truth.floor
                # Rounding of a norm taken apart from a joint one is a share of the whole.
                off = torch.where(found.isfinite() | ~(self.truth.extreme & self.changed), off, 0.0)
                self._refuse(off, allowed + 1e-3 * RELATIVE[self.truth.norm_dtype] * whole, f"norm of {name}", expected[name])

        self._twice(check)

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
        if not 1 - 1e-9 <= sensitivity / self.policy.bound <= 1.04:
            raise Mismatch(f"sensitivity {sensitivity}, expected {self.policy.bound}")
        if set(norms) != set(self.norms) or set(weights) != set(self.norms):
            raise Mismatch(f"groups {sorted(norms)}, expected {sorted(self.norms)}")
        self._excuse(norms, weights)
        self._twice(self._norms, norms)
        self._twice(self._weights, weights)
        self._twice(self._shares, weights, sensitivity)
        self._note_worst(norms, weights, sensitivity)

    def _excuse(self, norms: dict[str, Tensor], weights: dict[str, Tensor]) -> None:
        """Examples of huge numbers may be left out though their gradients are finite: products on the way were not."""
        left_out = torch.stack([w == 0 for w in weights.values()]).all(0) if weights else self.excused
        not_finite = ~torch.stack([n.isfinite() for n in norms.values()]).all(0) if norms else self.excused
        self.excused = left_out & not_finite & self.truth.extreme & self.changed

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
            if bool((self.sharp & ~(found <= most[group] * (1 + 1e-5))).any()):
                raise Mismatch(f"weight {found[self.sharp].tolist()[:4]}, at most {most[group][self.sharp].tolist()[:4]}")
            if bool((self.sharp & ~self.changed & (self.norms[group] > 0) & ~(found >= least[group] * (1 - 1e-2))).any()):
                raise Mismatch(f"weight {found[self.sharp].tolist()[:4]}, at least {least[group][self.sharp].tolist()[:4]}")

    def _contributions(self, weights: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The size of each example's part of the sum [B], and what rounding may add to it."""
        slack = self._slack()
        sizes = torch.stack([weights[g].double() * norm for g, norm in self.norms.items()]).norm(dim=0)
        return sizes, torch.stack([weights[g].double() * slack[g] for g in self.norms]).norm(dim=0)

    def _shares(self, weights: dict[str, Tensor], sensitivity: float) -> None:
        if not self.norms:
            return
        sizes, more = self._contributions(weights)
        wrong = self.sharp & ~(sizes <= sensitivity * (1 + 1e-5) + more)
        if wrong.any():
            raise Mismatch(f"one example contributes {float((sizes[wrong] / sensitivity).max()):.6f} of the sensitivity")

    def _note_worst(self, norms: dict[str, Tensor], weights: dict[str, Tensor], sensitivity: float) -> None:
        if not self.norms or not self.truth.examples:
            return
        sizes, more = self._contributions(weights)
        fine = self.sharp & (more < 1e-6 * sensitivity)
        if fine.any():
            self.outcome.worst_share = max(self.outcome.worst_share, float((sizes[fine] / sensitivity).max()))
            for group, norm in self.norms.items():
                slack = self._slack()[group]
                own = fine & (norm > 1e6 * self.truth.floor) & (slack < 0.1 * RELATIVE[self.truth.norm_dtype] * norm)
                if own.any():
                    error = float(((norms[group].double() - norm).abs() / norm)[own].max())
                    known = self.outcome.worst_error.get(self.setting.dtype, 0.0)
                    self.outcome.worst_error[self.setting.dtype] = max(known, error)

    def sums(self, sums: list[Tensor], weights: Any, before: list[Tensor | None]) -> None:
        """The clipped sum of each parameter."""
        given = {"": weights} if isinstance(weights, Tensor) else weights
        self._twice(self._sums, sums, {g: w.double() for g, w in given.items()}, before)

    def _sums(self, sums: list[Tensor], weights: dict[str, Tensor], before: list[Tensor | None]) -> None:
        truth, kept = self.truth, self.sharp
        doubtful = ~self.sharp & ~self.gone
        sizes = truth.norms()
        eps = torch.finfo(truth.dtype).eps
        for place, (name, grads) in enumerate(zip(truth.names, truth.split(truth.grads), strict=True)):
            weight = weights[self.policy.group_of[name]]
            mine = weight[kept]
            expected = mine @ grads[kept]
            off = float((sums[place].flatten() - expected).norm())
            allowed = float((mine * (SPREAD * truth.errors[kept, place] + UNITS * eps * sizes[kept, place])).sum())
            allowed += truth.floor + 4 * eps * float(expected.norm())
            if (earlier := before[place]) is not None:
                allowed += 4 * eps * float(earlier.double().norm())
            if bool((doubtful & (weight != 0)).any()):
                allowed += 1.001 * self.policy.bound * int((doubtful & (weight != 0)).sum())
            if not off <= allowed:
                raise Mismatch(
                    f"clipped sum of {name} is off by {off:.3g} from {float(expected.norm()):.6g} (bound "
                    f"{self.policy.bound:.3g}); rounding explains {allowed:.3g}"
                )
