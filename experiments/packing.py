"""Tokens a second of packed batches over padded ones: private SFT and TRL's own, on texts of 16 to 512 tokens.

Four trainings of a Llama from the same weights on the same texts take turns, one step each: TRL's SFTTrainer and
`PrivateSFTTrainer`, each padded and packed. A step has the same expected number of texts in all of them. Its time is
from the end of the step before to its own: sampling, collation, both passes, noise and update; the self-check of the
first steps is off. Tokens are those of the texts; padding doesn't count as tokens, and costs time.

    python experiments/packing.py [--seconds S] [--out FOLDER]

writes packing.json and packing.md. One thread.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import TrainerCallback
from transformers.trainer_callback import PrinterCallback
from trl import SFTConfig, SFTTrainer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from experiments.integrations.language import QUIET, llama, texts, tokenizer
from ghostclip.bench.machine import busy_warning, commit, describe, in_words
from ghostclip.bench.measure import Spread, Timings, keep_freed_memory, take_turns
from ghostclip.integrations.trl import PrivacyArguments, PrivateSFTTrainer

RESULTS = Path(__file__).parent / "results"
FILE = "packing"
WORDS, WIDTH, LAYERS = 2000, 256, 2
ROWS, SHORTEST, LONGEST = 256, 16, 512
# Texts of a step.
LOGICAL = 8
# {lengths of texts: (whether most are short, texts of a physical batch)}.
LENGTHS = {"each length as likely": (False, 4), "most texts short": (True, 8)}
BASELINE = "ordinary, padded"
# {name: (private, packed)}.
KINDS = {
    BASELINE: (False, False), "ordinary, packed": (False, True), "private, padded": (True, False),
    "private, packed": (True, True),
}  # fmt: skip
COMPARED = (
    ("private, packed", "private, padded"), ("ordinary, packed", "ordinary, padded"),
    ("private, padded", "ordinary, padded"), ("private, packed", "ordinary, packed"),
)  # fmt: skip


class Counting:
    """Counts tokens of the texts, and places for tokens, of the physical batches of a trainer."""

    tokens = places = 0

    def _prepare_inputs(self, inputs: Any) -> Any:
        self.places += inputs["input_ids"].numel()
        mask = inputs.get("attention_mask")
        self.tokens += inputs["input_ids"].numel() if mask is None else int(mask.sum())
        return super()._prepare_inputs(inputs)  # type: ignore[misc]


class Ordinary(Counting, SFTTrainer):
    """TRL's trainer."""


class Private(Counting, PrivateSFTTrainer):
    """Ours."""


class Turns(TrainerCallback):
    """A training in a thread of its own, which waits after each step until its next turn.

    Args:
        trainer: of `Counting`.

    Attributes:
        seconds, tokens, places: of all turns.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._error, self._ends = trainer, None, False
        self._begin, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self.seconds, self.tokens, self.places = 0.0, 0, 0
        trainer.add_callback(self)
        trainer.remove_callback(PrinterCallback)
        self._thread = threading.Thread(target=self._train, daemon=True)
        self._thread.start()

    def _train(self) -> None:
        self._begin.acquire()
        torch.set_num_threads(1)  # of this thread
        try:
            self._trainer.train()
        except BaseException as error:
            self._error = error
        self._done.release()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Waits."""
        self._done.release()
        self._begin.acquire()
        control.should_training_stop = self._ends

    def turn(self) -> float:
        """Lets the training take a step; returns its seconds for a token."""
        self._trainer.tokens = self._trainer.places = 0
        start = time.perf_counter()
        self._begin.release()
        self._done.acquire()
        seconds = time.perf_counter() - start
        if self._error is not None:
            raise self._error
        self.seconds += seconds
        self.tokens += self._trainer.tokens
        self.places += self._trainer.places
        return seconds / self._trainer.tokens

    def end(self) -> None:
        """Ends the training."""
        self._ends = True
        self._begin.release()
        self._thread.join()


