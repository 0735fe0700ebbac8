"""Kill -9 during runs of Trainer, of TRL's trainers and of Lightning: releases never exceed what the ledger counts.

Each attempt goes on from the framework's own last checkpoint, and is killed at a named point of experiments/kills.py or
at a random moment. Releases are noted as there, in memory that survives the process. After every kill the ledger counts
at least the releases of all attempts so far, and at most a block more for each kill.

    python -m experiments.integrations.kills [--kills N] [--out FOLDER]

writes framework_kills.json and framework_kills.md.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning
import torch
import transformers
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments
from trl import DPOConfig, SFTConfig

from experiments.integrations.language import QUIET, llama, pairs, texts, tokenizer
from experiments.kills import RANDOM, Broken, Shared, Trap, check_ended, forked, set_traps, too_many, watch
from ghostclip.bench.machine import commit, describe, in_words
from ghostclip.integrations.huggingface import PrivacyArguments, PrivateTrainer
from ghostclip.integrations.huggingface_loop import is_whole
from ghostclip.integrations.lightning import PrivacyCallback
from ghostclip.integrations.trl import PrivateDPOTrainer, PrivateSFTTrainer
from ghostclip.ledger import Ledger

RESULTS = Path(__file__).resolve().parents[1] / "results"
# Steps between checkpoints, and after which an attempt ends by itself when it doesn't come to its point.
SAVE_EVERY, MOST_STEPS = 3, 12
# Seconds within which a random kill comes, from before the framework is set up.
LONGEST_WAIT = 2.0
POINTS = (
    "before the intent is written",
    "in the middle of the intent",
    "intent flushed, nothing released",
    "charged, before the noise",
    "released, before the update",
    "after the update",
    "between two steps",
    "in the middle of a checkpoint's file",
    "before a folder is renamed",
)


# Of Trainer's arguments: a training that goes on until it is stopped.
ENDLESS: dict[str, Any] = {
    **QUIET, "per_device_train_batch_size": 8, "max_steps": 100_000, "save_strategy": "steps", "save_steps": SAVE_EVERY,
    "save_total_limit": 2,
}  # fmt: skip


def begun(engine: Any, shared: Shared, trap: Trap, step: int) -> None:
    """Training begins, after a checkpoint was loaded."""
    shared["known"] = sum(event.count for event in engine.events)
    shared["progress"] = shared["resumed_at"] = step
    watch(engine, shared, trap)


class InTrainer(TrainerCallback):
    """Notes where an attempt is, and ends it after ``most`` steps."""

    def __init__(self, trainer: PrivateTrainer, shared: Shared, trap: Trap, most: int) -> None:
        self._trainer, self._shared, self._trap, self._most = trainer, shared, trap, most

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        begun(self._trainer.engine, self._shared, self._trap, state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._trap.reached("between two steps")
        control.should_training_stop = state.global_step >= self._shared["progress"] + self._most


def in_trainer(place: Path, shared: Shared, trap: Trap, most: int) -> None:
    """An attempt of Trainer: a small GPT-2, ``most`` steps from the last whole checkpoint on."""
    if trap.point:
        set_traps(trap)
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=19, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    data = [{"input_ids": row, "labels": row} for row in torch.randint(1, 19, (24, 7))]
    args = TrainingArguments(str(place), **ENDLESS)
    trainer = PrivateTrainer(model=GPT2LMHeadModel(config), args=args, train_dataset=data, privacy=privacy_in(place))
    go_on(trainer, place, shared, trap, most)


def in_sft(place: Path, shared: Shared, trap: Trap, most: int) -> None:
    """An attempt of TRL's SFT: a small Llama on packed texts."""
    if trap.point:
        set_traps(trap)
    trainer = PrivateSFTTrainer(
        llama(19, 8, 1), args=SFTConfig(str(place), packing=True, **ENDLESS), train_dataset=texts(24, 19, 2, 8),
        processing_class=tokenizer(19), privacy=privacy_in(place),
    )  # fmt: skip
    go_on(trainer, place, shared, trap, most)


def in_dpo(place: Path, shared: Shared, trap: Trap, most: int) -> None:
    """An attempt of TRL's DPO: a small Llama and a reference of other weights."""
    if trap.point:
        set_traps(trap)
    trainer = PrivateDPOTrainer(
        llama(19, 8, 1), ref_model=llama(19, 8, 1, seed=1), args=DPOConfig(str(place), **ENDLESS),
        train_dataset=pairs(24, 19, 2, 8), processing_class=tokenizer(19), privacy=privacy_in(place),
    )  # fmt: skip
    go_on(trainer, place, shared, trap, most)


def privacy_in(place: Path) -> PrivacyArguments:
    """The settings of a training whose ledger is in a folder."""
    return PrivacyArguments(noise_multiplier=50.0, ledger=str(place / "run.ledger"), self_check=False)


def go_on(trainer: PrivateTrainer, place: Path, shared: Shared, trap: Trap, most: int) -> None:
    """Trains ``most`` steps from the last whole checkpoint on."""
    trainer.add_callback(InTrainer(trainer, shared, trap, most))
    trainer.train(any(is_whole(each) for each in place.glob("checkpoint-*")) or None)


