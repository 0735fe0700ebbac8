"""Mistakes that users of each framework make; every one of them must end in an error of GhostClip's.

Each function makes one mistake in a short training. `refused` runs them.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Callable
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

import ghostclip
from experiments.integrations.loops import QUIET, SILENT
from ghostclip.compat import opacus
from ghostclip.errors import GhostClipError
from ghostclip.integrations.huggingface import PrivacyArguments, PrivateTrainer
from ghostclip.integrations.lightning import PrivacyCallback, setup_fabric

SIZE, BATCH = 32, 8


def data() -> TensorDataset:
    """Examples of four numbers in three classes."""
    return TensorDataset(torch.randn(SIZE, 4), torch.arange(SIZE) % 3)


def network(*more: nn.Module) -> nn.Sequential:
    """A small network, with more layers in its middle."""
    return nn.Sequential(nn.Linear(4, 6), *more, nn.Tanh(), nn.Linear(6, 3))


def losses(model: nn.Module, batch: Any, reduction: str = "none") -> Tensor:
    """[B], or what another reduction gives."""
    return F.cross_entropy(model(batch[0]), batch[1], reduction=reduction)


# A loop of one's own.
def own(
    work: Callable[[Any, Any], None] = lambda engine, rows: None,
    model: nn.Module | None = None,
    more: Callable[[Any], None] = lambda engine: None,
    **options: Any,
) -> None:
    """Two logical batches, with ``work`` for each physical one and ``more`` in the place of the step."""
    model = network() if model is None else model
    options = {"batch_size": BATCH, "noise_multiplier": 1.0, "sampling": "without_replacement", **options}
    engine = ghostclip.PrivacyEngine(model, torch.optim.SGD(model.parameters(), lr=0.1), data(), **options)
    for number, batch in enumerate(engine.batches()):
        for rows in batch.physical():
            work(engine, rows)
        more(engine)
        if number:
            return


def backward(engine: Any, rows: Any) -> None:
    """The right thing to do with a physical batch."""
    engine.backward(losses(engine.model, rows))


def step(engine: Any) -> None:
    """And with a logical one."""
    engine.optimizer.step()
    engine.optimizer.zero_grad()


def second_optimizer() -> None:
    other: list[Any] = []

    def both(engine: Any) -> None:
        other[:] = other or [torch.optim.SGD(engine.model.parameters(), lr=0.1)]
        step(engine)
        for parameter in engine.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        other[0].step()
        engine.optimizer.zero_grad()

    own(backward, more=both)


def two_engines() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        ghostclip.PrivacyEngine(model, optimizer, data(), batch_size=BATCH, noise_multiplier=1.0)


def weighted() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        found = losses(model, batch)
        return found / found.detach().sum()

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = ghostclip.PrivacyEngine(model, optimizer, data(), batch_size=BATCH, noise_multiplier=1.0)
    for batch in engine.batches():
        engine.step(batch, loss_fn)


OWN: dict[str, Callable[[], None]] = {
    'reduction="mean"': lambda: own(lambda engine, rows: engine.backward(losses(engine.model, rows, "mean"))),
    "losses of shape [B, 1]": lambda: own(lambda engine, rows: engine.backward(losses(engine.model, rows)[:, None])),
    "loss.backward()": lambda: own(lambda engine, rows: losses(engine.model, rows).mean().backward(), more=step),
    "step without backward": lambda: own(more=step),
    "no step": lambda: own(backward),
    "step after each physical batch": lambda: own(
        lambda engine, rows: (backward(engine, rows), step(engine)), max_physical_batch_size=2  # type: ignore[arg-type]
    ),
    "backward twice": lambda: own(lambda engine, rows: (backward(engine, rows), backward(engine, rows))),  # type: ignore
    "a second optimizer": second_optimizer,
    "two engines on one optimizer": two_engines,
    "BatchNorm": lambda: own(model=network(nn.BatchNorm1d(6))),
    "loss weights from the batch": weighted,
    "LBFGS": lambda: ghostclip.PrivacyEngine(
        (model := network()), torch.optim.LBFGS(model.parameters()), data(), batch_size=BATCH, noise_multiplier=1.0
    ) and None,
    "an ordered sampler": lambda: own_loader(sampler=torch.utils.data.SubsetRandomSampler(range(SIZE))),
    "a negative noise_multiplier": lambda: own(noise_multiplier=-1.0),
    "max_grad_norm=": lambda: own(max_grad_norm=1.0),
    "torch.compile(model)": lambda: own(backward, model=torch.compile(network()), more=step),  # type: ignore[arg-type]
}  # fmt: skip


def own_loader(**options: Any) -> None:
    model = network()
    loader = DataLoader(data(), batch_size=BATCH, **options)
    ghostclip.PrivacyEngine(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, noise_multiplier=1.0)


# Accelerate.
def accelerated(
    work: Callable[[Any, Any, Any], None] = lambda accelerator, engine, rows: None,
    prepare_loader: bool = False,
    **options: Any,
) -> None:
    accelerator = Accelerator(cpu=True, **options)
    model = network()
    loader: Any = DataLoader(data(), batch_size=BATCH, shuffle=True)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = accelerator.prepare(loader) if prepare_loader else loader
    engine = ghostclip.PrivacyEngine(
        model, optimizer, loader, noise_multiplier=1.0, sampling="without_replacement", self_check=False
    )
    for number, batch in enumerate(engine.batches()):
        for rows in batch.physical():
            with accelerator.accumulate(model):
                work(accelerator, engine, rows)
                optimizer.step()
                optimizer.zero_grad()
        if number:
            return


ACCELERATE: dict[str, Callable[[], None]] = {
    "accelerator.backward": lambda: accelerated(
        lambda accelerator, engine, rows: accelerator.backward(losses(engine.model, rows).mean())
    ),
    "gradient_accumulation_steps": lambda: accelerated(
        lambda _, engine, rows: backward(engine, rows), gradient_accumulation_steps=2
    ),
    "a prepared data loader": lambda: accelerated(prepare_loader=True),
    'reduction="mean"': lambda: accelerated(
        lambda _, engine, rows: engine.backward(losses(engine.model, rows, "mean"))
    ),
}


# Lightning and Fabric.
class Module(lightning.LightningModule):
    """A small network; ``reduction`` and ``optimizers`` are the mistakes."""

    def __init__(self, reduction: str = "none", count: int = 1, net: nn.Module | None = None) -> None:
        super().__init__()
        self.net, self.reduction, self.count = network() if net is None else net, reduction, count

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return losses(self.net, batch, self.reduction)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(self.count)]


class Hooked(Module):
    """With a hook that would see gradients without noise."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Looks at gradients."""


