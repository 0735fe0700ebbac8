"""The same training in each framework, without privacy and with it: what a user writes, line for line.

Each function trains ``model`` on ``data`` for EPOCHS epochs of batches of BATCH examples by SGD, and calls ``tick``
after each step. The private ones take options of `ghostclip.PrivacyEngine`, and return the engine.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from typing import Any

import lightning
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from transformers import Trainer, TrainerCallback, TrainingArguments

import ghostclip
from ghostclip.integrations.huggingface import PrivacyArguments, PrivateTrainer
from ghostclip.integrations.lightning import PrivacyCallback, setup_fabric

BATCH, EPOCHS, RATE = 64, 2, 0.05


def losses(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


# fmt: off
def by_hand(model, data, tick):
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    for _ in range(EPOCHS):
        for batch in loader:
            losses(model, batch).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            tick()


def by_hand_privately(model, data, tick, **privacy):
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    engine = ghostclip.PrivacyEngine(model, optimizer, loader, **privacy)
    for _ in range(EPOCHS):
        for batch in engine.batches():
            engine.step(batch, losses)
            tick()
    return engine


def by_ddp(model, data, tick):
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    loader = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data))
    for _ in range(EPOCHS):
        for batch in loader:
            losses(model, batch).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            tick()


def by_ddp_privately(model, data, tick, **privacy):
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    loader = DataLoader(data, batch_size=BATCH)
    engine = ghostclip.PrivacyEngine(model, optimizer, loader, **privacy)
    for _ in range(EPOCHS):
        for batch in engine.batches():
            engine.step(batch, losses)
            tick()
    return engine


def by_fsdp2(model, data, tick):
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    loader = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data))
    for _ in range(EPOCHS):
        for batch in loader:
            losses(model, batch).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            tick()


def by_fsdp2_privately(model, data, tick, **privacy):
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    loader = DataLoader(data, batch_size=BATCH)
    engine = ghostclip.PrivacyEngine(model, optimizer, loader, **privacy)
    for _ in range(EPOCHS):
        for batch in engine.batches():
            engine.step(batch, losses)
            tick()
    return engine


def by_accelerate(model, data, tick):
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(EPOCHS):
        for batch in loader:
            accelerator.backward(losses(model, batch).mean())
            optimizer.step()
            optimizer.zero_grad()
            tick()


def by_accelerate_privately(model, data, tick, **privacy):
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    engine = ghostclip.PrivacyEngine(model, optimizer, loader, **privacy)
    for _ in range(EPOCHS):
        for batch in engine.batches():
            engine.step(batch, losses)
            tick()
    return engine


def by_fabric(model, data, tick):
    fabric = lightning.Fabric(accelerator="cpu", devices=1, precision=precision_of(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=BATCH, shuffle=True))
    for _ in range(EPOCHS):
        for batch in loader:
            fabric.backward(losses(model, batch).mean())
            optimizer.step()
            optimizer.zero_grad()
            tick()


def by_fabric_privately(model, data, tick, **privacy):
    fabric = lightning.Fabric(accelerator="cpu", devices=1, precision=precision_of(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    model, optimizer, engine = setup_fabric(fabric, model, optimizer, loader, **privacy)
    for _ in range(EPOCHS):
        for batch in engine.batches():
            engine.step(batch, losses)
            tick()
    return engine


def by_lightning(model, data, tick):
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    trainer = lightning.Trainer(max_epochs=EPOCHS, callbacks=[Ticks(tick)], precision=precision_of(model), **QUIET)
    trainer.fit(Classifier(model), loader)


def by_lightning_privately(model, data, tick, **privacy):
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    private = PrivacyCallback(**privacy)
    trainer = lightning.Trainer(
        max_epochs=EPOCHS, callbacks=[private, Ticks(tick)], precision=precision_of(model), **QUIET
    )
    trainer.fit(PrivateClassifier(model), loader)
    return private.engine


def by_trainer(model, data, tick):
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(folder, per_device_train_batch_size=BATCH, num_train_epochs=EPOCHS, **SILENT)
        trainer = Trainer(
            Labelled(model), args, train_dataset=Rows(data), callbacks=[Steps(tick)], optimizers=constant_rate(model)
        )
        trainer.train()


def by_trainer_privately(model, data, tick, **privacy):
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(folder, per_device_train_batch_size=BATCH, num_train_epochs=EPOCHS, **SILENT)
        trainer = PrivateTrainer(
            Labelled(model), args, train_dataset=Rows(data), callbacks=[Steps(tick)], optimizers=constant_rate(model),
            privacy=PrivacyArguments(**privacy),
            compute_losses=lambda model, inputs: losses(model.inner, (inputs["images"], inputs["labels"])),
        )
        trainer.train()
    return trainer.engine
# fmt: on


PAIRS = {
    "a loop of one's own": (by_hand, by_hand_privately),
    "Accelerate": (by_accelerate, by_accelerate_privately),
    "Fabric": (by_fabric, by_fabric_privately),
    "Lightning": (by_lightning, by_lightning_privately),
    "Trainer of transformers": (by_trainer, by_trainer_privately),
    "DDP": (by_ddp, by_ddp_privately),
    "FSDP2": (by_fsdp2, by_fsdp2_privately),
}
# Those that need a process group, here of one process.
GROUPED = ("DDP", "FSDP2")

# What both of a pair need, and a user has anyway.
QUIET: dict[str, Any] = {
    "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False,
}  # fmt: skip
SILENT: dict[str, Any] = {
    "use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_strategy": "no", "save_strategy": "no",
    "max_grad_norm": 0.0, "remove_unused_columns": False,
}  # fmt: skip


@contextlib.contextmanager
def process_group(needed: bool) -> Iterator[None]:
    """Inside, this process is a process group, if one is needed."""
    if needed:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        if needed:
            dist.destroy_process_group()


def precision_of(model: nn.Module) -> Any:
    """Lightning's word for the type of the parameters."""
    return "64-true" if next(model.parameters()).dtype == torch.float64 else "32-true"


def constant_rate(model: nn.Module) -> Any:
    """SGD, with Trainer's schedule off."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)


class Classifier(lightning.LightningModule):
    """A model with the mean loss of a batch."""

    reduction = "mean"

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1], reduction=self.reduction)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=RATE)


class PrivateClassifier(Classifier):
    """The one line that changes in the module."""

    reduction = "none"


class Ticks(lightning.Callback):
    """Calls after each step."""

    def __init__(self, tick: Any) -> None:
        self._tick = tick

    def on_train_batch_end(self, *_: Any) -> None:
        self._tick()


class Labelled(nn.Module):
    """A model as Trainer has it: a loss where there are labels."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.inner(images)
        return {"loss": F.cross_entropy(scores, labels), "logits": scores}


class Rows(torch.utils.data.Dataset):
    """Examples as Trainer has them."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        images, labels = self._data[index]
        return {"images": images, "labels": labels}


class Steps(TrainerCallback):
    """Calls after each step."""

    def __init__(self, tick: Any) -> None:
        self._tick = tick

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._tick()
