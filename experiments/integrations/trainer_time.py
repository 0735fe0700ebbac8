"""Time of a step of PrivateTrainer over that of Trainer: a small random GPT-2, fixed-size batches, both in turns.

python experiments/integrations/trainer_time.py [--rounds N]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from ghostclip.integrations.huggingface import PrivacyArguments, PrivateTrainer

STEPS, SKIPPED, BATCH, WORDS, LENGTH = 10, 4, 8, 1000, 64


class Clock(TrainerCallback):
    """Seconds of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *_, **__) -> None:
        self.begun = time.perf_counter()

    def on_step_end(self, *_, **__) -> None:
        self.seconds.append(time.perf_counter() - self.begun)


def step_time(private: bool) -> float:
    """Median seconds of a step, without the first ones."""
    config = GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=128, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0
    )
    texts = torch.randint(WORDS, (BATCH * STEPS, LENGTH))
    data = [{"input_ids": row, "labels": row} for row in texts]
    options = {"privacy": PrivacyArguments(noise_multiplier=1.0, sampling="without_replacement", self_check=False)}
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, per_device_train_batch_size=BATCH, max_steps=STEPS, save_strategy="no", logging_strategy="no",
            report_to=[], disable_tqdm=True, use_cpu=True, max_grad_norm=1.0,
        )  # fmt: skip
        kind = PrivateTrainer if private else Trainer
        clock = Clock()
        kind(
            GPT2LMHeadModel(config), args, train_dataset=data, callbacks=[clock], **(options if private else {})
        ).train()
    return statistics.median(clock.seconds[SKIPPED:])


def main() -> None:
    """Prints the ratio of each round, and their median."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = [(step_time(True), step_time(False)) for _ in range(parser.parse_args().rounds)]
    for private, plain in rounds:
        print(f"{1000 * private:.0f} ms over {1000 * plain:.0f} ms: {private / plain:.2f}")
    print(f"median {statistics.median(private / plain for private, plain in rounds):.2f}")


if __name__ == "__main__":
    main()
