"""ghostclip audit: an empirical lower bound on epsilon, beside the claimed one."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from ghostclip.audit import Audit, audit
from ghostclip.cli.arguments import UsageError, as_path, print_json
from ghostclip.cli.methods import METHODS, OPTIMIZERS, Ghost, Settings, cross_entropy
from ghostclip.cli.plan import runs_of
from ghostclip.cli.progress import bar
from ghostclip.cli.train import add_configuration, load_data, set_threads
from ghostclip.cli.training import build
from ghostclip.report import plain
from ghostclip.report.plots import AuditPanel, audit_plot

__all__ = ["add_audit", "panels_of", "run_audit"]

AUDITED = tuple(name for name, kind in METHODS.items() if kind is Ghost)

DESCRIPTION = """\
Attacks a training, described as for `ghostclip train`, and says what it must spend at least. White box: real releases
of the engine, with a canary of known gradient among the examples or not. One run: a whole training with many canaries.
What is released to the attacks is not charged: publish an audit of private data no more than the data."""
EPILOG = """\
exit status: 0 consistent with the claim, 1 more is spent than claimed

examples:
  ghostclip audit --model mlp --epochs 5 --draws 20000 --plot audit.png
  ghostclip audit --model cnn --data mnist --data-dir ~/mnist --epsilon 3 --canaries 0 --json"""


def add_audit(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    add_configuration(parser)
    parser.set_defaults(compare=False)
    add = parser.add_argument_group("attacks").add_argument
    add("--draws", type=int, default=10_000, metavar="N", help="white-box releases; 0: none (default: 10000)")
    most = "in the one run; 0: no such run (default: half of the examples, 1000 at most)"
    add("--canaries", type=int, metavar="N", help=most)
    each = "releases a white-box trial sees (default: 1)"
    add("--steps-per-trial", type=int, default=1, metavar="N", help=each)
    coins = "leave it to the engine's sampling whether the canary is in a release, and don't tell the adversary"
    add("--sampled", action="store_true", help=coins)
    add("--confidence", type=float, default=0.95, help="with which all bounds hold together (default: 0.95)")
    output = parser.add_argument_group("output")
    output.add_argument("--out", type=as_path, metavar="FILE", help="write all figures as JSON")
    output.add_argument("--plot", type=as_path, metavar="FILE", help="write a PNG of the bounds over the releases")


def run_audit(arguments: argparse.Namespace) -> int:
    """Audits, prints, writes the files; 1 when more is spent than claimed."""
    _check(arguments)
    set_threads(arguments)
    data = load_data(arguments)
    plan = next(runs_of(arguments, len(data.train)))
    settings = plan.settings
    if not settings.noise_multiplier:
        raise UsageError("noise multiplier 0 claims nothing (epsilon = inf), so there is nothing to audit")
    found = audit(
        build(settings.model, data, settings.seed),
        cross_entropy,
        data.train,
        steps=plan.steps,
        **settings.of_engine,
        optimizer=lambda parameters: OPTIMIZERS[settings.optimizer](parameters, settings.learning_rate),
        draws=arguments.draws,
        canaries=arguments.canaries,
        sampled=arguments.sampled,
        steps_per_trial=arguments.steps_per_trial,
        confidence=arguments.confidence,
        phase=bar,
    )
    figures = plain(found.figures() | {"settings": asdict(settings) | {"data": data.name, "steps": plan.steps}})
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(figures, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    if arguments.plot is not None:
        arguments.plot.write_bytes(audit_plot(panels_of(found), found.delta, found.confidence))
    if arguments.json:
        print_json(figures)
    else:
        _print(found, settings)
    return 1 if found.violated else 0


def panels_of(found: Audit) -> list[AuditPanel]:
    """One panel for a white-box trial's claim, where there were any, and one for the training's."""
    panels = []
    white, lines = found.white_box, {}
    releases = [point.releases for point in white.curve] if white is not None else []
    if white is not None:
        what = "one release" if white.steps_per_trial == 1 else f"{white.steps_per_trial} releases"
        claimed = next(bound.claimed for bound in found.bounds if bound.about == "trial")
        both = {
            "Gaussian": [point.gaussian for point in white.curve],
            "Clopper-Pearson": [point.clopper_pearson for point in white.curve],
        }
        panels.append(AuditPanel(f"{what}, sampling rate {white.sample_rate:.3g}", claimed, releases, both))
        lines = {"Gaussian": [point.training for point in white.curve]}
    levels = {bound.method: bound.epsilon for bound in found.bounds if bound.method.startswith("one-run")}
    panels.append(AuditPanel("the whole training", found.claimed, releases, lines, levels))
    return panels


def _check(arguments: argparse.Namespace) -> None:
    """Everything that can be told before the data are loaded."""
    if arguments.method not in AUDITED:
        raise UsageError(
            f"the audit runs the engine, whose methods are {', '.join(AUDITED)}; got --method {arguments.method}"
        )
    if arguments.max_physical_batch_size == "auto":
        raise UsageError("the audit takes a number as --max-physical-batch-size; give one, or leave it out")
    if arguments.draws == 0 and arguments.canaries == 0:
        raise UsageError("--draws 0 and --canaries 0 leave nothing to audit; give one of them")
    for path in (arguments.out, arguments.plot):
        if path is not None and not path.parent.is_dir():
            raise UsageError(f"{path} can't be written: there is no folder {path.parent}")
    if arguments.plot is not None:
        import matplotlib.figure  # noqa: F401  (its lack is told now, not after the audit)


def _print(found: Audit, settings: Settings) -> None:
    """The results as text."""
    print(f"{settings.model} with {settings.method}, noise multiplier {settings.noise_multiplier:.4g}\n")
    print(f"{'lower bound':18}{'of':12}{'epsilon':>9}{'claimed':>9}{'share':>8}")
    print("-" * 56)
    for bound in found.bounds:
        share = f"{bound.epsilon / bound.claimed:.0%}"
        print(f"{bound.method:18}{bound.about:12}{bound.epsilon:9.4g}{bound.claimed:9.4g}{share:>8}")
    if (white := found.white_box) is not None:
        print(
            f"\nwhite box: {white.trials:,} trials of {white.steps_per_trial} release(s) at sampling rate "
            f"{white.sample_rate:.4g}; noise multiplier at most {white.noise_multiplier:.4g}"
        )
    if (once := found.one_run) is not None:
        print(f"one run: {once.correct} of {once.guesses} guesses right, {once.canaries} canaries")
    print(f"epsilon is at delta {found.delta:g}; {found.seconds:.0f} seconds\n\n{found.verdict}")