class Manual(Module):
    """With manual optimization."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False


class Silent(Module):
    """With a training step that returns nothing."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Forgets to return."""


def fit(module: Module | None = None, private: Any = None, callbacks: Any = (), **options: Any) -> None:
    private = PrivacyCallback(noise_multiplier=1.0, sampling="without_replacement") if private is None else private
    trainer = lightning.Trainer(**{**QUIET, "max_epochs": 1, **options}, callbacks=[private, *callbacks])
    trainer.fit(Module() if module is None else module, DataLoader(data(), batch_size=BATCH, shuffle=True))


LIGHTNING: dict[str, Callable[[], None]] = {
    "a mean loss from training_step": lambda: fit(Module("mean")),
    "None from training_step": lambda: fit(Silent()),
    "gradient_clip_val": lambda: fit(gradient_clip_val=1.0),
    "accumulate_grad_batches": lambda: fit(accumulate_grad_batches=2),
    "GradientAccumulationScheduler": lambda: fit(callbacks=[GradientAccumulationScheduler({0: 2})]),
    "overfit_batches": lambda: fit(overfit_batches=2),
    "reload_dataloaders_every_n_epochs": lambda: fit(reload_dataloaders_every_n_epochs=1),
    "two optimizers": lambda: fit(Manual(count=2)),
    "on_before_optimizer_step": lambda: fit(Hooked()),
    "BatchNorm": lambda: fit(Module(net=network(nn.BatchNorm1d(6)))),
    'precision="16-true"': lambda: fit(precision="16-true"),
    "an unknown option": lambda: fit(private=PrivacyCallback(max_grad_norm=1.0)),
}