def trainer_of(private: bool, packed: bool, lengths: str, folder: str) -> Any:
    """A trainer about to train. A batch of TRL's packs has as many tokens as its texts in the mean."""
    many_short, physical = LENGTHS[lengths]
    data, words = texts(ROWS, WORDS, SHORTEST, LONGEST - 1, many_short=many_short), tokenizer(WORDS)
    mean = sum(len(row["text"].split()) for row in data) / ROWS
    batch = max(1, round(physical * mean / LONGEST)) if packed and not private else physical
    args = SFTConfig(
        folder, per_device_train_batch_size=batch, gradient_accumulation_steps=LOGICAL // physical, packing=packed,
        max_length=LONGEST, max_steps=100_000, save_strategy="no", dataloader_pin_memory=False, **QUIET,
    )  # fmt: skip
    model = llama(WORDS, WIDTH, LAYERS, max_position_embeddings=LONGEST)
    if not private:
        return Ordinary(model, args, train_dataset=data, processing_class=words)
    privacy = PrivacyArguments(noise_multiplier=1.0, target_delta=1e-5, self_check=False)
    return Private(model, args, train_dataset=data, processing_class=words, privacy=privacy)


def measure(lengths: str, seconds: float) -> dict[str, Any]:
    """Tokens a second of each training, and ratios of them within a round."""
    with tempfile.TemporaryDirectory() as place:
        turns = {name: Turns(trainer_of(*kind, lengths, f"{place}/{name}")) for name, kind in KINDS.items()}
        timings = take_turns({name: each.turn for name, each in turns.items()}, seconds, baseline=BASELINE)
        for each in turns.values():
            each.end()
    return {
        "trainings": {name: figures(name, turns[name], timings) for name in KINDS},
        "ratios": {f"{name} over {over}": asdict(timings.ratio(over, name)) for name, over in COMPARED},
    }


def figures(name: str, turns: Turns, timings: Timings) -> dict[str, Any]:
    """Of one training."""
    speeds = [1 / each for each in timings.seconds[name].values()]
    return {"tokens_a_second": asdict(Spread.of(speeds)), "padding": 1 - turns.tokens / turns.places}


def markdown(results: dict[str, Any]) -> str:
    """Two tables, with a column for each distribution of lengths."""
    found = list(results["lengths"].values())
    head = f"| | {' | '.join(results['lengths'])} |\n{'| --- ' * (1 + len(found))}|"
    lines = [
        f"A Llama of {results['parameters']:,} parameters (width {WIDTH}, {LAYERS} layers, {WORDS} words) on texts of "
        f"{SHORTEST} to {LONGEST} tokens, {LOGICAL} of them in a step.",
        "",
        "Tokens a second, and the share of padding in a batch:",
        "",
        head,
    ]
    for name in KINDS:
        rows = [each["trainings"][name] for each in found]
        cells = [f"{row['tokens_a_second']['median']:,.0f} ({row['padding']:.0%})" for row in rows]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", "Ratios of tokens a second:", "", head]
    for name in found[0]["ratios"]:
        rows = [each["ratios"][name] for each in found]
        cells = [f"{row['median']:.2f} ({row['low']:.2f} to {row['high']:.2f})" for row in rows]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    rounds = min(row["rounds"] for each in found for row in each["ratios"].values())
    where = in_words(results["machine"])
    end = f"Median (quartiles) of {rounds} rounds or more. At commit {results['commit']} on {where}."
    return "\n".join([*lines, "", end, "", "Written by `python experiments/packing.py`.", ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the experiment and writes its two files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--seconds", type=float, default=120.0, help="measuring time for each distribution of lengths (default: 120)"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    keep_freed_memory()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    logging.getLogger("ghostclip").setLevel(logging.ERROR)
    if warning := busy_warning():
        print(warning, file=sys.stderr)
    parameters = sum(each.numel() for each in llama(WORDS, WIDTH, LAYERS).parameters())
    results: dict[str, Any] = {"machine": describe(), "commit": commit(), "parameters": parameters}
    results["lengths"] = {lengths: measure(lengths, options.seconds) for lengths in LENGTHS}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{FILE}.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.out / f"{FILE}.md").write_text(markdown(results))
    print(markdown(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