class Module(lightning.LightningModule):
    """A small network."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1], reduction="none")

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class InLightning(lightning.Callback):
    """Notes where an attempt is, and ends it after ``most`` steps."""

    def __init__(self, private: PrivacyCallback, shared: Shared, trap: Trap, most: int) -> None:
        self._private, self._shared, self._trap, self._most = private, shared, trap, most

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        begun(self._private.engine, self._shared, self._trap, trainer.global_step)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self._trap.reached("between two steps")
        trainer.should_stop = trainer.global_step >= self._shared["progress"] + self._most


def in_lightning(place: Path, shared: Shared, trap: Trap, most: int) -> None:
    """An attempt of Lightning: a small network, ``most`` steps from the last checkpoint on."""
    if trap.point:
        set_traps(trap)
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(torch.randn(64, 8), torch.arange(64) % 3), batch_size=8, shuffle=True)
    private = PrivacyCallback(noise_multiplier=1.0, ledger=Ledger(place / "run.ledger", block=5), self_check=False)
    keep = ModelCheckpoint(place, filename="last", every_n_train_steps=SAVE_EVERY, enable_version_counter=False)
    trainer = lightning.Trainer(
        max_epochs=-1, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=place,
        callbacks=[private, keep, InLightning(private, shared, trap, most)],
    )  # fmt: skip
    saved = place / "last.ckpt"
    trainer.fit(Module(), loader, ckpt_path=saved if saved.exists() else None)


# {name: (attempt, steps in a block of its ledger)}.
FRAMEWORKS: dict[str, tuple[Callable[..., None], int]] = {
    "Trainer of transformers": (in_trainer, 1),
    "SFT of TRL": (in_sft, 1),
    "DPO of TRL": (in_dpo, 1),
    "Lightning": (in_lightning, 5),
}


def killed(work: Callable[..., None], block: int, kills: int, seed: int) -> dict[str, Any]:
    """One run that is killed so many times, then an attempt that isn't.

    Raises:
        Broken: a release wasn't counted, more than a block was counted too many, or an attempt failed.
    """
    draw, shared = random.Random(seed), Shared()
    found = {"kills": 0, "at_random": 0, "attempts": 0, "resumed": 0}
    extra = 0
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        last = False
        while not last:
            last = found["kills"] == kills
            what = "" if last else RANDOM if found["attempts"] % 2 else draw.choice(POINTS)
            before = shared["known"] = shared["released"]
            shared["resumed_at"] = 0
            wait = draw.uniform(0, LONGEST_WAIT) if what == RANDOM else None
            trap = Trap(what, draw.randint(1, 8)) if what else Trap("", 0)
            status = forked(place, shared, trap, MOST_STEPS, wait, work)
            check_ended(place, shared, status, before)
            ended = status == 0
            extra = too_many(place, shared, extra, None if ended else what, block)
            found["kills"] += not ended
            found["at_random"] += not ended and what == RANDOM
            found["attempts"] += 1
            found["resumed"] += shared["resumed_at"] > 0
    return {**found, "released": shared["released"], "charged": shared["released"] + extra}


def markdown(results: dict[str, Any]) -> str:
    """The results as a table."""
    lines = [
        "# Kills during runs of frameworks",
        "",
        "After every kill -9 the ledger counted at least what had been released, and the next attempt went on from the "
        "framework's last whole checkpoint.",
        "",
        "| framework | kills | of these at random moments | attempts | resumed from a checkpoint | releases | charged "
        "| under-reported |",
        "| --- " * 8 + "|",
    ]
    for name, row in results["rows"].items():
        numbers = (row[each] for each in ("kills", "at_random", "attempts", "resumed", "released", "charged"))
        under_reported = max(0, row["released"] - row["charged"])
        lines.append(f"| {name} | {' | '.join(map(str, numbers))} | {under_reported} |")
    place = f"commit {results['commit']}" if results["commit"] else "no commit known"
    lines += ["", f"Run at {place}. Machine: {in_words(results['machine'])}.", ""]
    return "\n".join([*lines, "Written by `python -m experiments.integrations.kills`.", ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the experiment and writes its two files; returns the exit status: 1 when a promise was not kept."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50, help="of each framework (default: 50)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of points (default: 0)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    for name in ("lightning.pytorch", "ghostclip"):
        logging.getLogger(name).setLevel(logging.ERROR)
    rows = {}
    try:
        for name, (work, block) in FRAMEWORKS.items():
            with tempfile.TemporaryDirectory() as place:
                work(Path(place), Shared(), Trap("", 0), 1)  # so that a fork finds everything loaded
            rows[name] = killed(work, block, options.kills, options.seed)
            print(name, rows[name], file=sys.stderr, flush=True)
    except Broken as broken:
        print(broken, file=sys.stderr)
        return 1
    results = {"machine": describe(), "commit": commit(), "rows": rows}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "framework_kills.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.out / "framework_kills.md").write_text(markdown(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
