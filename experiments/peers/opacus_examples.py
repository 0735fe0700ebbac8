"""Programs like Opacus's five examples, run with Opacus and with `ghostclip.compat.opacus`: gradients, epsilon, time.

Models have the examples' sizes (the discriminator an eighth of its channels); data are random. Steps of ordinary
training, of GhostClip and of Opacus take turns, over batches of one size; each has forward, backward and update.

    OMP_NUM_THREADS=1 python -m experiments.peers.opacus_examples [--examples NAME ...] [--seconds S] [--out FOLDER]

writes opacus_examples.json and opacus_examples.md; returns 1 where a gradient differs by more than 1e-5 or an epsilon
by more than 1e-4.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ghostclip.bench.machine import busy_warning, commit, describe, in_words
from ghostclip.bench.measure import take_turns, timed
from ghostclip.compat import opacus as ours

RESULTS = Path(__file__).parents[1] / "results"
FILE = "opacus_examples"
BATCHES, DELTA, CLOCK = 8, 1e-5, time.process_time
# What the two must agree to: Opacus divides by the norm plus 1e-6.
GRADIENTS, EPSILON = 1e-5, 1e-4
PLAIN, OURS, THEIRS = "plain", "ghostclip", "opacus"


@dataclass(frozen=True)
class Example:
    """A program.

    Attributes:
        model: built with a recurrent layer.
        data: of a number of examples.
        batch_size, noise_multiplier, max_grad_norm, lr: the example's defaults.
        loss: (model, batch) -> the mean loss.
        optimizer: of torch.
    """

    model: Callable[[Any], nn.Module]
    data: Callable[[int], tuple[Tensor, ...]]
    batch_size: int
    noise_multiplier: float
    max_grad_norm: float
    lr: float
    loss: Callable[[nn.Module, Any], Tensor]
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD


class Last(nn.Module):
    """A recurrent layer's output at the last position."""

    def __init__(self, recurrent: nn.Module) -> None:
        super().__init__()
        self.recurrent = recurrent

    def forward(self, inputs: Tensor) -> Tensor:
        """[B, T, features] to [B, hidden]."""
        return self.recurrent(inputs)[0][:, -1]


class Mean(nn.Module):
    """The mean over positions."""

    def forward(self, inputs: Tensor) -> Tensor:
        """[B, T, features] to [B, features]."""
        return inputs.mean(1)


def classify(model: nn.Module, batch: Any) -> Tensor:
    """The mean cross entropy."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def judge(model: nn.Module, batch: Any) -> Tensor:
    """A discriminator's loss on real and generated images: two forwards, one backward."""
    real, made = (model(images).flatten() for images in batch)
    cost = nn.functional.binary_cross_entropy
    return cost(real, torch.ones_like(real)) + cost(made, torch.zeros_like(made))


def convolutions(*channels: int) -> list[nn.Module]:
    """Pairs of a convolution and a ReLU, with average pools between them."""
    found: list[nn.Module] = []
    for before, after in itertools.pairwise(channels):
        found += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2)]
    return found


def discriminator(width: int) -> list[nn.Module]:
    """Five strided convolutions, of images of 64 x 64; Opacus's hooks take no operation in place."""
    found: list[nn.Module] = [nn.Conv2d(1, width, 4, 2, 1, bias=False), nn.LeakyReLU(0.2)]
    for factor in (1, 2, 4):
        after = 2 * factor * width
        found += [nn.Conv2d(factor * width, after, 4, 2, 1, bias=False), nn.GroupNorm(min(32, after), after)]
        found.append(nn.LeakyReLU(0.2))
    return [*found, nn.Conv2d(8 * width, 1, 4, 1, 0, bias=False), nn.Sigmoid()]


def labelled(inputs: Callable[[int], Tensor], classes: int) -> Callable[[int], tuple[Tensor, ...]]:
    """Inputs with random labels."""
    return lambda count: (inputs(count), torch.randint(0, classes, (count,)))


