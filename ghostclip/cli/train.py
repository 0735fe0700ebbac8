"""ghostclip train: trains one of the paper's models privately, and tells what it reached and what it spent."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ghostclip import datasets, models, report
from ghostclip.checkpoint import previous_of
from ghostclip.cli.arguments import UsageError, as_bytes, as_path, converted, print_json
from ghostclip.cli.methods import METHODS, OPTIMIZERS, Ghost
from ghostclip.cli.plan import DEFAULT_EPOCHS, DEFAULT_EPSILON, PlannedRun, runs_of, wants_comparison
from ghostclip.cli.progress import bar
from ghostclip.cli.summary import record_of, run_table
from ghostclip.cli.training import Keeping, Outcome, build, train
from ghostclip.datasets import Data
from ghostclip.report import Record
from ghostclip.validate import positive_int

__all__ = ["add_configuration", "add_train", "load_data", "run_train", "set_threads"]

MARKS = 6
WEIGHTS = "model.safetensors"
COUNT_OR_AUTO = converted(lambda text: text if text == "auto" else int(text), "a whole number or auto")

log = logging.getLogger("ghostclip")

EPILOG = """\
Default settings suit public data of the same size. Choosing settings by their results on private data spends privacy
that no accountant here counts. The noise is never seeded; --seed sets the initial weights alone.

