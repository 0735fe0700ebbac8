"""Neighbouring data sets, each loaded, padded and collated by itself: how far does one example, or user, move a step?

Everything is sampled (the rate is 1), without noise and with a learning rate of 0, in float64 with the self-check on.
The clipped sums of a data set and of the same with one more must differ by at most the sensitivity, within 1e-5 of it,
unless the run was refused. A collate that minds other examples (collates.py) must be refused in the first six steps,
and no other.
"""

from __future__ import annotations

import copy
import random
import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ghostclip import PrivacyEngine
from ghostclip.errors import GhostClipError

from .collates import COLLATES, HOOKS, PACKINGS, Collate, Rows, draw_data, losses_of, model_for
from .outcome import Outcome, in_short

__all__ = ["data_case"]

MOST = 1e-5
NEIGHBOURS = 2
# Steps within which the self-check must have refused: those it tries all of.
CHECKED = 6


def data_case(seed: int, show: bool = False, only: str | None = None, self_check: bool = True) -> Outcome:
    """One data set and some neighbours of it, collated in one way.

    Args:
        seed: decides all.
        show: whether what came of it is printed.
        only: the name of a collate, without a hook; None: any.
        self_check: of the engine.
    """
    choose = random.Random(seed)
    torch.manual_seed(seed)
    outcome = Outcome(seed)
    collate = choose.choice([each for each in COLLATES if only in (None, each.name)])
    case = DataPairs(choose, collate, "none" if only else choose.choices(list(HOOKS), [8, 1, 1, 1])[0], outcome, show)
    case.options["self_check"] = self_check
    outcome.recipe = f"data sets: {case.recipe}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        case.run()
    return outcome


class DataPairs:
    """The pairs of one case."""

    def __init__(self, choose: random.Random, collate: Collate, hook: str, outcome: Outcome, show: bool) -> None:
        self.choose, self.collate, self.hook, self.outcome, self.show = choose, collate, hook, outcome, show
        self.kind = choose.choice(collate.kinds)
        self.packing = choose.choice(list(PACKINGS))
        self.by_user = choose.random() < 0.4
        self.model = model_for(choose, self.kind, self.hook)
        self.bound = 10 ** choose.choice([-2.0, -1.0, 0.0, 0.0])
        # Rows are tried in an order drawn anew each time: two users' rows that were sorted may be in theirs by chance.
        self.steps = choose.choice([1, 2, 3]) if self.honest else CHECKED
        self.seed = choose.randrange(1 << 30)
        self.options: dict[str, Any] = {
            "max_physical_batch_size": choose.choice([None, None, None, 8]),
            "second_pass": choose.choice(["auto", "cached", "reweight"]),
        }

    @property
    def honest(self) -> bool:
        """Whether no example's gradient minds others."""
        own = not self.by_user if self.collate.honest == "without users" else bool(self.collate.honest)
        return own and HOOKS[self.hook][1]

    @property
    def recipe(self) -> str:
        """In words."""
        unit = "users" if self.by_user else "examples"
        return (
            f"{self.kind}, {self.collate.name}, as {self.packing}, hook {self.hook}, {self.model.body}, {unit}, "
            f"C {self.bound:g}, {self.steps} steps, {self.options}"
        )

    def run(self) -> None:
        """The data set without more, then with each of several examples, or users, more."""
        generator = torch.Generator().manual_seed(self.choose.randrange(1 << 30))
        count, more = self.choose.choice([4, 6, 9, 14, 40]), self.choose.choice([1, 2, 3]) if self.by_user else 1
        examples = draw_data(self.kind, count, generator)
        users = [self.choose.randrange(max(2, count // 2)) for _ in examples]
        before = self._sums(examples, users)
        for _ in range(NEIGHBOURS):
            longest = self.choose.choice([8, 30, 60])
            added = draw_data(self.kind, more, generator, longest)
            scale = self.choose.choice([1.0, 1.0, 30.0]) if added[0]["x"].is_floating_point() else 1
            added = [{**each, "x": each["x"] * scale, "name": count + each["name"]} for each in added]
            after = self._sums([*examples, *added], [*users, *[count] * more])
            self._judge(before, after, f"and {more} more, up to {longest} long, times {scale:g}")

    def _judge(self, before: list[Tensor] | str, after: list[Tensor] | str, what: str) -> None:
        counts, name = self.outcome.counts, self.collate.name if HOOKS[self.hook][1] else f"hook {self.hook}"
        name += ", by users" if self.by_user and self.collate.honest == "without users" else ""
        counts["data pairs"] += 1
        if isinstance(before, str) or isinstance(after, str):
            said = before if isinstance(before, str) else str(after)
            verdict = "false refusal" if self.honest else "refused"
            if self.honest:
                self.outcome.findings.append(f"{what}: honest, and refused: {said}")
        elif self.collate.random:
            verdict = "trained" if self.honest else "accepted"
        else:
            moved = max(float((two - one).norm()) for one, two in zip(before, after, strict=True)) / self.bound
            verdict = "exact" if moved <= 1 + MOST else "moved more"
            what += f": moves the sum by {moved:.7f} of the bound"
            if verdict == "moved more":
                self.outcome.findings.append(f"{what}, {'honest' if self.honest else 'accepted'}")
            else:
                self.outcome.worst_share = max(self.outcome.worst_share, moved)
        counts[f"data pairs, {name}: {verdict}"] += 1
        if self.show:
            print(what, verdict, before if isinstance(before, str) else "", after if isinstance(after, str) else "")

    def _sums(self, examples: list[dict[str, Any]], users: list[int]) -> list[Tensor] | str:
        """The clipped sum [P] of each step over all of these; what was said where the run was refused."""
        model = copy.deepcopy(self.model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        count = len(set(users)) if self.by_user else len(examples)
        pack = partial(_packed, self.collate, PACKINGS[self.packing])
        data = DataLoader(Rows(examples, self.collate.augment), batch_size=count, collate_fn=pack)
        options = {**self.options, **({"unit_ids": users} if self.by_user else {})}
        seen: list[Tensor] = []
        try:
            engine = PrivacyEngine(
                model, optimizer, data, batch_size=count, noise_multiplier=0.0, noise="test", seed=self.seed,
                clipping=self.bound, **options,
            )  # fmt: skip
            optimizer.register_step_pre_hook(lambda *_: seen.append(_flat(model) * count))
            while len(seen) < self.steps:
                for batch in engine.batches():
                    engine.step(batch, losses_of)
            engine.detach()
        except GhostClipError as error:
            self.outcome.refusals[in_short(error)] += 1
            return in_short(error)
        return seen[: self.steps]


def _packed(collate: Collate, packing: Any, rows: list[dict[str, Any]]) -> Any:
    return packing(collate.collate(rows))


def _flat(model: nn.Module) -> Tensor:
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([part.detach().flatten() for part in parts])
