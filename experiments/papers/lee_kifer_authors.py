"""Per-example norms of the authors' own code against a plain loop over the same networks.

Lee & Kifer publish their code (https://github.com/ppmlguy/fastgradclip). Claim (section 6.1): reweighting gives the
same clipped gradients as the naive loop, since its norms are exact. Each of their networks is run as they define it,
norms by its ``pe_grad_norm`` beside those of one backward an example. Where they differ the reason is tested: with the
batch size's factor in convolutions, and a second cause that is named for each network taken away, they must agree.

    PYTHONPATH=CHECKOUT:. python -m experiments.papers.lee_kifer_authors [--out FOLDER]

Without a checkout on PYTHONPATH nothing is written. Run from elsewhere than the checkout's parent folder.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from experiments.papers.report import RESULTS, page, store, table
from experiments.peers.fastgc import checkout_commit, imported
from ghostclip.bench.losses import class_losses
from ghostclip.bench.machine import describe
from ghostclip.bench.reference import loop_norms

NAME = "lee_kifer_authors"
BATCH = 8
EXACT = 1e-4  # relative errors of norms below this are rounding


class Network(NamedTuple):
    """One of their networks.

    Attributes:
        build: makes it.
        shape: of an image.
        cause: what else keeps its norms from being exact; taken away by the next three.
        repair: changes the model so that its norms are without the cause.
        uncounted: a word in the names of parameters that its norms leave out: the loop does then, too.
        forward: of the loop's model, where that has to be another one.
        batch: examples.
    """

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    cause: str = ""
    repair: Callable[[nn.Module], object] = lambda model: None
    uncounted: str = ""
    forward: Callable[[nn.Module], Callable[[Tensor], Tensor]] | None = None
    batch: int = BATCH


def networks() -> dict[str, Network]:
    """Theirs by name, in the paper's sizes; VGG and ResNet on 64 x 64 pixels."""
    net = imported("model")
    mnist = (1, 28, 28)
    return {
        "MLP": Network(lambda: net.MLP(784, [128, 256], 10), mnist),
        "CNN": Network(lambda: net.CNN(28, [1, 20, 50], [5, 5], [128], 10), mnist),
        "RNN": Network(lambda: net.RNN(28, 128, 10), mnist, "of the time steps the last one is counted, of two biases "
                       "one", uncounted="bias_hh", forward=_last_step),
        "LSTM": Network(lambda: net.SimpleLSTM(28, 128, 10), mnist, "of two biases one is counted",
                        uncounted="hh.bias"),
        "VGG11, 64 x 64": Network(lambda: net.vgg11(num_classes=10), (3, 64, 64), "ReLU works in place on what was "
                                  "kept, so its derivative is left out", repair=_out_of_place, batch=4),
        "ResNet-18, 64 x 64": Network(lambda: _frozen(net.resnet18(num_classes=10, train_alg="reweight")), (3, 64, 64),
                                      "convolutions in a shortcut are not counted", uncounted="downsample"),
    }  # fmt: skip


def _frozen(model: nn.Module) -> nn.Module:
    """Batch norm is frozen, as in section 6.5."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.requires_grad_(False)
    return model


def _out_of_place(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False


def _last_step(model: Any) -> Callable[[Tensor], Tensor]:
    """Their RNN on images, with no gradient through the states before the last step."""

    def forward(images: Tensor) -> Tensor:
        rows = images.reshape(len(images), images.shape[2], -1).permute(1, 0, 2)
        state = torch.zeros(1, len(images), model.hidden_size)
        with torch.no_grad():
            _, state = model.rnn(rows[:-1], state)
        return model.output_layer(model.rnn(rows[-1:], state)[0][-1])

    return forward


@contextmanager
def _with_the_factor() -> Iterator[None]:
    """Their convolutions' squared norms times the squared batch size, as their linear layers have it."""
    kind = imported("layers.conv").Conv2d
    theirs = kind.pe_grad_sqnorm
    kind.pe_grad_sqnorm = lambda layer, grads: theirs(layer, grads) * len(grads) ** 2
    try:
        yield
    finally:
        kind.pe_grad_sqnorm = theirs


