"""The command line: one table of commands, each a function that adds its arguments and one that runs it."""

from __future__ import annotations

import errno
import os
import shlex
import sys
from collections.abc import Sequence

import ghostclip
from ghostclip.errors import GhostClipError
from ghostclip.interruption import INTERRUPTED, ends_a_command

with ends_a_command():
    from ghostclip.bench import command as bench
    from ghostclip.cli import audit, check, spending, train
    from ghostclip.cli.arguments import OneLineParser
    from ghostclip.cli.progress import log_on_stderr

__all__ = ["main"]


def _add_bench(parser: OneLineParser) -> None:
    """Adds the benchmark's arguments."""
    parser.epilog = "example: ghostclip bench --workloads mlp,cnn --seconds 5"
    bench.add_arguments(parser)


# {command: (adds its arguments to a parser, runs it and returns the exit status, what it does)}
COMMANDS = {
    "train": (train.add_arguments, train.run, "train one of the paper's models privately, and tell what it spent"),
    "epsilon": (spending.add_epsilon, spending.run_epsilon, "privacy spent by a setting"),
    "calibrate": (spending.add_calibrate, spending.run_calibrate, "the least noise that keeps to a target epsilon"),
    "check": (check.add_check, check.run_check, "what stands in a model's way to private training, all at once"),
    "explain": (check.add_explain, check.run_explain, "the plan for a model, layer by layer: which rule, and why"),
    "bench": (_add_bench, bench.run, "step times on this machine, beside non-private training and the naive loop"),
    "audit": (audit.add_arguments, audit.run, "an empirical lower bound on epsilon, beside the claimed one"),
    "ledger": (spending.add_ledger, spending.run_ledger, "what runs spent by a ledger, and whether it is whole"),
}
# {package: the extra it comes with}
EXTRAS = dict.fromkeys(("PIL", "jinja2", "matplotlib", "sklearn", "tqdm"), "cli") | {"cryptography": "hardened"}
# What to do about an error of the system.
REMEDIES = dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "choose a place that you may write to")
REMEDIES |= {errno.ENOSPC: "free some space on that disk, or choose another place", errno.ENOENT: "check the path"}
MISTAKE, READER_GONE = 2, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status; without a command, it prints the help.

    0: done. 1: `check` found obstacles, `bench` a wrong contender of ours, `audit` more spent than claimed. 2: a
    mistake, told in one line on stderr. 130: interrupted by Ctrl-C.

    Args:
        argv: the arguments; None for the process's own.
    """
    try:
        parser = _parser()
        arguments = parser.parse_args(argv)
        status = 0
        if arguments.command is None:
            parser.print_help()
        else:
            arguments.command_line = shlex.join(["ghostclip", *(sys.argv[1:] if argv is None else argv)])
            with log_on_stderr():
                status = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except SystemExit as stop:  # argparse's way to end --help and --version
        return stop.code if isinstance(stop.code, int) else MISTAKE
    except KeyboardInterrupt:
        return _end("interrupted", INTERRUPTED)
    except BrokenPipeError:
        # What reads our output is gone (as with `| head`); Python would complain about it once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_GONE
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in EXTRAS:
            raise
        return _end(f'{missing} is not installed; run: pip install "ghostclip[{EXTRAS[missing]}]"', MISTAKE)
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        remedy = f"; {REMEDIES[error.errno]}" if error.errno in REMEDIES else ""
        return _end(f"{place}{error.strerror or error}{remedy}", MISTAKE)
    except (GhostClipError, ValueError, MemoryError) as error:
        return _end(str(error) or "memory ran out", MISTAKE)


def _parser() -> OneLineParser:
    """The parser of all commands."""
    parser = OneLineParser(
        prog="ghostclip",
        description="Differentially private training with exact per-example gradient clipping.",
        epilog="example: ghostclip train --model cnn --data digits --report reports/demo",
    )
    parser.add_argument("--version", action="version", version=f"ghostclip {ghostclip.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (add_arguments, run, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}")
        add_arguments(command)
        command.set_defaults(run=run)
    return parser


def _end(message: str, status: int) -> int:
    """Says one line on stderr, whatever the message's shape, and passes the status on."""
    print("ghostclip: " + " ".join(message.split()), file=sys.stderr)
    return status
