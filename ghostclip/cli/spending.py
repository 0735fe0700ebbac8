"""What settings and runs spend: ``ghostclip epsilon``, ``calibrate`` and ``ledger``."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ghostclip.accounting as accounting  # `from ghostclip` loads all public names, and torch with them
from ghostclip.cli.arguments import UsageError, as_path, print_json
from ghostclip.events import RELATIONS, SAMPLINGS, Event
from ghostclip.ledger import Charge, Ledger
from ghostclip.report.plots import epsilon_plot
from ghostclip.validate import fraction, positive, positive_int, whole

__all__ = ["add_calibrate", "add_epsilon", "add_ledger", "run_calibrate", "run_epsilon", "run_ledger"]

DIGITS = 4  # decimals of the noise shown; rounded up, so that what is shown keeps the promise


def add_epsilon(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``ghostclip epsilon``."""
    parser.epilog = (
        "example: ghostclip epsilon --noise-multiplier 1.1 --examples 60000 --batch-size 256 --epochs 20 --delta 1e-5"
    )
    about = "standard deviation of the noise over the clipping norm"
    parser.add_argument("--noise-multiplier", type=float, required=True, metavar="SIGMA", help=about)
    _add_accounting(parser, "which bound is the answer; both are shown (default: pld, the tighter one)")
    _add_sampling(parser)
    parser.add_argument("--plot", type=as_path, metavar="FILE", help="also write epsilon over the steps to a .png file")
    about = "also bound attacks that guess whether an example was in the data: their advantage and true-positive rates"
    parser.add_argument("--risk", action="store_true", help=about)


def run_epsilon(arguments: argparse.Namespace) -> int:
    """Prints epsilon by each accountant that bounds it, and draws it over the steps."""
    if arguments.plot is not None and arguments.plot.suffix != ".png":
        raise UsageError(f"--plot must name a .png file; got {arguments.plot}")
    sampling, steps = _sampling_of(arguments)
    noise, chosen = positive(noise_multiplier=arguments.noise_multiplier), arguments.accountant
    setting: dict[str, Any] = {"noise_multiplier": noise, **sampling, "steps": steps, "delta": arguments.delta}
    event = accounting.Setting(**sampling).event(noise, steps)
    names = dict.fromkeys([chosen, *accounting.accountants_for(event)])
    spent = {name: accounting.epsilon(**setting, accountant=name) for name in names}
    if arguments.plot is not None:
        curves = {name.upper(): accounting.epsilon_over_time(**setting, accountant=name) for name in names}
        marks = next(iter(curves.values()))[0]
        about = f"{arguments.sampling} sampling, neighbours: {arguments.neighboring}"
        values = {name: curve for name, (_, curve) in curves.items()}
        arguments.plot.write_bytes(epsilon_plot(marks, values, arguments.delta, None, about=about))
    bound = accounting.risk_of([event]) if arguments.risk else None
    if arguments.json:
        found = {"epsilon": spent[chosen], "accountant": chosen, "epsilons": spent, **setting}
        if bound is not None:
            rates = {f"{rate:g}": bound.true_positive_rate(rate) for rate in accounting.FALSE_POSITIVE_RATES}
            found |= {"advantage": bound.advantage, "true_positive_rates": rates}
        print_json(found)
    else:
        lines = [
            f"epsilon {value:.4g} ({name.upper()}{', a looser bound' if value > min(spent.values()) else ''})"
            for name, value in spent.items()
        ]
        attacks = [] if bound is None else [f"membership attacks: {bound}"]
        print(*lines, _in_words(event, arguments.delta), *attacks, sep="\n")
    return 0