def _error(model: Any, images: Tensor, labels: Tensor, expected: Tensor) -> float:
    """The median over examples of the relative error of their norms."""
    mean = class_losses(model(images), labels).mean()
    with torch.no_grad():  # as in their training loop
        found = model.pe_grad_norm(mean, len(images), images.device).double()
    return float(((found - expected).abs() / expected).median())


def check(network: Network) -> dict[str, Any]:
    """Errors of one network's norms: as they are, with the factor, and with the factor and the cause taken away."""
    torch.manual_seed(0)
    model = network.build().eval()
    images, labels = torch.randn(network.batch, *network.shape), torch.randint(0, 10, (network.batch,))
    whole = _loop(model, images, labels)
    found: dict[str, Any] = {"batch": network.batch, "cause": network.cause}
    try:
        found["error"] = _error(model, images, labels, whole)
        with _with_the_factor():
            found["with factor"] = _error(model, images, labels, whole)
            network.repair(model)
            theirs = model.forward
            if network.forward is not None:
                model.forward = network.forward(model)
            part = _loop(model, images, labels, network.uncounted)
            model.forward = theirs
            found["without cause"] = _error(model, images, labels, part)
    except Exception as error:  # another library may fail in any way, which is a finding
        found["failed"] = f"{type(error).__name__}: {error}".strip(" :")
    return found


def _loop(model: nn.Module, images: Tensor, labels: Tensor, uncounted: str = "") -> Tensor:
    """Norms [B] by one backward an example."""
    norms = loop_norms(model, class_losses, images, labels)
    kept = [norm for name, norm in norms.items() if not uncounted or uncounted not in name]
    return torch.stack(kept).norm(dim=0)


def write(results: dict[str, Any], folder: Path) -> None:
    """The page."""
    rows = []
    for name, row in results["networks"].items():
        keys = ("error", "with factor", "without cause")
        errors = [f"{row[key]:.2g}" if key in row else f"raises {row['failed']}" for key in keys]
        rows.append([name, str(row["batch"]), *errors, row["cause"]])
    head = ["network", "batch", "median relative error of norms", "with the factor B in convolutions",
            "and without the second cause", "second cause"]  # fmt: skip
    reasons = (
        "Where the last error is rounding, the two causes are all there is. The first: a loss is averaged over the "
        "batch there, so every gradient of a pre-activation has a factor 1/B, which their linear and recurrent layers "
        "take back and their convolutions don't. With norms that are too small, examples are clipped by less than they "
        "must be: the sensitivity is larger than the noise is made for. For the published times the factor and the "
        "biases mean next to nothing. The RNN's do not include the way back through its time steps for the norms: the "
        "layer is one call, and the gradient of its outputs before the last step is zero."
    )
    size = (
        "The first convolution of their ResNet has a kernel of 6 x 6. With the usual one of 7 x 7 their unfolding "
        "raises AssertionError on even sides, as the adapter's `authors` does on the ResNets of our other pages."
    )
    commit = results["commit"] or "unknown, the checkout is not one of git"
    page(NAME, "Norms of the authors' own code", [*__doc__.split("\n\n")[1:2], f"Their commit: {commit}.",
         table(head, rows), reasons, size], folder, results["machine"])  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--paper", action="store_true", help="the same: the networks have the paper's sizes")
    parser.add_argument("--networks", nargs="+", default=None, help="some of them (default: all)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    try:
        known = networks()
    except ModuleNotFoundError as error:
        print(f"nothing written: {error}; put a checkout of ppmlguy/fastgradclip on PYTHONPATH")
        return 0
    results: dict[str, Any] = {"machine": describe(), "commit": checkout_commit(), "networks": {}}
    for name in options.networks or known:
        results["networks"][name] = check(known[name])
        print(name, results["networks"][name], flush=True)
    results["finding"] = finding(results["networks"])
    store(NAME, results, options.out)
    write(results, options.out)
    return 0


def finding(found: dict[str, Any]) -> str:
    """One line for the index."""
    off = [f"{name} {row['error']:.2g}" for name, row in found.items() if row.get("error", 0) > EXACT]
    raised = [name for name, row in found.items() if "failed" in row]
    wrong = "norms are off by " + ", ".join(off) if off else "all norms agree"
    return wrong + (f"; raises on {', '.join(raised)}" if raised else "")


if __name__ == "__main__":
    sys.exit(main())
