"""When examples that begin to mix are seen, and how often the alarm of "cached" rings for honest batches.

A network is honest in its first batches: what mixes examples is multiplied with 2 ** -60 there, far below rounding, so
that no gradient is zero and nothing is watched. In batch n the factor becomes 1, under the same structure of the graph.
"from zero" are runs whose factor is 0 at first. Noted is in which batch the network is refused: 0 is the first mixed
one. Batches before that one were clipped by rows of which it was not known that they mix.

All of these networks have an operation that may move examples by values, so that they are measured in every batch.
"Marks alone" are runs in which nothing is said to move: what the marks see by which one batch in `WATCHED` is watched,
here every one that isn't measured.

The last part draws norms that don't depend on marks, and counts how often `ghostclip.graph.alarm.rings`.

    python experiments/ownership.py [--seeds N] [--draws N] [--sizes B ...] [--out FOLDER]

writes ownership.json and ownership.md. One thread.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

from ghostclip import GhostClipper
from ghostclip.bench.machine import commit, describe, in_words
from ghostclip.errors import UnsupportedModelError
from ghostclip.graph import layouts, measuring
from ghostclip.graph.alarm import ALARM, CERTAIN, LARGE, SUSPICIOUS, figures, rings
from ghostclip.graph.moves import Movements

RESULTS = Path(__file__).parent / "results"
FILE = "ownership"
Mix = Callable[[Tensor, Tensor], Tensor]  # (activations [B, d], factor []) -> activations that mix where it is 1

SILENT, FAINT = 0.0, 2.0**-60
STARTS = (1, 3, 10)  # the batch in which mixing begins
LAST = 20  # so many batches are tried from the first mixed one on
PASSES = {"cached": "cached", "reweight": "reweight", "cached, plain loop": "cached"}
WIDTH = 16


def over_norm(h: Tensor, limit: float) -> Tensor:
    return h * (limit / h.norm()).clamp(max=1)


def by_matrix(h: Tensor, factor: Tensor) -> Tensor:
    matrix = torch.linspace(-1, 1, len(h) ** 2).view(len(h), len(h))
    return h + (factor * matrix) @ h


def by_hook(h: Tensor, factor: Tensor) -> Tensor:
    if h.requires_grad:
        h.register_hook(lambda grad: grad + factor * (over_norm(grad, 1e-3) - grad))
    return h


KINDS: dict[str, Mix] = {
    "minus the mean over the batch": lambda h, g: h - g * h.mean(0),
    "minus a tenth of it": lambda h, g: h - 0.1 * g * h.mean(0),
    "minus a hundredth of it": lambda h, g: h - 0.01 * g * h.mean(0),
    "minus a ten-thousandth of it": lambda h, g: h - 1e-4 * g * h.mean(0),
    "a cap on the norm of the batch": lambda h, g: h + g * (over_norm(h, 1.0) - h),
    "softmax over the batch": lambda h, g: h + g * (h.softmax(0) - h),
    "the example before added": lambda h, g: h + g * torch.cat([h[:1], h[:-1]]),
    "cumsum": lambda h, g: h + g * h.cumsum(0),
    "the maximum added": lambda h, g: h + g * h.amax(0),
    "two examples add each other": lambda h, g: h + g * torch.cat([h[1:2], h[:1], h[2:]]),
    "one example adds another": lambda h, g: h + g * torch.cat([h[1:2], h[1:]]),
    "a constant matrix": by_matrix,
    "a hook that caps the gradient's norm": by_hook,
    "one example adds a ten-thousandth of another": lambda h, g: h + 1e-4 * g * torch.cat([h[1:2], h[1:]]),
}


class Network(nn.Module):
    """Two linear layers, between which examples mix."""

    def __init__(self, mix: Mix) -> None:
        super().__init__()
        self.below, self.above, self.mix = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 4), mix
        self.register_buffer("factor", torch.tensor(0.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.above(self.mix(self.below(x).tanh(), self.factor))


def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


class Setting(NamedTuple):
    """One row: what mixes, from which batch on, its factor before, and who is to see it."""

    kind: str
    second_pass: str
    size: int
    start: int
    before: float
    marks_alone: bool = False


@contextmanager
def without_rules() -> Iterator[None]:
    """Inside, no operation is said to move examples, and marks watch every batch that isn't measured."""
    with mock.patch.object(measuring, "movements", return_value=Movements()), mock.patch.object(layouts, "WATCHED", 1):
        yield


