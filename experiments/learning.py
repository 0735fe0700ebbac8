"""Why a private model learns nothing, and what helps: one transformer on digits, settings changed one after another.

Each setting spends epsilon 3 at delta 1e-5 on scikit-learn's handwritten digits (1,437 for training). The norm of the
noise in the mean gradient is computed from public numbers; a trace of the training has the signal beside it.
Weights, batches and noise are new in every run.

    python experiments/learning.py [--only NAME ...] [--runs N] [--out FOLDER]

writes learning.json and learning.md; settings left out by --only keep their figures.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import ghostclip
from ghostclip import accounting
from ghostclip.bench.machine import commit

RESULTS, FILE = Path(__file__).parent / "results", "learning"
EPSILON, DELTA, TRAINING, CLASSES, PATCHES, PIXELS = 3.0, 1e-5, 1437, 10, 16, 4


class Setting(NamedTuple):
    """One training, by Adam, or by SGD with ``momentum``; of a CNN of so many ``convolutions``, 0: the transformer."""

    about: str
    batch: int = 256
    epochs: int = 20
    rate: float = 3e-3
    cosine: bool = True
    width: int = 32
    clipping: float = 1.0
    private: bool = True
    momentum: float | None = None
    convolutions: int = 0


SETTINGS = {
    "start": Setting("start: a transformer; batch 256, 20 epochs, Adam at 0.003 that falls to 0 by a cosine"),
    "without privacy": Setting("the same without privacy", private=False),
    "constant": Setting("start, with a constant rate", cosine=False),
    "batch": Setting("start, with batch 512 and 40 epochs", 512, 40),
    "narrow": Setting("start, with width 16 in place of 32", width=16),
    "rate": Setting("start, with Adam at 0.03", rate=3e-2),
    "rate, narrow": Setting("start, with Adam at 0.03 and width 16", rate=3e-2, width=16),
    "rate, batch 64": Setting("start, with Adam at 0.03 and batch 64", 64, rate=3e-2),
    "together": Setting("Adam at 0.03, constant; batch 512, 40 epochs", 512, 40, 3e-2, cosine=False),
    "clipping 10": Setting("the same with clipping norm 10", 512, 40, 3e-2, cosine=False, clipping=10.0),
    "clipping 100": Setting("the same with clipping norm 100", 512, 40, 3e-2, cosine=False, clipping=100.0),
    "clipping 0.1": Setting("the same with clipping norm 0.1", 512, 40, 3e-2, cosine=False, clipping=0.1),
    "cnn": Setting(
        "a CNN of two convolutions; batch 256, 20 epochs, Adam at 0.01", rate=1e-2, cosine=False, convolutions=2
    ),
    "cnn, SGD": Setting(
        "the same; batch 512, 30 epochs, SGD at 0.21 with momentum 0.9",
        512,
        30,
        0.21,
        False,
        momentum=0.9,
        convolutions=2,
    ),
    "tutorial": Setting(
        "the tutorial's CNN, of one convolution; batch 512, 20 epochs, SGD at 0.4 with momentum 0.9",
        512,
        20,
        0.4,
        False,
        momentum=0.9,
        convolutions=1,
    ),
}


class Block(nn.Module):
    """A block of a transformer that normalises first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.feedforward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, rows: Tensor) -> Tensor:
        normed = self.first(rows)
        rows = rows + self.attention(normed, normed, normed, need_weights=False)[0]
        return rows + self.feedforward(self.second(rows))


