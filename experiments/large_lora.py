"""LoRA of a language model of half a billion parameters on one machine: private steps beside ordinary ones.

Adapters of rank 16 on a random Llama in bfloat16, with gradient checkpointing by transformers; ``--workload head``
takes a smaller one, all of which is trained, its head of 128,000 words too, and ``--workload 4bit`` one whose frozen
layers are quantized by bitsandbytes. Peak memory is that of a fresh process for
each way. Steps take turns in one process, and each is reported as the median of its time over the
ordinary step's of the same round. That takes about 45 minutes and 10 GiB. Of few rounds many are of batches in which
ownership is measured (1, 2, 4, 8, ...), which take longer: look at the quartiles, too.

    python experiments/large_lora.py [--workload large|head|4bit|tiny] [--seconds S] [--no-memory | --no-time]
                                     [--out FOLDER]

writes large_lora.json and large_lora.md, or large_lora_head.json (large_lora_4bit.json) and its page. ``--training N``
makes N steps of two trainings from the first one on, whose times are added: batches in which ownership is measured
count as often as they come. It writes large_lora_training.json and its page.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "experiments"))

from contenders.large_lora import CONTENDERS, ORDINARY  # noqa: E402

from ghostclip.bench import WORKLOADS, register  # noqa: E402
from ghostclip.bench.machine import busy_warning, commit, describe, in_words  # noqa: E402
from ghostclip.bench.measure import take_turns, timed  # noqa: E402
from ghostclip.bench.memory import Task, ask  # noqa: E402

NAMES = tuple(contender.name for contender in CONTENDERS)
PRIVATE = "private, loss in chunks"
TIME_LIMIT, MEMORY_LIMIT = 1.2, 1.1
M_MMAP_THRESHOLD, LARGE = -3, 1 << 18  # of glibc's malloc.h; bytes


def memory(workload: str, model_bytes: int) -> dict[str, dict[str, Any]]:
    """Bytes at the peak of three steps, with the model's own and above them; and over the ordinary step's."""
    size = WORKLOADS[workload].batch_size
    found: dict[str, dict[str, Any]] = {}
    for name in NAMES:
        found[name] = row = ask(Task(workload, name, size), settling_seconds=0.0)
        if "peak" in row:
            row |= {"above_model": row.pop("peak")}
            row["peak"] = row["above_model"] + model_bytes
            if "peak" in found[ORDINARY]:
                row["memory"] = row["peak"] / found[ORDINARY]["peak"]
        print(name, row, flush=True)
    return found


def time(workload: str, seconds: float) -> dict[str, dict[str, Any]]:
    """Milliseconds of a step, and over the ordinary step's."""
    size = WORKLOADS[workload].batch_size
    steppers = {name: timed(Task(workload, name, size).stepper()) for name in NAMES}
    timings = take_turns(steppers, seconds, baseline=ORDINARY)
    return {
        name: {"ms": asdict(timings.milliseconds(name)), "time": asdict(timings.ratio(name, ORDINARY))}
        for name in NAMES
    }


def training(workload: str, steps: int) -> Iterator[dict[str, list[float]]]:
    """After each of the first steps, by turns ordinary and private ones, the seconds of all so far."""
    ways = (ORDINARY, PRIVATE)
    size = WORKLOADS[workload].batch_size
    turns = {name: timed(Task(workload, name, size).stepper()) for name in ways}
    found: dict[str, list[float]] = {name: [] for name in ways}
    for step in range(steps):
        for name in ways if step % 2 else reversed(ways):
            found[name].append(turns[name]())
            print(step + 1, name, f"{found[name][-1]:.1f} s", flush=True)
        yield found


def page_of_training(results: dict[str, Any]) -> str:
    """The table of whole trainings: after how many steps the private one had taken how much longer."""
    seconds = results["seconds"]
    own, private = seconds[ORDINARY], seconds[PRIVATE]
    steps = [each for each in (2**power for power in range(12)) if each < len(own)] + [len(own)]
    lines = [
        "# A training of a large language model, private and not",
        "",
        f"{WORKLOADS[results['workload']].about}; {results['batch_size']} texts a step. All steps from the first one "
        "on, so also those in which ownership is measured (steps 1, 2, 4, 8 and so on). Both trainings by turns.",
        "",
        "| steps | ordinary, minutes | private, minutes | private over ordinary |",
        "| --- | --- | --- | --- |",
    ]
    for count in steps:
        one, other = sum(own[:count]), sum(private[:count])
        lines.append(f"| {count} | {one / 60:.3g} | {other / 60:.3g} | {other / one:.2f} |")
    lines += [
        "",
        f"Measured at {'commit ' + results['commit'] if results['commit'] else 'no commit known'}. Machine: "
        f"{in_words(results['machine'])}.",
        "",
        f"Computed by `python experiments/large_lora.py --workload {results['workload']} --training {len(own)}`.",
        "",
    ]
    return "\n".join(lines)


