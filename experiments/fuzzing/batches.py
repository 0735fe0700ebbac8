"""One case: a random model, clipped batch after batch in a random way, each compared with its truth."""

from __future__ import annotations

import copy
import random
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import ghostclip
from ghostclip.errors import GhostClipError, LossShapeError, UnsupportedModelError

from .judge import Judge, Mismatch
from .outcome import EXPLAINED, Outcome, in_short
from .policies import Expected, draw_policy
from .settings import Setting, draw_setting, forced
from .subjects import Subject, draw_subject
from .truth import NotRun, Truth

__all__ = ["batch_case"]


def batch_case(seed: int, show: bool = False) -> Outcome:
    """Several batches of one random model through one random clipper."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    outcome = Outcome(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        subject = draw_subject(choose)
        in_dimension_0 = set(subject.batch_dims()) == {0} and not subject.wrap
        setting = draw_setting(choose, in_dimension_0 and not subject.refused)
        if subject.random:
            setting.compile = setting.autocast = False
            setting.call = "backward" if setting.call == "clip" else setting.call
        outcome.recipe = f"{subject.recipe} | {setting}"
        if show:
            print(subject.model, setting, sep="\n")
        with forced(setting):
            Run(choose, subject, setting, outcome, show).batches()
    return outcome


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
        if self.setting.compile:
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
            alone = None if examples else self._losses(plain, inputs)
            if not (truth.attached if examples else alone is None or alone.requires_grad):
                self.outcome.counts["no trained parameter takes part"] += 1
                return
            what = f"batch {number} [{examples}, {length}] {changes or ''}"
            try:
                if clipper is None:
                    policy = draw_policy(choose, self.setting.policy, truth.names, self._bound(truth))
                    clipper = ghostclip.GhostClipper(
                        ghostclip.wrap(model, **subject.wrap), policy.policy, **self.setting.options()
                    )
                self._clip(clipper, model, policy, truth, inputs, mask_seed)
            except (UnsupportedModelError, LossShapeError) as error:
                self.outcome.refusals[in_short(error)] += 1
                refused += 1
                if self.show:
                    print(what, "refused:", error)
                # Of float16 rounded to zero nothing can be told, nor of a table as long as the batch without another
                # forward, nor whether losses are the examples' where no layer met them; the messages say what to do.
                # And an example can't be left out alone that spoils others' gradients (SECURITY.md).
                explained = any(words in str(error) for words in EXPLAINED) or self.setting.dtype == "float16"
                if not (subject.refused or explained):
                    self.outcome.findings.append(f"{what}: refused: {in_short(error)}")
                    return
                if clipper is None:
                    return
                continue
            except Mismatch as error:
                self.outcome.findings.append(f"{what}: {error}")
                if self.show:
                    print(what, error)
                return
            except (
                GhostClipError,
                RuntimeError,
                ValueError,
                TypeError,
                AssertionError,
                LookupError,
                AttributeError,
            ) as error:
                if self._losses(plain, inputs) is None:
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

    def _losses(self, plain: nn.Module, inputs: list[Tensor]) -> Tensor | None:
        """The plain model's losses; None where it can't take the batch, as some of users' operations an empty one."""
        try:
            with torch.autocast("cpu", torch.bfloat16, enabled=self.setting.autocast):
                return self.subject.losses_of(plain, [value.detach() for value in inputs])
        except (RuntimeError, ValueError, IndexError):
            return None

    def _inputs(self, examples: int, length: int) -> tuple[list[Tensor], dict[int, str]]:
        """A batch, and what was changed of which examples."""
        choose, subject = self.choose, self.subject
        inputs = subject.draw(choose.randrange(1 << 30), examples, length, self.setting.torch_dtype)
        changes: dict[int, str] = {}
        # Where examples meet, one that isn't finite is in the gradients of all.
        if examples and not subject.refused and choose.random() < 0.5:
            for example in choose.sample(range(examples), choose.randint(1, min(3, examples))):
                inputs, how = subject.spoil(choose, inputs, example)
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
        self,
        clipper: Any,
        model: nn.Module,
        policy: Expected,
        truth: Truth,
        inputs: list[Tensor],
        mask_seed: int | None,
    ) -> None:
        """Clips one batch and judges what came of it; counts it."""
        trained = [p for p in model.parameters() if p.requires_grad]
        if not self.setting.accumulate:
            model.zero_grad()
        before = [None if p.grad is None else p.grad.clone() for p in trained]
        judge = Judge(truth, policy, self.setting, self.outcome, self.changed, self.subject.refused)
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
            used = [
                plan for plan in clipper.compiled._plans.values() if plan.region is not None and not plan.trial.left
            ]
            counts["batches, compiled and the graph in use"] += bool(used)
        counts["batches, with examples that aren't finite"] += bool((~judge.truth.finite).any())
        counts["batches, a comparison loosened by conditioning"] += judge.loose
        counts["batches, a second look at rounding"] += judge.looks > 0
        counts["examples"] += judge.truth.examples
        counts["examples, loosened"] += judge.loose_examples


def _difference(grad: Tensor | None, before: Tensor | None, parameter: Tensor) -> Tensor:
    found = torch.zeros(parameter.shape, dtype=torch.float64) if grad is None else grad.detach().double()
    return found if before is None else found - before.double()