EXAMPLES = {
    "mnist": Example(
        lambda _: nn.Sequential(
            nn.Conv2d(1, 16, 8, 2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1), nn.Conv2d(16, 32, 4, 2), nn.ReLU(),
            nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10),
        ),
        labelled(lambda count: torch.randn(count, 1, 28, 28), 10), 64, 1.0, 1.0, 0.1, classify,
    ),
    "cifar10": Example(
        lambda _: nn.Sequential(
            *convolutions(3, 32, 64, 64), nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
            nn.Flatten(), nn.Linear(128, 10),
        ),
        labelled(lambda count: torch.randn(count, 3, 32, 32), 10), 64, 1.5, 10.0, 0.1, classify,
    ),
    "char-lstm": Example(
        lambda layers: nn.Sequential(
            nn.Embedding(259, 64), Last(layers.DPLSTM(64, 128, batch_first=True)), nn.Linear(128, 18)
        ),
        labelled(lambda count: torch.randint(0, 259, (count, 12)), 18), 256, 1.0, 1.5, 2.0, classify,
    ),
    "imdb": Example(
        lambda _: nn.Sequential(
            nn.Embedding(28996, 16), Mean(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2)
        ),
        labelled(lambda count: torch.randint(0, 28996, (count, 256)), 2), 64, 0.56, 1.0, 0.02, classify,
        torch.optim.Adam,
    ),
    "dcgan": Example(
        lambda _: nn.Sequential(*discriminator(16)),
        lambda count: (torch.randn(count, 1, 64, 64), torch.randn(count, 1, 64, 64)), 64, 1.0, 1.0, 2e-4, judge,
        torch.optim.Adam,
    ),
}  # fmt: skip


def library(name: str) -> Any:
    """The namespace with PrivacyEngine and layers."""
    if name == OURS:
        return ours
    import opacus
    import opacus.layers

    return opacus


def private(name: str, example: Example, data: TensorDataset, state: Any, **options: Any) -> Any:
    """(engine, model, optimizer, loader) of a library, from weights under torch's names."""
    api = library(name)
    model = example.model(api.layers)
    # Opacus's recurrent layers have each parameter under two names.
    model.load_state_dict(state, strict=name == OURS)
    engine = api.PrivacyEngine(accountant="rdp")
    options = {"noise_multiplier": example.noise_multiplier, "max_grad_norm": example.max_grad_norm, **options}
    loader = DataLoader(data, batch_size=example.batch_size, shuffle=True)
    optimizer = example.optimizer(model.parameters(), lr=example.lr)
    return engine, *engine.make_private(module=model, optimizer=optimizer, data_loader=loader, **options)


def stepping(example: Example, model: nn.Module, optimizer: Any, batches: Iterator[Any]) -> Callable[[], object]:
    """One step of the loop that all five examples have."""

    def step() -> None:
        batch = next(batches)
        optimizer.zero_grad()
        example.loss(model, batch).backward()
        optimizer.step()

    return step


def endless(loader: Any) -> Iterator[Any]:
    """Epoch after epoch."""
    while True:
        yield from loader


def gradient_error(example: Example, data: TensorDataset, state: Any) -> float:
    """The largest difference of clipped gradients without noise, over the largest entry, on one batch."""
    found = {}
    batch = [part[: example.batch_size] for part in data.tensors]
    alone = TensorDataset(*batch)
    for name in (OURS, THEIRS):
        _, model, optimizer, loader = private(name, example, alone, state, noise_multiplier=0.0, poisson_sampling=False)
        seen: list[Any] = []
        optimizer.attach_step_hook(
            lambda own, model=model, seen=seen: seen.append(
                {key: p.grad.clone() for key, p in model.named_parameters()}
            )
        )
        next_batch = next(iter(loader))
        if len(next_batch[0]) < example.batch_size:  # our first one has an example less
            loader.discard()
            next_batch = next(iter(loader))
        order = torch.stack([(batch[0] == row).flatten(1).all(1) for row in next_batch[0]]).int().argmax(1)
        assert sorted(order.tolist()) == list(range(example.batch_size)), "the batch isn't all of the data"
        example.loss(model, next_batch).backward()
        optimizer.step()
        found[name] = ours.from_opacus(seen[0])
    largest = max(float(each.abs().max()) for each in found[THEIRS].values())
    return max(float((found[OURS][key] - value).abs().max()) for key, value in found[THEIRS].items()) / largest