examples:
  ghostclip train --model oriented --data digits --report reports/demo
  ghostclip train --model lstm --data mnist --data-dir ~/mnist --epsilon 3 --delta 1e-5 --checkpoint runs/lstm
  ghostclip train --model lstm --data mnist --data-dir ~/mnist --epsilon 3 --delta 1e-5 --checkpoint runs/lstm --resume
  ghostclip train --model transformer --data imdb --data-dir ~/aclImdb --vocabulary words.txt --epsilon 8"""


def add_train(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.epilog = EPILOG
    add_configuration(parser)
    _add_checkpoints(parser)
    output = parser.add_argument_group("output")
    output.add_argument(
        "--ledger",
        metavar="FILE",
        help="charge every step there first; a file that exists is continued, epsilon is of all that is in it, "
        "and a new run ends where that would pass --epsilon",
    )
    seeds = "train from so many seeds, --seed and the next ones, and tell the mean and range (default: 1)"
    output.add_argument("--seeds", type=int, default=1, metavar="N", help=seeds)
    output.add_argument("--report", type=as_path, metavar="DIR", help="folder to write a page with plots and JSON to")
    output.add_argument(
        "--compare",
        action=argparse.BooleanOptionalAction,
        help="also train at epsilon 3 and 1 and without privacy, beside oriented the linear model, too, and time every "
        "method (default: for digits)",
    )


def add_configuration(parser: argparse.ArgumentParser) -> None:
    """Adds what a training is made of, for every command that runs or examines one."""
    parser.set_defaults(ledger=None)
    add = parser.add_argument_group("what to train").add_argument
    add("--model", choices=models.NAMES, default="cnn", help="default: cnn")
    add(
        "--data",
        choices=datasets.NAMES,
        default="digits",
        help="default: digits, which are embedded; images: your "
        "own, in folders train/CLASS/ and test/CLASS/ of --data-dir (other data: in Python)",
    )
    add("--data-dir", type=as_path, metavar="DIR", help="folder that holds the data set's files")
    add("--vocabulary", type=as_path, metavar="FILE", help="for imdb: public words, one a line")
    add("--method", choices=METHODS, default="auto", help="how per-example gradients are clipped (default: auto)")
    add("--seed", type=int, default=0, help="of the initial weights, never of the noise (default: 0)")
    add = parser.add_argument_group("privacy").add_argument
    add("--epsilon", type=float, help=f"target (default: {DEFAULT_EPSILON:g})")
    add("--noise-multiplier", type=float, metavar="SIGMA", help="instead of --epsilon; 0 is not private")
    how = "hardened: rounded to a lattice, so that no digit gives data away (default: standard)"
    add("--noise", choices=("standard", "hardened"), help=how)
    add("--delta", type=float, default=1e-5, help="default: 1e-5")
    add("--max-norm", type=float, metavar="C", help="clipping norm")
    about = "defaults depend on the size of the training set"
    add = parser.add_argument_group("training", about).add_argument
    add("--epochs", type=int, metavar="E", help=f"default: {DEFAULT_EPOCHS}; for oriented networks by recipe")
    add("--batch-size", type=int, metavar="B", help="expected size of a Poisson-sampled batch")
    most = "most examples in memory at once; auto: as many as fit, found at the first step "
    most += "(default: a whole batch; for oriented networks 128)"
    add("--max-physical-batch-size", type=COUNT_OR_AUTO, metavar="N", help=most)
    limit = "for auto: memory of the whole process, in bytes or such as 4GiB (default: nine tenths of what is left)"
    add("--memory-limit", type=as_bytes, metavar="SIZE", help=limit)
    add("--learning-rate", type=float, metavar="RATE")
    add("--optimizer", choices=OPTIMIZERS)
    threads = "processor threads torch may use (default: torch's own choice; 1 for digits)"
    add("--threads", type=int, metavar="N", help=threads)


def _add_checkpoints(parser: argparse.ArgumentParser) -> None:
    """Adds ``--checkpoint``, ``--every`` and ``--resume``."""
    group = parser.add_argument_group("checkpoints")
    group.add_argument(
        "--checkpoint",
        type=as_path,
        metavar="DIR",
        help="keep the run there, after each epoch and when it is interrupted by Ctrl-C; without --ledger its steps "
        "are charged to DIR.ledger, so that a crash makes none forgotten",
    )
    group.add_argument("--every", type=int, metavar="N", help="save after every N steps instead")
    group.add_argument("--resume", action="store_true", help="go on from --checkpoint")


def run_train(arguments: argparse.Namespace) -> int:
    """Trains, compares, prints, writes the report."""
    if arguments.report is not None:
        report.prepare(arguments.report)
    keeping = _keeping_of(arguments)
    seeds = _seeds_of(arguments)
    set_threads(arguments)
    data = load_data(arguments)
    # A network that does not take such inputs is told before anything runs.
    build(arguments.model, data, arguments.seed)
    outcomes: list[Outcome] = []
    # Epsilon is computed after a few steps: among them the first, which may spend most, and the last.
    shares = [part / MARKS for part in range(1, MARKS + 1)]
    for plan in runs_of(arguments, len(data.train)):
        marks = () if outcomes else sorted({1, *(max(1, round(plan.steps * share)) for share in shares)})
        epoch = plan.steps // plan.settings.epochs if arguments.report is not None else None
        try:
            outcomes += _trained(plan, seeds, data, marks, keeping, epoch)
        except KeyboardInterrupt:
            if keeping is not None and keeping.path.exists():
                print(f"the run is kept at {keeping.path}; add --resume to go on from there", file=sys.stderr)
            raise
    told = arguments.report is not None
    speeds = wants_comparison(arguments)
    command, weights = arguments.command_line, WEIGHTS if told else None
    record = record_of(data, outcomes, page=told, speeds=speeds, command=command, weights=weights)
    page = None
    try:
        if told:
            log.info("writing the report to %s", arguments.report)
            page = report.write(record, arguments.report)
            _save_weights(outcomes[0], arguments.report)
    finally:  # what was trained is shown in any case, since it may have taken hours
        if arguments.json:
            print_json(report.figures(record) | {"report": str(page) if page else None})
        else:
            _print(record, page, arguments.delta)
    return 0


def _save_weights(outcome: Outcome, folder: Path) -> None:
    """Puts the first model's weights beside its report: of a private training they are what was released."""
    from safetensors.torch import save_file

    weights = {name: tensor.contiguous() for name, tensor in outcome.model.state_dict().items()}
    save_file(weights, folder / WEIGHTS)


