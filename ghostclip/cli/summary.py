"""The results of `ghostclip train` as text: a table of runs, a table of speeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ghostclip.report import TrainingRun

__all__ = ["run_table", "speed_table"]


def run_table(runs: Sequence[TrainingRun], delta: float) -> str:
    """One line a run: accuracy, epsilon by each accountant, noise, time."""
    accountants = list(dict.fromkeys(name for run in runs for name in run.epsilons))
    rows = [
        {
            "training": run.name,
            "test accuracy": f"{run.accuracy:.1%}",
            **{
                f"epsilon ({name})": f"{run.epsilons[name]:.3f}" if name in run.epsilons else "-"
                for name in accountants
            },
            "noise": "-" if run.noise_multiplier is None else f"{run.noise_multiplier:.3f} {run.noise or ''}".rstrip(),
            "examples/s": f"{run.examples_per_second:,.0f}",
            "seconds": f"{run.seconds:.1f}",
        }
        for run in runs
    ]
    note = (
        f"\nepsilon is at delta {delta:g}, for data sets that differ by one example's presence" if accountants else ""
    )
    return _aligned([list(rows[0]), *(list(row.values()) for row in rows)]) + note


def speed_table(speeds: Mapping[str, float], batch_size: int, baseline: str = "nonprivate") -> str:
    """One line a method: examples a second of its training step, and its time over non-private training's."""
    naive = {"nxbp": "nxbp, the naive loop"}
    lines = [
        [naive.get(name, name), f"{speed:,.0f}", f"{speeds[baseline] / speed:.2f}"]
        for name, speed in sorted(speeds.items(), key=lambda item: -item[1])
    ]
    return _aligned([[f"one step of {batch_size} examples", "examples/s", "time over non-private"], *lines])


def _aligned(table: list[list[str]]) -> str:
    """The first column to the left, the others to the right, under a rule."""
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    texts = [
        "  ".join(cell.ljust(width) if column == 0 else cell.rjust(width)
                  for column, (cell, width) in enumerate(zip(line, widths, strict=True)))
        for line in table
    ]  # fmt: skip
    return "\n".join([texts[0], "-" * len(texts[0]), *texts[1:]])
