"""ghostclip tune: the best of a random number of private trainings, charged once for all of them."""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch

from ghostclip import accounting, selection
from ghostclip.cli.arguments import Joined, UsageError, as_path, converted, print_json
from ghostclip.cli.methods import Settings
from ghostclip.cli.plan import PlannedRun, runs_of
from ghostclip.cli.progress import bar
from ghostclip.cli.train import add_configuration, load_data, set_threads
from ghostclip.cli.training import build, train
from ghostclip.datasets import Data
from ghostclip.events import DISTRIBUTIONS
from ghostclip.validate import at_least_one

__all__ = ["add_tune", "run_tune"]

SEARCHED = ("learning_rate", "max_norm")
NUMBERS = converted(lambda text: [float(part) for part in text.split(",")], "numbers such as 0.1 1 or 0.1,1")
DISTRIBUTION = converted(
    lambda text: text if text in DISTRIBUTIONS else float(text), f"{', '.join(DISTRIBUTIONS)} or a number"
)
EPILOG = """\
The number of runs is drawn at random, and each run draws one of the settings; accuracy on the test examples, which
count as public, picks the best run. One epsilon covers the search, if nothing but the best run is published: keep the
progress shown here, the number of runs and the folder <ledger>.search to yourself. After an interruption the same
command goes on with the same runs. --epsilon is the target of a single run; the search spends more.

example: ghostclip tune --model mlp --learning-rates 0.1 0.3 1 --max-norms 0.1 1 --ledger mlp.ledger"""


def add_tune(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.epilog = EPILOG
    add_configuration(parser)
    parser.set_defaults(compare=False)
    add = parser.add_argument_group("search").add_argument
    several: dict[str, Any] = {"type": NUMBERS, "nargs": "+", "action": Joined}
    add("--learning-rates", **several, metavar="RATE", help="candidates (default: --learning-rate)")
    add("--max-norms", **several, metavar="C", help="candidates (default: --max-norm)")
    add("--expected-runs", type=float, default=10.0, metavar="K", help="mean of the number of runs (default: 10)")
    drawn = "poisson, geometric, logarithmic, or the shape of a negative binomial distribution (default: poisson)"
    add("--distribution", type=DISTRIBUTION, default="poisson", metavar="NAME", help=drawn)
    add("--ledger", metavar="FILE", help="charge the search there, and keep unfinished runs in FILE.search")
    add("--save", type=as_path, metavar="FILE", help="write the best model's state_dict there")


def run_tune(arguments: argparse.Namespace) -> int:
    """Searches, prints the best run and what the search spent, and writes its model."""
    at_least_one(expected_runs=arguments.expected_runs)
    set_threads(arguments)
    data = load_data(arguments)
    build(arguments.model, data, arguments.seed)
    plan, candidates = _planned(arguments, len(data.train))
    noise, delta = plan.settings.noise_multiplier or 0.0, arguments.delta
    rate = plan.settings.batch_size / len(data.train)
    run: dict[str, Any] = {"noise_multiplier": noise, "sample_rate": rate, "steps": plan.steps}
    search: dict[str, Any] = {"expected_runs": arguments.expected_runs, "distribution": arguments.distribution}
    best = selection.select(
        partial(_trained, plan, data), candidates, score=lambda result: result["accuracy"], delta=delta,
        ledger=arguments.ledger, **run, **search,
    )  # fmt: skip
    found = {**run, **search, "delta": delta, "epsilon_of_one_run": accounting.epsilon(**run, delta=delta)}
    if best is None:
        found |= {"settings": None, "accuracy": None, "saved": None, "guarantee": None}
        found["epsilon"] = accounting.selection_epsilon(**run, **search, delta=delta)
    else:
        found |= {"settings": best.settings, "accuracy": best.score, "guarantee": best.guarantee()}
        found |= {"epsilon": best.epsilon, "epsilon_added_up": best.epsilon_added_up, "saved": None}
        if arguments.save is not None:
            torch.save(best.result["model"], arguments.save)
            found["saved"] = str(arguments.save)
    if arguments.json:
        print_json(found)
    else:
        _print(found)
    return 0


def _trained(plan: PlannedRun, data: Data, candidate: dict[str, Any]) -> dict[str, Any]:
    """One run of the plan by a candidate's learning rate and clipping norm: its test accuracy and its model."""
    settings: Settings = replace(plan.settings, **{name: candidate[name] for name in SEARCHED})
    with bar("run", plan.steps, "step") as watch:
        outcome = train(settings, data, "run", watch)
    return {"accuracy": outcome.run.accuracy, "model": dict(outcome.model.state_dict())}


def _planned(arguments: argparse.Namespace, examples: int) -> tuple[PlannedRun, list[dict[str, Any]]]:
    """A run, calibrated once, and the candidates for its learning rate and clipping norm.

    Raises:
        UsageError: options that contradict each other; ValueError: a value out of range.
    """
    for single, several in (("learning_rate", "learning_rates"), ("max_norm", "max_norms")):
        if getattr(arguments, single) is not None and getattr(arguments, several) is not None:
            name = single.replace("_", "-")
            raise UsageError(f"give --{name} for one value or --{name}s for candidates, not both")
    alone = vars(arguments) | {"ledger": None}
    plan = next(runs_of(argparse.Namespace(**alone), examples))
    if not plan.settings.noise_multiplier:
        raise UsageError("tune is for private training; leave out --method nonprivate and --noise-multiplier 0")
    if plan.settings.mean_noise is not None:
        raise UsageError(
            f"each run of --model {arguments.model} releases a mean of features, too, which the charge of a search "
            "doesn't cover; take another model"
        )
    fixed = alone | {"epsilon": None, "noise_multiplier": plan.settings.noise_multiplier}
    candidates = []
    for rate, norm in product(arguments.learning_rates or [arguments.learning_rate],
                              arguments.max_norms or [arguments.max_norm]):  # fmt: skip
        one = argparse.Namespace(**fixed | {"learning_rate": rate, "max_norm": norm})
        settings = next(runs_of(one, examples)).settings
        # With all else that a run is made of, by which an interrupted search of another kind is told from this.
        of_all = {"data": arguments.data, "data_dir": arguments.data_dir and str(arguments.data_dir)}
        names = ("model", "optimizer", "seed", *SEARCHED)
        candidates.append(of_all | {name: getattr(settings, name) for name in names})
    return plan, candidates


def _print(found: dict[str, Any]) -> None:
    """The results as text."""
    if found["settings"] is None:
        print(f"no run was drawn; the search spends epsilon {found['epsilon']:.4g} at delta {found['delta']:g}")
        return
    chosen = ", ".join(f"{name.replace('_', ' ')} {found['settings'][name]:g}" for name in SEARCHED)
    print(f"best run: {chosen}; {found['accuracy']:.1%} of the test examples")
    print(found["guarantee"])
    one, added_up, runs = found["epsilon_of_one_run"], found["epsilon_added_up"], f"{found['expected_runs']:g} runs"
    print(f"One run spends epsilon {one:.4g}, and the expected {runs} added up {added_up:.4g}.")
    if found["saved"]:
        print(f"model: {found['saved']}")