def return_freed_memory() -> None:
    """Lets the C library of this process, and of those that it starts, give large blocks back once they are freed.

    By itself glibc keeps them, and finds few of them again: steps that held 1.4 GiB left a process of 13 GiB, and with
    this one of 1.9 GiB.
    """
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(LARGE)
    set_option = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if set_option is not None:
        set_option(M_MMAP_THRESHOLD, LARGE)


def missed(results: dict[str, Any]) -> list[str]:
    """The goals that the private step misses."""
    row = results["ways"][PRIVATE]
    found = {
        "time": (row.get("time", {}).get("median", 0.0), TIME_LIMIT),
        "memory": (row.get("memory", 0.0), MEMORY_LIMIT),
    }
    return [f"{of}: {ratio:.2f}, more than {limit}" for of, (ratio, limit) in found.items() if ratio > limit]


def markdown(results: dict[str, Any]) -> str:
    """The table, and what is missed."""
    lines = [
        "# A large language model, private and not",
        "",
        f"{WORKLOADS[results['workload']].about}; {results['batch_size']} texts a step. {results['parameters']:,} "
        f"parameters ({results['model_bytes'] / 2**20:,.0f} MiB), {results['trained']:,} trained. bfloat16, "
        "gradient checkpointing, Adam.",
        "",
        "| step | peak, MiB | above the model, MiB | peak over ordinary | seconds | time over ordinary |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in results["ways"].items():
        cells = [name]
        cells += [f"{row[of] / 2**20:,.0f}" if of in row else row.get("failed", "") for of in ("peak", "above_model")]
        cells.append(f"{row['memory']:.2f}" if "memory" in row else "")
        cells.append(f"{row['ms']['median'] / 1e3:.3g}" if "ms" in row else "")
        cells.append("{median:.2f} ({low:.2f} to {high:.2f})".format(**row["time"]) if "time" in row else "")
        lines.append("| " + " | ".join(cells) + " |")
    said = missed(results)
    lines += [
        "",
        f"Goals: time at most {TIME_LIMIT} and peak memory at most {MEMORY_LIMIT} of the ordinary step's. Missed: "
        f"{'; '.join(said) if said else 'none'}. Time: median of rounds (quartiles).",
        "",
        f"Measured at {'commit ' + results['commit'] if results['commit'] else 'no commit known'}. Machine: "
        f"{in_words(results['machine'])}.",
        "",
        f"Computed by `python experiments/large_lora.py --workload {results['workload']}`.",
        "",
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and writes; 1 where a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", default="large", choices=("large", "head", "4bit", "tiny"))
    parser.add_argument("--seconds", type=float, default=1600.0, help="measuring time of all steps (default: 1600)")
    parser.add_argument("--no-memory", action="store_true", help="time only")
    parser.add_argument("--no-time", action="store_true", help="memory only")
    parser.add_argument("--training", type=int, metavar="N", help="N steps of whole trainings in place of all else")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder for the results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    return_freed_memory()
    if (warning := busy_warning()) and not options.no_time:
        print(warning, file=sys.stderr)
    register("contenders.large_lora")
    workload = WORKLOADS[options.workload]
    options.out.mkdir(parents=True, exist_ok=True)
    if options.training:
        about = {"machine": describe(), "commit": commit(), "workload": workload.name}
        about["batch_size"] = workload.batch_size
        for seconds in training(workload.name, options.training):
            found = about | {"seconds": seconds}
            (options.out / "large_lora_training.json").write_text(json.dumps(found, indent=1) + "\n")
            (options.out / "large_lora_training.md").write_text(page_of_training(found))
        return 0
    model = workload.model()
    results: dict[str, Any] = {
        "machine": describe(), "commit": commit(), "workload": workload.name, "batch_size": workload.batch_size,
        "parameters": sum(each.numel() for each in model.parameters()),
        "trained": sum(each.numel() for each in model.parameters() if each.requires_grad),
        "model_bytes": sum(each.nbytes for each in model.parameters()),
    }  # fmt: skip
    del model
    ways: dict[str, dict[str, Any]] = {name: {} for name in NAMES}
    if not options.no_memory:
        for name, row in memory(workload.name, results["model_bytes"]).items():
            ways[name] |= row
    if not options.no_time:
        for name, row in time(workload.name, options.seconds).items():
            ways[name] |= row
    results["ways"] = ways
    name = f"large_lora_{workload.name}" if workload.name in ("head", "4bit") else "large_lora"
    (options.out / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.out / f"{name}.md").write_text(markdown(results))
    print("\n".join(missed(results)))
    return int(bool(missed(results)))


if __name__ == "__main__":
    sys.exit(main())