class Transformer(nn.Module):
    """Two blocks over the 16 patches of 2 x 2 pixels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(PIXELS, width), nn.Linear(width, CLASSES)
        self.positions = nn.Parameter(0.02 * torch.randn(PATCHES, width))
        self.blocks = nn.Sequential(Block(width), Block(width))

    def forward(self, images: Tensor) -> Tensor:
        patches = images.unfold(1, 2, 2).unfold(2, 2, 2).reshape(len(images), PATCHES, PIXELS)
        return self.head(self.blocks(self.embed(patches) + self.positions).mean(1))


def network(setting: Setting) -> nn.Module:
    """The transformer; or a CNN, of one convolution that of docs/tutorial.md."""
    if not setting.convolutions:
        return Transformer(setting.width)
    first = [
        nn.Unflatten(1, (1, 8)),
        nn.Conv2d(1, 32 // setting.convolutions, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
    ]
    second = [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)] if setting.convolutions == 2 else []
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(128 if second else 512, CLASSES))


def losses_of(model: nn.Module, batch: Any) -> Tensor:
    """Cross-entropy, one for each example."""
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


@cache
def digits() -> tuple[TensorDataset, TensorDataset]:
    """Images [N, 8, 8] in [0, 1] and their digits, for training and for testing."""
    images, labels = load_digits(return_X_y=True)
    pixels, digit = torch.tensor(images / 16, dtype=torch.float32).view(-1, 8, 8), torch.tensor(labels)
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    first, rest = order[:TRAINING], order[TRAINING:]
    return TensorDataset(pixels[first], digit[first]), TensorDataset(pixels[rest], digit[rest])


@cache
def noise_for(batch: int, epochs: int) -> float:
    """The noise multiplier that spends epsilon 3."""
    return accounting.noise_multiplier(
        target_epsilon=EPSILON, delta=DELTA, sample_rate=batch / TRAINING, steps=epochs * round(TRAINING / batch)
    )


def run(setting: Setting) -> dict[str, float]:
    """One training: test accuracy, and what its trace says of the whole gradient."""
    train, test = digits()
    model = network(setting)
    steps = setting.epochs * round(TRAINING / setting.batch)
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=setting.rate)
    if setting.momentum is not None:
        optimizer = torch.optim.SGD(model.parameters(), lr=setting.rate, momentum=setting.momentum)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps) if setting.cosine else None
    found = _private(setting, model, optimizer, schedule) if setting.private else {}
    if not setting.private:
        for _ in range(setting.epochs):
            for batch in DataLoader(train, setting.batch, shuffle=True):
                optimizer.zero_grad()
                losses_of(model, batch).mean().backward()
                optimizer.step()
                if schedule is not None:
                    schedule.step()
    model.eval()
    with torch.no_grad():
        found["accuracy"] = float((model(test.tensors[0]).argmax(1) == test.tensors[1]).float().mean())
    return found


def _private(setting: Setting, model: nn.Module, optimizer: Any, schedule: Any) -> dict[str, float]:
    noise = noise_for(setting.batch, setting.epochs)
    engine = ghostclip.PrivacyEngine(
        model, optimizer, digits()[0], batch_size=setting.batch, noise_multiplier=noise, target_delta=DELTA,
        clipping=setting.clipping, self_check=False,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        engine.trace(Path(folder) / "trace.npz", every=5)
        for _ in range(setting.epochs):
            for batch in engine.batches():
                engine.step(batch, losses_of)
                if schedule is not None:
                    schedule.step()
        engine.trace(None)
        trace = ghostclip.traces.read(Path(folder) / "trace.npz")
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return {
        "parameters": trained,
        "noise_multiplier": noise,
        "noise_norm": noise * setting.clipping * math.sqrt(trained) / setting.batch,
        "snr": float(np.median(trace["snr"][:, -1])),
        "snr_first": float(trace["snr"][0, -1]),
        "clipped": float(np.median(trace["fraction_clipped"][:, -1])),
        "cosine": float(np.median(trace["cosine"][:, -1])),
        "median_norm": float(np.median(np.concatenate([norms[-1] for norms in trace["norms"]]))),
    }


def markdown(results: dict[str, Any]) -> str:
    """A row for each setting: medians, and the range of the accuracies."""
    lines = [
        f"Test accuracy (360 digits) of trainings that spend epsilon {EPSILON:g} at delta {DELTA:g}: median (range) of "
        "the runs. Noise: its norm in the mean gradient, and the same over the root of the number of "
        "steps. snr and clipped: medians of the traced steps, for the whole gradient.",
        "",
        "| setting | trained parameters | steps | noise over clipping norm | the same over all steps | snr, first step "
        "| snr, median | clipped | runs | accuracy |",
        "|" + " --- |" * 10,
    ]
    for row in results["settings"].values():
        runs = row["runs"]
        accuracies = [100 * each["accuracy"] for each in runs]
        spread = f"{statistics.median(accuracies):.1f}% ({min(accuracies):.1f} to {max(accuracies):.1f})"
        steps = row["setting"]["epochs"] * round(TRAINING / row["setting"]["batch"])
        cells = ["", f"{steps}", "", "", "", "", ""]
        if row["setting"]["private"]:
            first, middle = runs[0], {name: statistics.median(run[name] for run in runs) for name in runs[0]}
            over = first["noise_norm"] / row["setting"]["clipping"]
            cells = [f"{first['parameters']:,}", f"{steps}", f"{over:.2f}", f"{over / math.sqrt(steps):.2f}"]
            cells += [f"{middle['snr_first']:.3f}", f"{middle['snr']:.3f}", f"{middle['clipped']:.0%}"]
        lines.append(f"| {row['setting']['about']} | {' | '.join(cells)} | {len(runs)} | {spread} |")
    return "\n".join([*lines, "", f"At commit {results['commit']}.", ""])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(SETTINGS), default=list(SETTINGS), metavar="NAME")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    path = options.out / f"{FILE}.json"
    known = json.loads(path.read_text())["settings"] if path.exists() else {}
    rows: dict[str, Any] = {}
    options.out.mkdir(parents=True, exist_ok=True)
    for name, setting in SETTINGS.items():
        if name not in options.only:
            if name in known:
                rows[name] = known[name]
            continue
        runs = [run(setting) for _ in range(options.runs)]
        rows[name] = {"setting": setting._asdict(), "runs": runs}
        print(name, [round(each["accuracy"], 3) for each in runs], runs[0], file=sys.stderr, flush=True)
    results = {"commit": commit(), "settings": rows}
    path.write_text(json.dumps(results, indent=1) + "\n")
    (options.out / f"{FILE}.md").write_text(markdown(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