def refused_in(setting: Setting, seed: int) -> int | None:
    """Which batch is refused, 0 for the first mixed one; None where none of `LAST` is.

    Raises:
        UnsupportedModelError: an honest batch is refused.
    """
    torch.manual_seed(seed)
    model = Network(KINDS[setting.kind])
    clipper = GhostClipper(model, clipping=1.0, second_pass=PASSES[setting.second_pass])
    plain_loop = setting.second_pass not in PASSES.values()
    for number in range(1, setting.start + LAST):
        mixed = number >= setting.start
        model.factor.fill_(1.0 if mixed else setting.before)
        batch = torch.randn(setting.size, 8), torch.randint(0, 4, (setting.size,))
        try:
            if plain_loop:
                clipper.backward(losses(model, batch))
            else:
                clipper.clip(losses, batch)
        except UnsupportedModelError:
            if not mixed:
                raise
            return number - setting.start
        model.zero_grad()
    return None


def settings(sizes: Sequence[int]) -> Iterator[Setting]:
    """All rows, those of a kind together."""
    for kind in KINDS:
        for second_pass in PASSES:
            for size in sizes:
                for start in STARTS:
                    yield Setting(kind, second_pass, size, start, FAINT)
                    if start > 1:
                        yield Setting(kind, second_pass, size, start, FAINT, marks_alone=True)
                    if start == STARTS[-1]:
                        yield Setting(kind, second_pass, size, start, SILENT)


def measure(setting: Setting, seeds: int) -> dict[str, Any]:
    """In which batch a setting was refused, over seeds."""
    with without_rules() if setting.marks_alone else nullcontext():
        found = [refused_in(setting, seed) for seed in range(seeds)]
    return {**setting._asdict(), "refused_in": found}


# Norms of honest examples: [draws, B].
NORMS: dict[str, Callable[[int, int], Tensor]] = {
    "all but equal": lambda draws, size: 1 + 1e-3 * torch.rand(draws, size),
    "normal gradients, 100 numbers": lambda draws, size: (
        torch.distributions.Chi2(100.0).sample(torch.Size((draws, size))).sqrt()
    ),
    "log-normal, sigma 1": lambda draws, size: torch.randn(draws, size).exp(),
    "log-normal, sigma 4": lambda draws, size: (4 * torch.randn(draws, size)).exp(),
    "Pareto, exponent 1": lambda draws, size: 1 / torch.rand(draws, size).clamp(min=1e-7),
    "half of them zero": lambda draws, size: torch.randn(draws, size).relu(),
}