def epsilons(example: Example, data: TensorDataset, state: Any) -> dict[str, float]:
    """Each library's epsilon after an epoch of Poisson samples, by RDP."""
    found = {}
    for name in (OURS, THEIRS):
        engine, model, optimizer, loader = private(name, example, data, state)
        step = stepping(example, model, optimizer, iter(loader))
        for _ in range(len(loader)):
            step()
        found[name] = float(engine.get_epsilon(DELTA))
    return found


def measure(name: str, seconds: float) -> dict[str, Any]:
    """All that is said of one example."""
    torch.manual_seed(0)
    example = EXAMPLES[name]
    data = TensorDataset(*example.data(BATCHES * example.batch_size))
    model = example.model(ours.layers)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    found: dict[str, Any] = {"batch_size": example.batch_size, "gradients": gradient_error(example, data, state)}
    found["epsilon"] = epsilons(example, data, state)
    plain = copy.deepcopy(model)
    loader = DataLoader(data, batch_size=example.batch_size, shuffle=True)
    optimizer = example.optimizer(plain.parameters(), lr=example.lr)
    turns = {PLAIN: stepping(example, plain, optimizer, endless(loader))}
    for one in (OURS, THEIRS):
        made = private(one, example, data, state, poisson_sampling=False)[1:]
        turns[one] = stepping(example, made[0], made[1], endless(made[2]))
    for _ in range(3):  # the first steps are looked at
        turns[OURS]()
    timings = take_turns({key: timed(turn, CLOCK) for key, turn in turns.items()}, seconds, baseline=PLAIN)
    found["ms"] = timings.milliseconds(PLAIN).median
    found["over_plain"] = {one: asdict(timings.ratio(one, PLAIN)) for one in (OURS, THEIRS)}
    return found


def markdown(results: dict[str, Any]) -> str:
    """A row for each example."""
    lines = [
        "| program | batch | largest difference of clipped gradients | epsilon: GhostClip | Opacus "
        "| ordinary step, ms | time over ordinary: GhostClip | Opacus |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, found in results["examples"].items():
        epsilon = [f"{found['epsilon'][one]:.6g}" for one in (OURS, THEIRS)]
        ratios = [_spread(found["over_plain"][one]) for one in (OURS, THEIRS)]
        cells = [name, str(found["batch_size"]), f"{found['gradients']:.1e}", *epsilon, f"{found['ms']:.3g}", *ratios]
        lines.append(f"| {' | '.join(cells)} |")
    where = in_words(results["machine"])
    return "\n".join([
        *lines, "",
        "Differences are over the largest entry. Epsilon: by RDP at delta 1e-5, after an epoch of 8 Poisson batches. "
        f"Times: processor time, median (quartiles). At commit {results['commit']} on {where}.", "",
    ])  # fmt: skip


def _spread(spread: dict[str, float]) -> str:
    return f"{spread['median']:.2f} ({spread['low']:.2f} to {spread['high']:.2f})"


def agrees(found: dict[str, Any]) -> bool:
    """Whether gradients and epsilon are Opacus's."""
    one, other = found["epsilon"][OURS], found["epsilon"][THEIRS]
    return found["gradients"] <= GRADIENTS and abs(one - other) <= EPSILON * other


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the experiment and writes its two files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", nargs="+", default=list(EXAMPLES), choices=tuple(EXAMPLES))
    parser.add_argument("--seconds", type=float, default=20.0, help="measuring time an example (default: 20)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if warning := busy_warning():
        print(warning, file=sys.stderr)
    found = {name: measure(name, options.seconds) for name in options.examples}
    results = {"machine": describe(), "commit": commit(), "examples": found}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{FILE}.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.out / f"{FILE}.md").write_text(markdown(results))
    print(markdown(results))
    return int(not all(agrees(each) for each in found.values()))


if __name__ == "__main__":
    sys.exit(main())
