"""Finding mislabelled digits by the norms of their gradients: what `per_example_norms` is good for without privacy.

Of scikit-learn's handwritten digits 5% get the label of another class, at random. An ordinary network trains on them
for some epochs, and the examples are ranked by the norm of their gradient, which is large where the other examples
contradict a label. Reported are the share of the wrong labels among the 5% with the largest norms, and the area under
the ROC curve; beside them the same for a ranking by loss.

    python experiments/mislabelled.py [--seeds N] [--epochs N] [--out FOLDER]

writes mislabelled.json, mislabelled.md and mislabelled.png.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from ghostclip import per_example_norms
from ghostclip.bench.machine import commit

FILE, FLIPPED, BATCH, RATE, CLASSES = "mislabelled", 0.05, 64, 1e-3, 10
SHOWN = (1, 2, 5, 10, 20, 50)
RANKINGS = {"norm": "gradient norm", "loss": "loss"}


def losses_of(model: nn.Module, batch: Any) -> Tensor:
    """Cross-entropy, one for each example."""
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def digits(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Images [N, 64] in [0, 1], labels of which some are flipped, and which ones are, bool."""
    images, labels = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(labels), generator=generator)[: round(FLIPPED * len(labels))]
    shift = torch.randint(1, CLASSES, (len(chosen),), generator=generator)
    flipped = torch.zeros(len(labels), dtype=torch.bool)
    flipped[chosen] = True
    labels = labels.clone()
    labels[chosen] = (labels[chosen] + shift) % CLASSES
    return (images / 16).float(), labels, flipped


def scores(ranking: Tensor, flipped: Tensor) -> dict[str, float]:
    """Share of the flipped labels among as many examples at the top, and the area under the ROC curve."""
    top = ranking.argsort(descending=True)[: int(flipped.sum())]
    return {
        "found": float(flipped[top].double().mean()),
        "area": float(roc_auc_score(flipped.numpy(), ranking.numpy())),
    }


def trained(seed: int, epochs: int) -> tuple[list[dict[str, Any]], dict[str, list[float]]]:
    """Scores after each epoch, and norms after the best one by kind of label."""
    images, labels, flipped = digits(seed)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, CLASSES))
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    data = TensorDataset(images, labels)
    rows, norms_after = [], []
    for epoch in range(1, epochs + 1):
        for batch in DataLoader(data, batch_size=BATCH, shuffle=True):
            optimizer.zero_grad()
            losses_of(model, batch).mean().backward()
            optimizer.step()
        norms = per_example_norms(model, losses_of, DataLoader(data, batch_size=256))
        with torch.no_grad():
            losses = losses_of(model, (images, labels))
        rows.append({"epoch": epoch, "norm": scores(norms, flipped), "loss": scores(losses, flipped)})
        norms_after.append(norms)
    last = norms_after[-1]
    return rows, {"flipped": last[flipped].tolist(), "right": last[~flipped].tolist()}


def summary(runs: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """For each epoch and ranking: median, least and greatest of each score over the seeds."""
    found = []
    for rows in zip(*runs, strict=True):
        row: dict[str, Any] = {"epoch": rows[0]["epoch"]}
        for ranking in RANKINGS:
            each = {score: [run[ranking][score] for run in rows] for score in ("found", "area")}
            row[ranking] = {
                score: {"median": statistics.median(values), "least": min(values), "greatest": max(values)}
                for score, values in each.items()
            }
        found.append(row)
    return found


def markdown(results: dict[str, Any]) -> str:
    """A row for each epoch."""
    lines = [
        f"{results['flipped']} of {results['examples']:,} labels flipped; median (range) of {results['seeds']} seeds. "
        f"Found: the share of wrong labels among the {results['flipped']} examples with the largest values.",
        "",
        "| after epoch | found by gradient norm | found by loss | ROC area, gradient norm | ROC area, loss |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in results["epochs"]:
        if row["epoch"] not in SHOWN:
            continue
        cells = [_shown(row[ranking]["found"], 100, "%") for ranking in RANKINGS]
        cells += [_shown(row[ranking]["area"], 1, "") for ranking in RANKINGS]
        lines.append(f"| {row['epoch']} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"At commit {results['commit']}.", ""])


def _shown(score: dict[str, float], factor: float, unit: str) -> str:
    figures = [f"{factor * score[name]:.{0 if unit else 3}f}{unit}" for name in ("median", "least", "greatest")]
    return f"{figures[0]} ({figures[1]} to {figures[2]})"


def plot(results: dict[str, Any], norms: dict[str, list[float]], path: Path) -> None:
    """Norms of right and wrong labels, and what is found over the epochs."""
    import numpy as np
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(10, 4), dpi=144, layout="constrained")
    left, right = figure.subplots(1, 2)
    edges = np.geomspace(min(min(each) for each in norms.values()), max(max(each) for each in norms.values()), 40)
    for colour, (kind, values) in zip(("#D55E00", "#0072B2"), norms.items(), strict=True):
        label = f"{'wrong' if kind == 'flipped' else 'right'} label ({len(values):,})"
        left.hist(values, bins=edges, density=False, alpha=0.75, color=colour, label=label, log=True)
    left.set(xscale="log", xlabel="gradient norm", ylabel="examples", title=f"after epoch {len(results['epochs'])}")
    epochs = [row["epoch"] for row in results["epochs"]]
    for colour, (ranking, about) in zip(("#0072B2", "#E69F00"), RANKINGS.items(), strict=True):
        spread = [row[ranking]["found"] for row in results["epochs"]]
        right.plot(epochs, [each["median"] for each in spread], color=colour, marker="o", markersize=3, label=about)
        low, high = [each["least"] for each in spread], [each["greatest"] for each in spread]
        right.fill_between(epochs, low, high, color=colour, alpha=0.15, linewidth=0)
    title = f"wrong labels found among the top 5%\n(median and range of {results['seeds']} seeds)"
    right.set(xlabel="epoch", ylabel="share found", ylim=(0, 1), title=title)
    left.set_ylim(top=8 * left.get_ylim()[1])  # the legend has its place above the bars
    right.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (left, right):
        axes.legend(frameon=False)
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the experiment and writes its three files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10, help="default: 10")
    parser.add_argument("--epochs", type=int, default=20, help="default: 20")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder for the results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found = [trained(seed, options.epochs) for seed in range(options.seeds)]
    _, labels, flipped = digits(0)
    results = {
        "commit": commit(), "examples": len(labels), "flipped": int(flipped.sum()), "seeds": options.seeds,
        "epochs": summary([rows for rows, _ in found]),
    }  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{FILE}.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.out / f"{FILE}.md").write_text(markdown(results))
    plot(results, found[0][1], options.out / f"{FILE}.png")
    print(markdown(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
