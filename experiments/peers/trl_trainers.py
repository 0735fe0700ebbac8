"""Private SFT and DPO by GhostClip's and by opake's trainers: on the same data, model and noise, beside TRL's own.

Each library runs in a process of its own, since opake changes functions of transformers. Facts are measured, or are
what a library says. The clipped sum of the first step is compared with a loop over single examples with TRL's loss.

    python -m experiments.peers.trl_trainers [--rounds N] [--out FOLDER]

writes trl_trainers.json and trl_trainers.md; needs opake[trl]. Seconds and memory are measured in N rounds, one process
for each library in each round (default: 5; with 0 they are left out).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import logging
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from experiments.integrations.language import QUIET, llama, pairs, texts, tokenizer
from ghostclip import accounting
from ghostclip.bench.machine import busy_warning, commit, describe

from .trl_page import DELTA, TARGET, page
from .trl_scripts import GHOSTCLIP, LIBRARIES, OPAKE, SCRIPTS, TRL, Given, changed_lines, opake_imports

RESULTS = Path(__file__).resolve().parents[1] / "results"
FILE = "trl_trainers"
TASKS = tuple(SCRIPTS)
WORDS, ROWS, CLIP, RATE = 40, 16, 0.3, 0.5
LARGE = {"words": 2000, "width": 256, "layers": 2}
BATCH, STEPS, WARM = 16, 16, 8  # the first steps are checked, and measured by marks
Facts = dict[str, Any]


def options(folder: Path, rows: int, **changes: Any) -> dict[str, Any]:
    """Of TRL's config: SGD, all of so many rows in each step."""
    fixed = {**QUIET, "max_steps": 1, "learning_rate": RATE, "optim": "sgd", "lr_scheduler_type": "constant"}
    return {
        **fixed, "output_dir": str(folder), "per_device_train_batch_size": rows, "save_strategy": "no", **changes
    }  # fmt: skip


def given(task: str, folder: Path, *, model: Any = None, data: Any = None, **changes: Any) -> Given:
    """A small model and ROWS texts, or pairs, of 2 to 12 words; ``changes`` of `Given` and of TRL's config."""
    fields = {name: changes.pop(name) for name in ("noise", "target", "clip", "prepare") if name in changes}
    data = data_of(task, ROWS) if data is None else data
    return Given(
        model=llama(WORDS, 32, 1) if model is None else model, reference=llama(WORDS, 32, 1, seed=1), data=data,
        words=tokenizer(WORDS), options=options(folder, len(data), **changes), delta=DELTA, **{"clip": CLIP, **fields},
    )  # fmt: skip


def data_of(task: str, rows: int) -> Any:
    """Texts or pairs."""
    return (texts if task == "SFT" else pairs)(rows, WORDS, 2, 12)


def weights(model: Any) -> dict[str, Tensor]:
    """Copies of the parameters."""
    return {name: each.detach().clone() for name, each in model.named_parameters()}


def released(script: Callable[[Given], Any], what: Given) -> Tensor:
    """The sum that the only step of a training was taken with, as one vector."""
    before = weights(what.model)
    trainer = script(what)
    after, batch = weights(trainer.model), what.options["per_device_train_batch_size"]
    return torch.cat([(before[name] - after[name]).flatten() for name in sorted(before)]) * batch / RATE


def loop(task: str, folder: Path) -> Tensor:
    """The sum of single examples' gradients of TRL's loss, each cut to CLIP."""
    what = given(task, folder, learning_rate=0.0)
    trainer = SCRIPTS[task][TRL](what)
    model, total = trainer.model.eval(), None
    trained = dict(sorted(model.named_parameters()))
    columns = [name for name in trainer.train_dataset.column_names if name != "text"]
    for row in trainer.train_dataset.select_columns(columns):
        grads = torch.autograd.grad(trainer.compute_loss(model, trainer.data_collator([row])), list(trained.values()))
        vector = torch.cat([grad.flatten() for grad in grads])
        vector = vector * min(1.0, CLIP / float(vector.double().norm()))
        total = vector if total is None else total + vector
    assert total is not None
    return total


def said(work: Callable[[], object]) -> str:
    """The error that something ends in; "" where it doesn't."""
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


def epsilon_of(library: str, trainer: Any) -> float:
    """What the library says was spent at the end."""
    if library == GHOSTCLIP:
        return float(trainer.engine.epsilon())
    return float(trainer.state.log_history[-1]["privacy_epsilon"])


def spending(library: str, place: Path) -> Facts:
    """Epsilon of ten steps; of a training with a target that its steps would pass; and of another one after that."""
    script, found = SCRIPTS["SFT"][library], {}
    ten = {"max_steps": 10, "per_device_train_batch_size": 4}
    found["epsilon"] = epsilon_of(library, script(given("SFT", place / "ten", **ten)))
    spent = {"target": TARGET, "max_steps": 40, "per_device_train_batch_size": 4}
    trainer = script(given("SFT", place / "spent", **spent))
    found["at_the_target"] = {"steps": trainer.state.global_step, "epsilon": epsilon_of(library, trainer)}

    def again() -> None:
        trainer = script(given("SFT", place / "spent", **spent))
        found["again"] = {"steps": trainer.state.global_step, "epsilon": epsilon_of(library, trainer)}

    found["said_again"] = said(again).replace(str(place), "")
    return found


def charged(steps: int) -> float:
    """Epsilon of so many steps of `spending`, by dp-accounting's privacy loss distributions."""
    return accounting.epsilon(noise_multiplier=1.0, sample_rate=4 / ROWS, steps=steps, delta=DELTA)