def add_calibrate(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``ghostclip calibrate``."""
    parser.epilog = (
        "example: ghostclip calibrate --epsilon 3 --examples 60000 --batch-size 256 --epochs 20 --delta 1e-5"
    )
    parser.add_argument("--epsilon", type=float, required=True, help="the target")
    _add_accounting(parser, "which bound must be within the target (default: pld, which needs less noise)")
    _add_sampling(parser)


def run_calibrate(arguments: argparse.Namespace) -> int:
    """Prints the noise multiplier and what it spends."""
    sampling, steps = _sampling_of(arguments)
    where: dict[str, Any] = {**sampling, "steps": steps, "delta": arguments.delta, "accountant": arguments.accountant}
    noise = accounting.noise_multiplier(target_epsilon=arguments.epsilon, **where)
    noise = math.ceil(noise * 10**DIGITS) / 10**DIGITS
    spent = accounting.epsilon(noise_multiplier=noise, **where) if steps else 0.0
    if arguments.json:
        print_json({"noise_multiplier": noise, "epsilon": spent, "target_epsilon": arguments.epsilon, **where})
    else:
        about = _in_words(accounting.Setting(**sampling).event(noise, steps), arguments.delta)
        print(f"noise multiplier {noise:.{DIGITS}f}\nepsilon {spent:.4g} ({arguments.accountant.upper()}) {about}")
    return 0


def add_ledger(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``ghostclip ledger``."""
    parser.epilog = (
        "example: ghostclip ledger run.ledger --delta 1e-6\n"
        "The file is read, never written; a run in progress is counted with all the steps it has reserved."
    )
    parser.add_argument("ledger", metavar="FILE", help="that PrivacyEngine(ledger=...) or train --ledger has written")
    _add_accounting(parser, "which bound epsilon is (default: pld, the tighter one)")


def run_ledger(arguments: argparse.Namespace) -> int:
    """Checks every record, and prints what was charged and what it adds up to."""
    contents = Ledger(arguments.ledger).contents
    head, torn, charges = contents.head, len(contents.torn), contents.charges.values()
    spent = [charge.spent for charge in charges]
    by_run: dict[tuple[str, Event], list[Charge]] = {}
    for charge in charges:
        by_run.setdefault((charge.run, replace(charge.event, count=1)), []).append(charge)
    # One row for each run and each kind of step it took, in the order in which they started.
    runs = [_row(run, event, taken) for (run, event), taken in by_run.items()]
    choice = {"delta": arguments.delta, "accountant": arguments.accountant}
    if arguments.json:
        found = {"ledger": arguments.ledger, "records": head.records, "head": head.hash, "torn_bytes": torn}
        print_json(found | {"runs": runs, "epsilon": accounting.epsilon_of(spent, **choice), **choice})
        return 0
    print(f"{arguments.ledger}: {head.records} records, each whole and in its place; the last hash is {head.hash}")
    if torn:
        print(f"A crash cut the last line short after {torn} bytes; the next run mends it.")
    for row, (_, event) in zip(runs, by_run, strict=True):
        times = f"from {row['from']} to {row['to']}"
        noise = f"{row['noise']} noise" + (f" from {row['generator']}" if row["generator"] else "")
        print(f"  run {row['run']}, {noise}, {times}: {accounting.steps(replace(event, count=row['steps']))}")
    print(accounting.guarantee(spent, **choice))
    return 0


def _row(run: str, event: Event, charges: Sequence[Charge]) -> dict[str, Any]:
    reserved, returned = sum(charge.event.count for charge in charges), sum(charge.returned for charge in charges)
    return {
        "run": run,
        "noise": charges[0].noise,
        "generator": charges[0].generator,
        "from": charges[0].time,
        "to": charges[-1].time,
        "setting": accounting.samples(event),
        "reserved": reserved,
        "returned": returned,
        "steps": reserved - returned,
        "sample_rate": event.sample_rate,
        "noise_multiplier": event.noise_multiplier,
        "neighboring": event.relation,
        "unit": event.unit,
    }


def _add_accounting(parser: argparse.ArgumentParser, about: str) -> None:
    """Adds ``--delta`` and ``--accountant``; ``about`` says what the latter decides."""
    parser.add_argument("--delta", type=float, default=1e-5, help="default: 1e-5")
    parser.add_argument("--accountant", choices=accounting.ACCOUNTANTS, default="pld", help=about)


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    """Adds the two ways to say how examples were sampled and how often, and the kinds of sampling and neighbours."""
    add = parser.add_argument_group("sampling", "either the first two or the next three").add_argument
    add("--sample-rate", type=float, metavar="Q", help="expected share of the examples in a batch")
    add("--steps", type=int, metavar="N", help="number of batches")
    add("--examples", type=int, metavar="N", help="size of the training set")
    add("--batch-size", type=int, metavar="B", help="expected batch size")
    add("--epochs", type=int, metavar="E", help="passes over the training set")
    drawn = (
        "how a batch is drawn: each example by a coin of its own; so many of them; by coins, cut down to "
        "--max-batch-size; by coins from --bands groups in turn; or each example once an epoch (default: poisson)"
    )
    add("--sampling", choices=SAMPLINGS, default="poisson", help=drawn)
    add("--max-batch-size", type=int, metavar="M", help="with --sampling truncated, and --examples")
    add(
        "--bands",
        type=int,
        default=1,
        metavar="B",
        help="of correlated noise, with --sampling cyclic_poisson or cyclic",
    )
    differing = "what neighbouring data sets differ by: one example's presence, or what it is (default: %(default)s)"
    add("--neighboring", choices=RELATIONS, default="add_or_remove_one", help=differing)


def _sampling_of(arguments: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """How each step's batch is drawn, as arguments of `accounting.Setting`, and how many steps there are.

    Raises:
        UsageError: the steps are given in neither way or in both; ValueError: a number is out of range.
    """
    direct = (arguments.sample_rate, arguments.steps)
    counted = (arguments.examples, arguments.batch_size, arguments.epochs)
    if None not in direct and counted == (None, None, None):
        rate, steps = fraction(sample_rate=arguments.sample_rate), whole(steps=arguments.steps)
    elif None not in counted and direct == (None, None):
        examples, batch = positive_int(examples=arguments.examples), positive_int(batch_size=arguments.batch_size)
        if batch > examples:
            raise ValueError(f"batch_size must be at most the number of examples, {examples}; got {batch}")
        accounting.warn_of_delta(arguments.delta, examples)
        rate, steps = batch / examples, whole(epochs=arguments.epochs) * max(1, round(examples / batch))
    else:
        raise UsageError("give --sample-rate and --steps, or --examples, --batch-size and --epochs")
    found = {"sample_rate": rate, "sampling": arguments.sampling, "neighboring": arguments.neighboring}
    if arguments.bands != 1:
        found["bands"] = arguments.bands
    if arguments.sampling == "truncated":
        if arguments.examples is None or arguments.max_batch_size is None:
            raise UsageError("--sampling truncated needs --examples, --batch-size, --epochs and --max-batch-size")
        found |= {"dataset_size": arguments.examples, "max_batch_size": arguments.max_batch_size}
    elif arguments.max_batch_size is not None:
        raise UsageError("--max-batch-size is for --sampling truncated")
    return found, steps


def _in_words(event: Event, delta: float) -> str:
    """After how many steps of what kind something is spent, and which data sets are neighbours."""
    about = f"at delta {delta:g}, after {event.count:,} steps over {accounting.samples(event)}"
    return f"{about}\n{accounting.neighbours(event)}"
