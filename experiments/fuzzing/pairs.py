"""Neighbouring pairs through the engine: a data set, and the same with one more example, as nasty as can be.

Everything is sampled (the rate is 1), there is no noise, and the learning rate is 0, so that what a step would release
can be compared step by step. The clipped sums must differ by at most the sensitivity, within 1e-5 of it in float32 and
float64, and what the rounding of the other examples leaves: SECURITY.md, "Rounding". That rest is made
of their conditioning, as in truth.py, and their weights; they are well-behaved examples. In bfloat16 each of the two
sums is rounded once more to its type: by half an eps of its size.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ghostclip import PrivacyEngine
from ghostclip.errors import GhostClipError, UnsupportedModelError, VerificationError

from .outcome import EXPLAINED, Outcome, in_short
from .policies import KINDS, Expected, draw_policy
from .settings import Setting, draw_setting, forced
from .subjects import Subject, draw_subject
from .truth import SPREAD, UNITS, NotRun, Truth

__all__ = ["pair_case"]

MOST = 1e-5
ADVERSARIES = 3


def pair_case(seed: int, show: bool = False) -> Outcome:
    """One data set and three neighbours of it through one kind of engine."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    outcome = Outcome(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        subject = _subject(choose)
        setting = draw_setting(choose, True)
        setting.dtype = choose.choices(["float32", "float64", "bfloat16"], [8, 2, 1])[0]
        setting.policy, setting.autocast = choose.choice(KINDS), False
        setting.compile = setting.policy != "adaptive" and choose.random() < 0.04
        options = {
            "max_physical_batch_size": choose.choice([None, None, 1, 2, 3]),
            "self_check": choose.random() < 0.5,
            "second_pass": setting.second_pass,
            "loss_scale": 1.0 if setting.compile else setting.loss_scale,
        }
        outcome.recipe = f"pairs: {subject.recipe} | {setting} {options}"
        if show:
            print(subject.model, setting, options, sep="\n")
        with forced(setting):
            Pairs(choose, subject, setting, options, outcome, show).run()
    return outcome


def _subject(choose: random.Random) -> Subject:
    """One whose examples are in dimension 0 and don't meet, and that draws nothing."""
    while True:
        found = draw_subject(choose, nasty=0.4)
        if set(found.batch_dims()) == {0} and not (found.wrap or found.random or found.refused):
            return found