def repeated_noise(library: str, place: Path, seed: int | None) -> float:
    """|difference| of two noisy sums, of which one has an example more, over the clipping norm; 1: noise repeats."""
    data, chosen = data_of("SFT", ROWS), {} if seed is None else {"seed": seed}
    parts = []
    for rows in (ROWS, ROWS - 1):
        what = given("SFT", place / f"seed {seed} {rows}", data=data.select(range(rows)), **chosen)
        parts.append(released(SCRIPTS["SFT"][library], what))
    return float((parts[0] - parts[1]).norm() / CLIP)


def shared_dropout(library: str, place: Path) -> float:
    """Of the clipped gradients of ROWS copies of a text under dropout, |sum| over the sum of |.|; 1: all are alike."""
    data = data_of("SFT", ROWS).select([0] * ROWS)
    clip = 1e-2  # below all norms
    what = given(
        "SFT", place / "dropout", model=llama(WORDS, 32, 1, attention_dropout=0.5), data=data, noise=0.0, clip=clip
    )
    return float(released(SCRIPTS["SFT"][library], what).norm() / (clip * ROWS))


class Mixing(transformers.LlamaModel):
    """Every example's scores depend on those of all others in the batch."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        outputs = super().forward(*inputs, **named)
        outputs.last_hidden_state = outputs.last_hidden_state - 0.5 * outputs.last_hidden_state.mean(0, keepdim=True)
        return outputs


def facts(library: str, place: Path) -> Facts:
    """What is measured of a library in one process; the first sums are written to ``place``."""
    if library == TRL:
        for task in TASKS:
            torch.save(loop(task, place / "loop"), place / f"{task} {TRL}.pt")
        return {}
    for task in TASKS:
        first = released(SCRIPTS[task][library], given(task, place / f"first {task}", noise=0.0))
        torch.save(first, place / f"{task} {library}.pt")
    packed = said(lambda: SCRIPTS["SFT"][library](given("SFT", place / "packed", packing=True)))
    mixing = llama(WORDS, 32, 1)
    mixing.model = Mixing(mixing.config)
    return {
        **spending(library, place),
        "said_to_packing": packed,
        "repeated_noise": {str(seed): repeated_noise(library, place, seed) for seed in (None, 7)},
        "shared_dropout": shared_dropout(library, place),
        "said_to_mixing": said(lambda: SCRIPTS["SFT"][library](given("SFT", place / "mixing", model=mixing))),
    }


def step(library: str, task: str, place: Path) -> Facts:
    """Median seconds of a step without the first ones, and MiB that a process's peak is above what it had before."""
    ends: list[float] = []

    class Ends(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    data = (texts if task == "SFT" else pairs)(8 * BATCH, LARGE["words"], 16, 64)
    what = Given(
        model=llama(**LARGE), reference=llama(**LARGE, seed=1), data=data, words=tokenizer(LARGE["words"]),
        options=options(place / task, BATCH, max_steps=STEPS), prepare=lambda trainer: trainer.add_callback(Ends()),
    )  # fmt: skip
    before = kib("VmRSS")
    SCRIPTS[task][library](what)
    seconds = [later - end for end, later in zip(ends[WARM - 1 :], ends[WARM:], strict=False)]
    return {"seconds": statistics.median(seconds), "mib": (kib("VmHWM") - before) / 1024}


def kib(name: str) -> int:
    """A figure of this process, by its name in /proc."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"{name}:")))


def in_a_process(*words: str) -> Facts:
    """What another process finds: its last line."""
    command = [sys.executable, "-m", "experiments.peers.trl_trainers", "--one", *words]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(found.stdout.splitlines()[-1])


def timed(rounds: int, place: Path) -> Facts:
    """{task: {library: seconds and MiB of each round}}."""
    found: Facts = {task: {name: [] for name in LIBRARIES} for task in TASKS}
    for number in range(rounds):
        for task in TASKS:
            for name in LIBRARIES[number % 3 :] + LIBRARIES[: number % 3]:
                found[task][name].append(in_a_process("step", name, task, str(place / f"{number} {task} {name}")))
        print(f"round {number + 1}", file=sys.stderr, flush=True)
    return found


def measure(rounds: int) -> Facts:
    """All facts."""
    results: Facts = {"libraries": {}}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        in_a_process("facts", TRL, "", folder)
        for name in (GHOSTCLIP, OPAKE):
            found = in_a_process("facts", name, "", folder)
            for task in TASKS:
                expected, first = (torch.load(place / f"{task} {each}.pt") for each in (TRL, name))
                found[f"{task} from the loop"] = float((first - expected).norm() / expected.norm())
                found[f"{task} lines"] = changed_lines(task, name)
            results["libraries"][name] = found
            print(name, found, file=sys.stderr, flush=True)
        results["epsilon"] = charged(10)
        results["epsilon_of_both"] = charged(sum(found[part]["steps"] for part in ("at_the_target", "again")))
        results["steps"] = timed(rounds, place)
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the experiment and writes its two files; with --one, a part of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="of steps, timed (default: 5; 0: none)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    opake_imports()
    if chosen.one:
        warnings.simplefilter("ignore")
        logging.disable(logging.ERROR)
        what, library, task, place = chosen.one
        found = facts(library, Path(place)) if what == "facts" else step(library, task, Path(place))
        print("\n" + json.dumps(found))
        return 0
    if chosen.rounds and (warning := busy_warning()):
        print(warning, file=sys.stderr)
    versions = {name: importlib.metadata.version(name) for name in ("opake", "trl", "transformers")}
    results = {"machine": describe(), "commit": commit(), "versions": versions, **measure(chosen.rounds)}
    chosen.out.mkdir(parents=True, exist_ok=True)
    (chosen.out / f"{FILE}.json").write_text(json.dumps(results, indent=1) + "\n")
    (chosen.out / f"{FILE}.md").write_text(page(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