def fabric(work: Callable[[Any, Any, Any], None], prepared: bool = False) -> None:
    made = lightning.Fabric(accelerator="cpu", devices=1)
    model: Any = network()
    loader: Any = DataLoader(data(), batch_size=BATCH)
    loader = made.setup_dataloaders(loader) if prepared else loader
    options: dict[str, Any] = {"noise_multiplier": 1.0, "sampling": "without_replacement"}
    model, optimizer, engine = setup_fabric(
        made, model, torch.optim.SGD(model.parameters(), lr=0.1), loader, self_check=False, **options
    )
    for batch in engine.batches():
        for rows in batch.physical():
            work(made, engine, rows)
        optimizer.step()
        optimizer.zero_grad()


FABRIC: dict[str, Callable[[], None]] = {
    "fabric.backward": lambda: fabric(lambda made, engine, rows: made.backward(losses(engine.model, rows).mean())),
    "a loader from setup_dataloaders": lambda: fabric(lambda *_: None, prepared=True),
    'reduction="mean"': lambda: fabric(lambda _, engine, rows: engine.backward(losses(engine.model, rows, "mean"))),
}


# Trainer of transformers.
def trainer(kind: type[PrivateTrainer] = PrivateTrainer, more: Any = None, privacy: Any = None, **options: Any) -> None:
    config = GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(1, 11, (SIZE, 5))]
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(folder, **{**SILENT, "per_device_train_batch_size": BATCH, "max_steps": 1, **options})
        kind(
            model=GPT2LMHeadModel(config), args=args, train_dataset=rows,
            privacy=PrivacyArguments(**(privacy or {"noise_multiplier": 1.0})), **(more or {}),
        ).train()  # fmt: skip


class OwnLoss(PrivateTrainer):
    """With a loss for the batch."""

    def compute_loss(self, model: Any, inputs: Any, *others: Any, **options: Any) -> Any:
        return model(**inputs)["loss"]


def mean_of_tokens(model: nn.Module, inputs: Any) -> Tensor:
    return model(**inputs)["loss"]


TRAINER: dict[str, Callable[[], None]] = {
    'train_sampling_strategy="group_by_length"': lambda: trainer(train_sampling_strategy="group_by_length"),
    "auto_find_batch_size": lambda: trainer(auto_find_batch_size=True),
    "label_smoothing_factor": lambda: trainer(label_smoothing_factor=0.1),
    "torch_compile by another backend": lambda: trainer(torch_compile=True, torch_compile_backend="eager"),
    "neftune_noise_alpha": lambda: trainer(neftune_noise_alpha=5.0),
    "include_num_input_tokens_seen": lambda: trainer(include_num_input_tokens_seen=True),
    "reentrant gradient checkpointing": lambda: trainer(
        gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True}
    ),
    "compute_loss_func": lambda: trainer(more={"compute_loss_func": lambda outputs, labels, **_: outputs["loss"]}),
    "a subclass's compute_loss": lambda: trainer(OwnLoss),
    "compute_losses with a mean": lambda: trainer(more={"compute_losses": mean_of_tokens}),
    "no noise and no target": lambda: trainer(privacy={"clipping": 1.0}),
    "an unknown privacy argument": lambda: trainer(privacy={"noise_multiplier": 1.0, "max_grad_norm": 1.0}),
}


# Opacus's interface.
def like_opacus(
    work: Callable[[Any, Any, Any], None],
    model: nn.Module | None = None,
    leave_out: bool = False,
    **options: Any,
) -> None:
    module: Any = network() if model is None else model
    settings: dict[str, Any] = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, **options}
    module, optimizer, loader = opacus.PrivacyEngine().make_private(
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data_loader=DataLoader(data(), batch_size=BATCH), **settings,
    )  # fmt: skip
    for number, rows in enumerate(loader):
        work(module, optimizer, rows)
        if not leave_out:
            optimizer.step()
        optimizer.zero_grad()
        if number:
            return


