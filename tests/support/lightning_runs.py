"""Small Lightning modules and private fits for the tests, and the slow loop that they must agree with."""

from pathlib import Path
from typing import Any

import lightning
import private_runs as runs
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from ghostclip.clipper.trial import is_trial
from ghostclip.integrations.lightning import PrivacyCallback

MAX_NORM = 0.3
RATE = 0.5
BATCH = 8
# Repeatable samples, no noise, and physical batches smaller than logical ones.
EXACT = {"noise_multiplier": 0.0, "noise": "test", "seed": 3, "clipping": MAX_NORM, "max_physical_batch_size": 3}


class Module(lightning.LightningModule):
    """A small network; remembers which examples it was trained on."""

    def __init__(self, manual: bool = False, as_dict: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.net = runs.network()
        self.as_dict = as_dict
        self.seen: list[list[Any]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not self.automatic_optimization:
            return self.manual_step(batch)
        losses = self.losses(batch)
        return {"loss": losses, "other": 1} if self.as_dict else losses

    def manual_step(self, batch: Any) -> None:
        optimizer = self.optimizers()
        for examples in batch.physical():
            self.manual_backward(self.losses(examples))
        optimizer.step()
        optimizer.zero_grad()

    def losses(self, examples: Any) -> Tensor:
        if not is_trial():  # the self-check's, on other rows, now and then between physical batches
            self.seen.append(examples)
        losses = runs.losses_of(self.net, examples)
        self.log("train_loss", losses.mean(), on_step=True, on_epoch=True)
        return losses

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=RATE)


class Data(lightning.LightningDataModule):
    """Makes its data set when it is set up, and looks at every batch."""

    def setup(self, stage: str) -> None:
        self.rows, self.kinds = Subset(runs.data(), torch.randperm(24).tolist()), set()

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.rows, batch_size=BATCH)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.kinds.add(type(batch))
        return batch


class Steps(lightning.Callback):
    """Weights after each step, and what the module saw in it."""

    def __init__(self) -> None:
        self.weights: list[list[Tensor]] = []
        self.examples: list[list[Any]] = []
        self.sizes: list[list[int]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.weights.append([p.detach().clone() for p in pl_module.parameters()])
        self.examples.append(pl_module.seen[-len(batch.sizes) :] if batch.sizes else [])
        self.sizes.append(batch.sizes)
        pl_module.seen = []


def loader(size: int = 24, **options: Any) -> DataLoader[Any]:
    torch.manual_seed(0)
    return DataLoader(runs.data(size), batch_size=BATCH, shuffle=True, **options)


def trainer(folder: Path, *callbacks: Any, **options: Any) -> lightning.Trainer:
    """A quiet Trainer, on the CPU."""
    quiet = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    settings = {"max_epochs": 2, "accelerator": "cpu", "devices": 1, "default_root_dir": folder}
    return lightning.Trainer(**{**dict.fromkeys(quiet, False), **settings, **options}, callbacks=list(callbacks))


def fit(folder: Path, module: Any = None, data: Any = None, ckpt_path: Any = None, **options: Any) -> Any:
    """(trainer, callback) after a fit without the self-check, with options of the engine and of the Trainer."""
    callback = PrivacyCallback(**{"noise_multiplier": 1.0, "self_check": False, **options.pop("engine", {})})
    made = trainer(folder, callback, *options.pop("callbacks", []), **options)
    module = Module() if module is None else module
    made.fit(module, loader() if data is None else data, ckpt_path=ckpt_path)
    return made, callback


def assert_steps_are_hand_written(steps: Steps, tolerance: float = 1e-9) -> None:
    """Every step moved the weights by the slow loop's clipped sum over the examples of its batch."""
    model = runs.network(torch.float64)
    for weights, examples, sizes in zip(steps.weights, steps.examples, steps.sizes, strict=True):
        assert [len(each[0]) for each in examples] == sizes
        examples = [[inputs.double(), targets] for inputs, targets in examples]
        for p, total in zip(model.parameters(), runs.clipped_sum(model, examples, MAX_NORM), strict=True):
            p.data -= RATE * total / BATCH
        for mine, theirs in zip(weights, model.parameters(), strict=True):
            torch.testing.assert_close(mine.double(), theirs.detach(), rtol=tolerance, atol=tolerance)