def _trained(
    plan: PlannedRun, seeds: range, data: Data, marks: Sequence[int], keeping: Keeping | None, epoch: int | None
) -> list[Outcome]:
    """One run from each seed, under one bar. The first has the epsilons at the marks, and the plan's calibration."""
    outcomes = []
    with bar(plan.name, plan.steps * len(seeds), "step") as watch:
        for seed in seeds:
            settings, first = replace(plan.settings, seed=seed), seed == seeds[0]
            outcome = train(settings, data, plan.name, watch, marks if first else (), keeping, epoch)
            seconds = plan.calibration_seconds if first else 0.0
            outcomes.append(replace(outcome, run=replace(outcome.run, calibration_seconds=seconds)))
    return outcomes


def _keeping_of(arguments: argparse.Namespace) -> Keeping | None:
    """What was asked for; fills in the ledger that goes with it.

    Raises:
        UsageError: options that don't go together, or a checkpoint that is or isn't there.
    """
    if arguments.checkpoint is None:
        for option in ("every", "resume"):
            if getattr(arguments, option):
                raise UsageError(f"--{option} needs --checkpoint DIR, the folder that the run is kept in")
        return None
    if METHODS[arguments.method] is not Ghost:
        raise UsageError(f"--method {arguments.method} is there for comparison and keeps no --checkpoint; leave it out")
    if arguments.compare:
        raise UsageError("the runs beside yours are not kept; give --checkpoint or --compare, not both")
    path = arguments.checkpoint
    there = (path.is_dir() and any(path.iterdir())) or previous_of(path).exists()
    if arguments.resume and not there:
        raise UsageError(f"there is no checkpoint at {path} to go on from; leave out --resume to start a run")
    if there and not arguments.resume:
        raise UsageError(f"there is a checkpoint at {path}; add --resume to go on from it, or give another folder")
    if arguments.ledger is None:
        arguments.ledger = f"{path}.ledger"
    every = None if arguments.every is None else positive_int(every=arguments.every)
    return Keeping(path, every, arguments.resume)


def _seeds_of(arguments: argparse.Namespace) -> range:
    """The seeds to train from.

    Raises:
        UsageError: more than one, where each would be kept at one place, or charged to one ledger.
    """
    seeds = range(arguments.seed, arguments.seed + positive_int(seeds=arguments.seeds))
    for option in ("checkpoint", "ledger"):
        if len(seeds) > 1 and getattr(arguments, option) is not None:
            raise UsageError(f"--seeds {len(seeds)} and --{option} don't go together; leave one out")
    return seeds


def set_threads(arguments: argparse.Namespace) -> None:
    """As asked. On the digits one thread is as fast as several, and does not wait for them on a busy machine."""
    if arguments.threads is not None:
        torch.set_num_threads(positive_int(threads=arguments.threads))
    elif arguments.data == "digits":
        torch.set_num_threads(1)


def _print(record: Record, page: Path | None, delta: float) -> None:
    """The results as text."""
    examples = record.settings["training examples"], record.settings["test examples"]
    print(f"{record.title}: {examples[0]:,} training examples, {examples[1]:,} test examples\n")
    print(run_table(record.runs, delta, record.speeds, record.speed_batch_size))
    if page is not None:
        print(f"\nreport: {page}\nweights of the first training: {page.parent / WEIGHTS}")


def load_data(arguments: argparse.Namespace) -> Data:
    """The data set the arguments name."""
    if arguments.data != "digits" and arguments.data_dir is None:
        raise UsageError(f"--data {arguments.data} needs --data-dir, the folder that holds its files")
    if arguments.data == "digits" and arguments.data_dir is not None:
        raise UsageError("digits are embedded and take no --data-dir; for files name their format with --data")
    if arguments.data != "imdb" and arguments.vocabulary is not None:
        raise UsageError(f"--vocabulary is for imdb; {arguments.data} has none")
    return datasets.load(arguments.data, arguments.data_dir, arguments.vocabulary)