class Pairs:
    """The pairs of one case."""

    def __init__(
        self, choose: random.Random, subject: Subject, setting: Setting, options: dict[str, Any], outcome: Outcome,
        show: bool,
    ) -> None:  # fmt: skip
        self.choose, self.subject, self.setting, self.options = choose, subject, setting, options
        self.outcome, self.show = outcome, show
        self.model = subject.model.to(setting.torch_dtype)
        self.steps = 7 if setting.compile else 1 if setting.policy == "adaptive" else choose.choice([1, 1, 2, 3])
        self.own_loop = not setting.compile and choose.random() < 0.3
        self.engine_seed = choose.randrange(1 << 30)

    def run(self) -> None:
        """The data set without more, then with each of several examples more."""
        choose, subject, counts = self.choose, self.subject, self.outcome.counts
        others, length = choose.choice([1, 2, 3, 3, 4, 5, 7]), choose.choice(subject.lengths)
        inputs = subject.draw(choose.randrange(1 << 30), others + 1, length, self.setting.torch_dtype)
        fewer = [value[:others] for value in inputs]
        try:
            truth = Truth(self.model, subject.losses_of, fewer, subject.batch_dims(), None)
        except NotRun:
            counts["torch can't run it in that type"] += 1
            return
        if not truth.attached:
            counts["no trained parameter takes part"] += 1
            return
        policy = self._policy(truth)
        rounding = self._rounding(truth, policy, others)
        before = self._sums_or_none(fewer, truth, "without one more", "both")
        if before is None:
            return
        for _ in range(ADVERSARIES):
            more, how = subject.spoil(choose, inputs, others)
            self._compare(more, how, truth, policy, before, rounding)

    def _compare(
        self, more: Sequence[Tensor], how: str, truth: Truth, policy: Expected, before: list[Tensor], rounding: float
    ) -> None:
        what = f"{truth.examples} examples and one more ({how})"
        counts = self.outcome.counts
        after = self._sums_or_none(more, truth, what, "the larger one")
        if after is None:
            return
        counts["pairs"] += 1
        for kind in (self.setting.dtype, self.setting.policy, self.setting.second_pass):
            counts[f"pairs, {kind}"] += 1
        counts["pairs, compiled"] += self.setting.compile
        loose = rounding > 1e-3 * policy.bound
        counts["pairs, the others' rounding is above a thousandth"] += loose
        for step, (one, two) in enumerate(zip(before, after, strict=True)):
            moved = float((two - one).norm()) / policy.bound
            if self.show:
                print(what, f"step {step}: moved by {moved:.8f} of the bound; rounding {rounding / policy.bound:.2g}")
            if not moved <= 1 + MOST + rounding / policy.bound:
                truth.look_again()
                rounding = self._rounding(truth, policy, truth.examples)
            if not moved <= 1 + MOST + rounding / policy.bound:
                allowed = f"the others' rounding explains {rounding / policy.bound:.2g}"
                self.outcome.findings.append(
                    f"{what}: step {step} moves the sum by {moved:.7f} of the bound; {allowed}"
                )
                return
            if rounding < 1e-6 * policy.bound:
                self.outcome.worst_share = max(self.outcome.worst_share, moved)

    def _sums_or_none(self, inputs: Sequence[Tensor], truth: Truth, what: str, which: str) -> list[Tensor] | None:
        """`_sums`; None where it raised, which is a finding unless the refusal is one that is known."""
        try:
            return self._sums(inputs, truth)
        except VerificationError as error:
            self.outcome.counts[f"pairs, the self-check stopped {which}"] += 1
            self.outcome.refusals[in_short(error)] += 1
        except (GhostClipError, RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
            if isinstance(error, UnsupportedModelError) and any(words in str(error) for words in EXPLAINED):
                self.outcome.refusals[in_short(error)] += 1
                return None
            self.outcome.findings.append(f"{what}: raised {in_short(error)}")
            if self.show:
                raise
        return None

    def _policy(self, truth: Truth) -> Expected:
        norms = truth.grads[truth.finite & truth.possible].norm(dim=1)
        typical = float(norms.median()) if len(norms) else 1.0
        typical = typical if 1e-12 < typical < 1e12 else 1.0
        self.bound = typical * 10 ** self.choose.choice([-3.0, -1.0, -0.3, 0.0, 0.3])
        self.policy_seed = self.choose.randrange(1 << 30)
        return self._made_policy(truth)

    def _made_policy(self, truth: Truth) -> Expected:
        """The same policy each time, a new one: some of them change while training."""
        return draw_policy(random.Random(self.policy_seed), self.setting.policy, truth.names, self.bound)

    def _rounding(self, truth: Truth, policy: Expected, others: int) -> float:
        """What the other examples' parts of two sums may differ by."""
        norms = truth.by_group(truth.norms(), policy.group_of)
        errors = truth.by_group(truth.errors, policy.group_of)
        if not norms:
            return 0.0
        eps = 1.2e-7 if truth.dtype != torch.float64 else 2.3e-16
        weights = policy.weights(norms)
        parts = [weights[g] * (SPREAD * errors[g] + UNITS[truth.norm_dtype] * eps * norms[g]) for g in norms]
        rounding = float(torch.stack(parts).norm(dim=0).nan_to_num(0.0, 0.0, 0.0).sum())
        if truth.dtype == torch.bfloat16:
            rounding += (2 * others + 1) / 2 * torch.finfo(truth.dtype).eps * policy.bound
        return rounding

    def _sums(self, inputs: Sequence[Tensor], truth: Truth) -> list[Tensor]:
        """The clipped sum [P] of each step over all of these examples."""
        model = copy.deepcopy(self.model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        count = len(inputs[-1])
        engine = PrivacyEngine(
            model, optimizer, TensorDataset(*(value.detach() for value in inputs)), batch_size=count,
            noise_multiplier=0.0, noise="test", seed=self.engine_seed, clipping=self._made_policy(truth).policy,
            **self.options,
        )  # fmt: skip
        if self.setting.compile:
            engine.compile()
        seen: list[Tensor] = []
        optimizer.register_step_pre_hook(lambda *_: seen.append(_flat(model) * count))
        loss_fn = self.subject.losses_of
        while len(seen) < self.steps:
            for batch in engine.batches():
                if self.own_loop:
                    for part in batch.physical():
                        engine.backward(loss_fn(model, part))
                    optimizer.step()
                    optimizer.zero_grad()
                else:
                    engine.step(batch, loss_fn)
                if len(seen) == self.steps:
                    break
        engine.detach()
        return seen


def _flat(model: nn.Module) -> Tensor:
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters() if p.requires_grad]
    return torch.cat([part.detach().double().flatten() for part in parts])