def false_alarms(name: str, size: int, draws: int) -> dict[str, Any]:
    """How often the alarm rings for norms that don't depend on marks.

    The largest measured norm is that of four more batches, as where the 1st, 2nd, 4th and 8th were measured.
    """
    torch.manual_seed(0)
    counts = dict.fromkeys(("either", "ranks", "certain"), 0)
    done, chunk = 0, max(1, min(draws, 2_000_000 // size))
    while done < draws:
        count = min(chunk, draws - done)
        norms, measured = NORMS[name](count, size), NORMS[name](count, 4 * size).amax(1).tolist()
        level = (torch.arange(size) % ALARM.levels).expand(count, size)
        order = torch.rand(count, size).argsort(1)
        marks = torch.exp2((ALARM.lowest + level.gather(1, order)).double()).to(norms.dtype)
        found = torch.func.vmap(figures)(norms, marks).tolist()
        for each, largest in zip(found, measured, strict=True):
            counts["either"] += rings(each, size, largest, True)
            counts["ranks"] += rings(each, size, 0.0, True)
            counts["certain"] += rings(each, size, 0.0, False)
        done += count
    return {"norms": name, "size": size, "draws": draws, **counts}


# Columns of the table: which settings each of them puts together.
COLUMNS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "as it is": lambda row: not row["marks_alone"],
    'marks alone, "reweight"': lambda row: row["marks_alone"] and row["second_pass"] == "reweight",
    'marks alone, "cached"': lambda row: row["marks_alone"] and row["second_pass"] == "cached",
    'marks alone, "cached", plain loop': lambda row: row["marks_alone"] and row["second_pass"] not in PASSES.values(),
}


def cell(found: Sequence[Sequence[int | None]]) -> str:
    """Shares refused in the first mixed batch, by size of the batch, and how many were clipped before at most."""
    shares = [f"{each.count(0) / len(each):.3f}".rstrip("0").rstrip(".") for each in found]
    every = [number for each in found for number in each]
    most = f"{LAST} or more" if None in every else str(max(number for number in every if number is not None))
    return shares[0] if set(shares) == {"1"} else f"{' / '.join(shares)} (at most {most} before)"


def mixing_table(results: dict[str, Any]) -> str:
    """A row for each kind."""
    rows = results["mixing"]
    sizes = sorted({row["size"] for row in rows})
    lines = [f"| what mixes | {' | '.join(COLUMNS)} |", "| --- " * (1 + len(COLUMNS)) + "|"]
    for kind in dict.fromkeys(row["kind"] for row in rows):
        cells = []
        for test in COLUMNS.values():
            own = [row for row in rows if row["kind"] == kind and test(row)]
            cells.append(cell([[n for row in own if row["size"] == size for n in row["refused_in"]] for size in sizes]))
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


def alarm_table(results: dict[str, Any]) -> str:
    """Rings per million honest batches."""
    lines = [
        f"| norms | batch | by ranks alone (over {SUSPICIOUS}) | by ranks, or {LARGE:g} times the largest measured | "
        f"in a plain loop (ranks over {CERTAIN}) |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in results["alarms"]:
        each = [f"{1e6 * row[count] / row['draws']:.3g}" for count in ("ranks", "either", "certain")]
        lines.append(f"| {row['norms']} | {row['size']} | {' | '.join(each)} |")
    return "\n".join(lines)


def markdown(results: dict[str, Any]) -> str:
    """Both tables, with what they say."""
    sizes = " / ".join(str(size) for size in sorted({row["size"] for row in results["mixing"]}))
    seeds = len(results["mixing"][0]["refused_in"])
    draws = statistics.median(row["draws"] for row in results["alarms"])
    return "\n".join(
        [
            f"Share of networks whose first mixed batch was refused, for batches of {sizes} examples; in brackets, how",
            f"many mixed batches were clipped before the refusal. {seeds} seeds for each of the settings that a cell",
            f"puts together (mixing that begins in batch {', '.join(map(str, STARTS))}). float32. Marks alone: no",
            f"operation is said to move examples. They watch one batch in {layouts.WATCHED}, in this table every one.",
            "",
            mixing_table(results),
            "",
            f"Alarms per million honest batches, of {draws:,.0f} draws each.",
            "",
            alarm_table(results),
            "",
            f"At commit {results['commit']} on {in_words(results['machine'])}.",
            "",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the experiment and writes its two files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=40, help="networks for each setting (default: 40)")
    parser.add_argument("--draws", type=int, default=250_000, help="honest batches of norms (default: 250,000)")
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 256], help="examples (default: 64 256)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.getLogger("ghostclip").setLevel(logging.ERROR)
    results: dict[str, Any] = {"machine": describe(), "commit": commit()}
    results["mixing"] = [measure(setting, options.seeds) for setting in settings(options.sizes)]
    results["alarms"] = [false_alarms(name, size, options.draws) for name in NORMS for size in options.sizes]
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{FILE}.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.out / f"{FILE}.md").write_text(markdown(results))
    print(markdown(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
