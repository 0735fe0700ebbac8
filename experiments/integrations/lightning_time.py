"""Time of a step of Lightning with PrivacyCallback over that of the same training without privacy, on this machine.

python experiments/integrations/lightning_time.py
"""

from __future__ import annotations

import statistics
import time
import warnings
from typing import Any

import lightning
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from ghostclip.integrations.lightning import PrivacyCallback

BATCH, STEPS, ROUNDS, WARM = 128, 24, 5, 10


class Classifier(lightning.LightningModule):
    """A small CNN over 28 x 28 images."""

    def __init__(self, private: bool) -> None:
        super().__init__()
        self.private = private
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 8, stride=2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1),
            nn.Conv2d(16, 32, 4, stride=2), nn.ReLU(), nn.MaxPool2d(2, 1),
            nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10),
        )  # fmt: skip

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1], reduction="none" if self.private else "mean")

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Times(lightning.Callback):
    """When each step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.ends.append(time.perf_counter())


def seconds(private: bool) -> float:
    """Median seconds of a step, after the steps of the self-check and of the planner's choices."""
    data = TensorDataset(torch.randn(BATCH * STEPS, 1, 28, 28), torch.randint(0, 10, (BATCH * STEPS,)))
    times, callbacks = Times(), [PrivacyCallback(noise_multiplier=1.0)] if private else []
    quiet = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=1, callbacks=[*callbacks, times], **dict.fromkeys(quiet, False)
    )
    trainer.fit(Classifier(private), DataLoader(data, batch_size=BATCH, shuffle=True))
    return statistics.median(later - end for end, later in zip(times.ends[WARM:], times.ends[WARM + 1 :], strict=False))


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    pairs = [(seconds(False), seconds(True)) for _ in range(ROUNDS)]
    plain, private = (statistics.median(each) for each in zip(*pairs, strict=True))
    ratio = statistics.median(private / plain for plain, private in pairs)
    print(f"a step without privacy {1e3 * plain:.1f} ms, private {1e3 * private:.1f} ms, ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