def mean_backward(module: Any, optimizer: Any, rows: Any) -> None:
    losses(module, rows, "mean").backward()


OPACUS: dict[str, Callable[[], None]] = {
    "step without backward": lambda: like_opacus(lambda *_: None),
    "a batch without a step": lambda: like_opacus(mean_backward, leave_out=True),
    "a penalty on the weights": lambda: like_opacus(
        lambda module, _, rows: (losses(module, rows, "mean") + module[0].weight.square().sum()).backward()
    ),
    "optimizer.noise_multiplier = 0": lambda: like_opacus(
        lambda module, optimizer, _: setattr(optimizer, "noise_multiplier", 0.0)
    ),
    "BatchNorm": lambda: like_opacus(mean_backward, model=network(nn.BatchNorm1d(6))),
    'clipping="adaptive"': lambda: like_opacus(mean_backward, clipping="adaptive"),
    'loss_reduction="none"': lambda: like_opacus(mean_backward, loss_reduction="none"),
    'accountant="gdp"': lambda: opacus.PrivacyEngine(accountant="gdp") and None,
}  # fmt: skip


# Several processes; one of them is enough for these.
def sharded(work: Callable[[Any], Any] = lambda engine: None, children: bool = True, **options: Any) -> None:
    """An engine over a model under ``fully_shard``."""
    model = network()
    if children:
        fully_shard(model[0], **options)
    fully_shard(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    work(ghostclip.PrivacyEngine(model, optimizer, data(), batch_size=BATCH, noise_multiplier=1.0))


def sharded_in_part() -> None:
    model = network()
    fully_shard(model[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ghostclip.PrivacyEngine(model, optimizer, data(), batch_size=BATCH, noise_multiplier=1.0)


def sharded_later() -> None:
    def shards(engine: Any, rows: Any) -> None:
        fully_shard(engine.model)
        backward(engine, rows)

    own(shards)


def plain_backward(engine: Any) -> None:
    for batch in engine.batches():
        for rows in batch.physical():
            losses(engine.model, rows).mean().backward()
        step(engine)


def saved_within(engine: Any) -> None:
    next(iter(engine.batches()))
    engine.save("nowhere")


FSDP2: dict[str, Callable[[], None]] = {
    "MixedPrecisionPolicy": lambda: sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
    "CPUOffloadPolicy": lambda: sharded(offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "a part of the model sharded": sharded_in_part,
    "sharded after the engine was built": sharded_later,
    "loss.backward()": lambda: sharded(plain_backward),
    "save within a logical batch": lambda: sharded(saved_within),
    "engine.compile()": lambda: sharded(lambda engine: engine.compile()),
    "engine.trace()": lambda: sharded(lambda engine: engine.trace("nowhere")),
}


def wrapped_later() -> None:
    def averages(engine: Any, rows: Any) -> None:
        engine.backward(losses(DistributedDataParallel(engine.model), rows))

    own(averages)


DDP: dict[str, Callable[[], None]] = {
    "DistributedSampler": lambda: own_loader(sampler=DistributedSampler(data())),
    "wrapped after the engine was built": wrapped_later,
    "loss.backward()": lambda: own(
        lambda engine, rows: losses(engine.model, rows).mean().backward(),
        model=DistributedDataParallel(network()), more=step,
    ),
    'reduction="mean"': lambda: own(
        lambda engine, rows: engine.backward(losses(engine.model, rows, "mean")),
        model=DistributedDataParallel(network()),
    ),
}  # fmt: skip


MISTAKES: dict[str, dict[str, Callable[[], None]]] = {
    "a loop of one's own": OWN,
    "Accelerate": ACCELERATE,
    "Fabric": FABRIC,
    "Lightning": LIGHTNING,
    "Trainer of transformers": TRAINER,
    "Opacus's interface": OPACUS,
    "DDP": DDP,
    "FSDP2": FSDP2,
}


def refused(mistake: Callable[[], None]) -> str:
    """What a mistake is answered with; "" where it is not refused by an error that says what is wrong."""
    torch.manual_seed(0)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            mistake()
    except (GhostClipError, ValueError, TypeError, AttributeError) as error:
        return type(error).__name__
    return ""
