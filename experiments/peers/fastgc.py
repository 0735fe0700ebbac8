"""The code of Lee & Kifer's paper as contenders, where a checkout of ppmlguy/fastgradclip is on PYTHONPATH.

Its linear and convolutional layers take the place of torch's in a model as it is; recurrent networks are its own, with
our weights. Of its training loop, the lines from losses to ``p.grad`` are done the same way, for a sum and not a mean.
"""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from ghostclip import models
from ghostclip.bench.contenders import Batch, CannotRun, Contender, Prepared, by_filling_gradients
from ghostclip.bench.losses import Losses, loss_function

__all__ = ["FASTGC", "checkout_commit", "imported"]

# Theirs reads data sets by libraries that the methods don't need.
_UNNEEDED: dict[str, dict[str, Any]] = {
    "pandas": {}, "fastgc.dataset.img_data": {"load_dataset": None}, "fastgc.dataset.text_data": {"load_imdb": None},
}  # fmt: skip
_STATE = {
    "rnn.weight_ih_l0": "recurrent.weight_ih_l0", "rnn.weight_hh_l0": "recurrent.weight_hh_l0",
    "rnn.bias_ih_l0": "recurrent.bias_ih_l0", "rnn.bias_hh_l0": "recurrent.bias_hh_l0",
    "lstm.ih.weight": "recurrent.weight_ih_l0", "lstm.hh.weight": "recurrent.weight_hh_l0",
    "lstm.ih.bias": "recurrent.bias_ih_l0", "lstm.hh.bias": "recurrent.bias_hh_l0",
    "output_layer.weight": "output.weight", "output_layer.bias": "output.bias",
    "fc.weight": "output.weight", "fc.bias": "output.bias",
}  # fmt: skip


def _absent() -> str | None:
    found = importlib.util.find_spec("fastgc")
    return None if found else "fastgc is not importable; put a checkout of ppmlguy/fastgradclip on PYTHONPATH"


@contextmanager
def _stand_ins() -> Iterator[None]:
    """Empty modules in the place of those that only its data sets need."""
    stand_ins = {}
    for name, members in _UNNEEDED.items():
        stand_ins[name] = ModuleType(name)
        stand_ins[name].__dict__.update(members)
    with mock.patch.dict(sys.modules, stand_ins):
        before = set(sys.modules)
        yield
        kept = {name: sys.modules[name] for name in set(sys.modules) - before}
    sys.modules.update(kept)


def imported(name: str) -> Any:
    """A module of theirs."""
    with _stand_ins():
        return importlib.import_module(f"fastgc.{name}")


def checkout_commit() -> str | None:
    """The commit of the checkout, where it is one of git."""
    spec = importlib.util.find_spec("fastgc")
    if spec is None or not spec.submodule_search_locations:
        return None
    folders = [Path(folder).parent for folder in spec.submodule_search_locations]
    place = next((folder for folder in folders if (folder / ".git").exists()), None)
    if place is None:
        return None
    said = subprocess.run(["git", "-C", str(place), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return said.stdout.strip() or None


def _as_theirs(model: nn.Module) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """The model with their layers, and a function from the mean loss to the norms [B]."""
    net = imported("model.penet").PeGradNet()
    if type(model) in (models.RNNClassifier, models.LSTMClassifier):
        kind = "RNN" if type(model) is models.RNNClassifier else "SimpleLSTM"
        source = dict(model.named_parameters())
        inputs, units = source["recurrent.weight_ih_l0"].shape[1], source["recurrent.weight_hh_l0"].shape[1]
        theirs = getattr(imported("model.rnn"), kind)(inputs, units, len(source["output.bias"]))
        theirs.load_state_dict({name: source[_STATE[name]] for name, _ in theirs.named_parameters()})
        return theirs, lambda loss: theirs.pe_grad_norm(loss, _size(theirs), loss.device)
    kinds = {nn.Linear: imported("layers.linear").Linear, nn.Conv2d: imported("layers.conv").Conv2d}
    net.layers = []
    for module in model.modules():
        own = [parameter for parameter in module.parameters(recurse=False) if parameter.requires_grad]
        if own and type(module) not in kinds:
            raise CannotRun(f"of fastgc only linear, convolutional and recurrent layers are adapted, "
                            f"no {type(module).__name__}")  # fmt: skip
        if own:
            module.__class__ = kinds[type(module)]
            net.layers.append(module)
    return model, lambda loss: net.pe_grad_norm(loss, len(net.layers[0].layer_input), loss.device)


def _size(theirs: Any) -> int:
    """Examples of the batch that a recurrent network of theirs has just seen."""
    last = theirs.layers[-1] if theirs.layers else theirs.fc
    return len(last.pre_activation)


def _prepare(model: nn.Module, losses: Losses, max_norm: float) -> Prepared:
    theirs, norms_of = _as_theirs(model)

    def fill(model: nn.Module, losses: Losses, max_norm: float) -> Batch:
        def add_clipped_sum(inputs: Tensor, targets: Tensor) -> None:
            each = losses(model(inputs), targets)
            mean = each.mean()
            with torch.no_grad():
                norms = norms_of(mean)
                weights = torch.min(torch.ones_like(norms), max_norm / norms)
            each.backward(weights)

        return add_clipped_sum

    ready = by_filling_gradients(fill)(theirs, losses, max_norm)
    clipped_sum = ready.clipped_sum
    assert clipped_sum is not None
    if theirs is model:
        return ready
    return Prepared(ready.step, lambda *batch: {_STATE[name]: value for name, value in clipped_sum(*batch).items()})


def _all_at_once(model: nn.Module, losses: Losses, max_norm: float) -> Batch:
    """Their multiLoss: all per-example gradients by `torch.autograd.grad`, stacked, then clipped."""
    grad_per_loss = imported("train").grad_per_loss
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def add_clipped_sum(inputs: Tensor, targets: Tensor) -> None:
        each = loss_function(losses)(model, (inputs, targets))
        means = grad_per_loss(each, model, each.device, len(targets), max_norm)
        for parameter, mean in zip(trained, means, strict=True):
            parameter.grad = mean * len(targets)

    return add_clipped_sum


FASTGC = (
    Contender("authors", "Lee & Kifer's code, ReweightGP", _prepare, _absent),
    Contender("authors-multiloss", "Lee & Kifer's code, multiLoss", by_filling_gradients(_all_at_once), _absent,
              usual=False),
)  # fmt: skip
