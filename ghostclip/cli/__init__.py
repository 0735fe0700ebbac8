"""The command line: one table of commands, whose modules are imported when their command is given."""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import shlex
import sys
from collections.abc import Collection, Sequence
from typing import Any

import ghostclip
from ghostclip.cli.arguments import OneLineParser
from ghostclip.cli.progress import log_on_stderr
from ghostclip.errors import GhostClipError

__all__ = ["main"]


# {command: (the module that has its add_<command> and run_<command>, what it does)}. Importing a module other
# than `spending` takes torch and seconds, so ``--help``, ``--version`` and a mistyped command import none.
COMMANDS = {
    "train": ("train", "train one of the paper's models privately, and tell what it spent"),
    "epsilon": ("spending", "privacy spent by a setting"),
    "calibrate": ("spending", "the least noise that keeps to a target epsilon"),
    "check": ("check", "which layers stand in the way of private training, and whether the forward mixes examples"),
    "explain": ("check", "the plan for a model, layer by layer: which rule, and why"),
    "bench": ("bench", "step times on this machine, beside non-private training and the naive loop"),
    "audit": ("audit", "an empirical lower bound on epsilon, beside the claimed one"),
    "tune": ("tune", "the best of a random number of private trainings, charged once for all of them"),
    "ledger": ("spending", "what runs spent by a ledger, and whether it is whole"),
}
# {package: the extra it comes with}
EXTRAS = dict.fromkeys(("PIL", "jinja2", "matplotlib", "safetensors", "tqdm"), "cli")
# What to do about an error of the system.
REMEDIES = dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "choose a place that you may write to")
REMEDIES |= dict.fromkeys((errno.ENOTDIR, errno.EEXIST), "choose another place")
REMEDIES |= {errno.ENOSPC: "free some space on that disk, or choose another place", errno.ENOENT: "check the path"}
MISTAKE, INTERRUPTED, READER_GONE = 2, 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status; without a command, it prints the help.

    0: done. 1: `check` found obstacles, `bench` a wrong contender of ours, `audit` more spent than claimed. 2: a
    mistake, told in one line on stderr. 130: interrupted by Ctrl-C.

    Args:
        argv: the arguments; None for the process's own.
    """
    try:
        given = sys.argv[1:] if argv is None else argv
        parser = _parser(given)
        arguments = parser.parse_args(given)
        status = 0
        if arguments.command is None:
            parser.print_help()
        else:
            arguments.command_line = shlex.join(["ghostclip", *given])
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
        return _end(f'{missing} is not installed; run in a checkout: pip install ".[{EXTRAS[missing]}]"', MISTAKE)
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        remedy = f"; {REMEDIES[error.errno]}" if error.errno in REMEDIES else ""
        return _end(f"{place}{error.strerror or error}{remedy}", MISTAKE)
    except (GhostClipError, ValueError, MemoryError) as error:
        return _end(str(error) or "memory ran out", MISTAKE)


class _Version(argparse.Action):
    """Prints the version, and which kernels run here and from where."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from ghostclip.native import kernels

        print(f"ghostclip {ghostclip.__version__}\nC kernels: {kernels()}")
        parser.exit()


def _parser(given: Collection[str] = COMMANDS) -> OneLineParser:
    """The parser of all commands, with the arguments of those that are among what was ``given``."""
    parser = OneLineParser(
        prog="ghostclip",
        description="Differentially private training with exact per-example gradient clipping.",
        epilog="example: ghostclip train --model oriented --data digits --report reports/demo",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show versions and kernels, and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (module, summary) in COMMANDS.items():
        about = f"{summary[0].upper()}{summary[1:]}"
        command = commands.add_parser(name, help=summary, description=about)
        if name in given:
            _prepare(name, module, command)
    return parser


def _prepare(name: str, module: str, parser: OneLineParser) -> None:
    """Imports the command's module and adds its arguments, and ``--json``, which all have."""
    command = importlib.import_module(f"ghostclip.cli.{module}")
    getattr(command, f"add_{name}")(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.set_defaults(run=getattr(command, f"run_{name}"))


def _end(message: str, status: int) -> int:
    """Says one line on stderr, whatever the message's shape, and passes the status on."""
    print("ghostclip: " + " ".join(message.split()), file=sys.stderr)
    return status
