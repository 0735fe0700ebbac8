"""Programs against Opacus's interface, in the shapes of its examples, and the slow loop that their steps must equal."""

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import oracle
import torch
from case_models import Wired
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, TensorDataset

from ghostclip.compat.opacus import PrivacyEngine

MAX_NORM = 0.5


def names(examples: int) -> list[tuple[Tensor, Tensor]]:
    """Sequences of 2 to 7 letters, padded by `padded`, and their labels."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(2, 8, (examples,), generator=generator).tolist()
    rows = [torch.randint(1, 20, (length,), generator=generator) for length in lengths]
    return list(zip(rows, torch.randint(0, 3, (examples,), generator=generator), strict=True))


def padded(examples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return pad_sequence([row for row, _ in examples], batch_first=True), torch.stack([label for _, label in examples])


class Characters(nn.Module):
    """An embedding, a recurrent layer, and a linear layer on its last output."""

    def __init__(self, recurrent: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 6)
        self.rnn = recurrent(6, 5, num_layers=2, bidirectional=True, batch_first=True)
        self.out = nn.Linear(10, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.out(self.rnn(self.embedding(inputs))[0][:, -1])


def words(_: Any) -> nn.Module:
    """The mean of word vectors, and two linear layers."""
    return Wired(
        lambda m, inputs: m.out(torch.relu(m.hidden(m.pool(m.embedding(inputs).transpose(1, 2)).squeeze(2)))),
        embedding=nn.Embedding(20, 6), pool=nn.AdaptiveAvgPool1d(1), hidden=nn.Linear(6, 5), out=nn.Linear(5, 3),
    )  # fmt: skip


def images(_: Any) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 4, 2, padding=1), nn.ReLU(), nn.MaxPool2d(2, 1), nn.Conv2d(4, 6, 2), nn.GroupNorm(2, 6),
        nn.ReLU(), nn.Flatten(), nn.Linear(6 * 4 * 4, 8), nn.Tanh(), nn.Linear(8, 3),
    )  # fmt: skip


def pictures(examples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    labels = torch.randint(0, 3, (examples,), generator=generator)
    return TensorDataset(torch.randn(examples, 1, 12, 12, generator=generator, dtype=torch.float64), labels)


# By name: model (given the namespace of recurrent layers), data set, collate_fn.
MODELS: dict[str, tuple[Callable[[Any], nn.Module], Callable[[int], Any], Any]] = {
    "images": (images, pictures, None),
    "characters": (lambda layers: Characters(layers.DPLSTM), names, padded),
    "words": (words, names, padded),
}


def mean_loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


@dataclass
class Step:
    """One logical batch: its parts, and the parameters before and gradients at the update."""

    batches: list[Any]
    model: nn.Module
    grads: list[Tensor] = field(default_factory=list)


def train(
    loader: Iterable[Any], model: nn.Module, optimizer: Any, loss: Callable[[nn.Module, Any], Tensor]
) -> Iterator[Step]:
    """The loop of Opacus's examples over one epoch; gives each step as it was taken."""
    here = Step([], copy.deepcopy(model))
    optimizer.attach_step_hook(lambda own: here.grads.extend(p.grad.clone() for p in own.params))
    for batch in loader:
        optimizer.zero_grad()
        loss(model, batch).backward()
        here.batches.append(batch)
        optimizer.step()
        if here.grads:
            yield here
            here = Step([], copy.deepcopy(model))


def taken(optimizer: Any, model: nn.Module, batch: Any, backward: Callable[[], Any]) -> Step:
    """One step, whose gradients ``backward`` forms of one batch; ``batch`` has examples in the first dimension."""
    here = Step([batch], copy.deepcopy(model))
    optimizer.attach_step_hook(lambda own: here.grads.extend(p.grad.clone() for p in own.params))
    backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return here


def row_of(batch: Any, row: int) -> Any:
    """One example of a batch: a mapping of tensors, or a sequence of them."""
    if hasattr(batch, "items"):
        return {name: part[row : row + 1] for name, part in batch.items()}
    return [part[row : row + 1] for part in batch]


def by_hand(step: Step, loss: Callable[[nn.Module, Any], Tensor], denominator: float, max_norm: float) -> list[Tensor]:
    """The clipped sum over ``denominator``, by one backward for each example."""
    total = [torch.zeros_like(parameter) for parameter in step.model.parameters() if parameter.requires_grad]
    for batch in step.batches:
        examples = len(next(iter(batch.values() if hasattr(batch, "items") else batch)))
        losses = [loss(step.model, row_of(batch, row)) for row in range(examples)]
        if losses:
            found = oracle.clipped_sum(oracle.grads_of_single_losses(step.model, torch.stack(losses)), max_norm)
            total = [before + more for before, more in zip(total, found.values(), strict=True)]
    return [each / denominator for each in total]


def assert_by_hand(step: Step, loss: Callable[[nn.Module, Any], Tensor], denominator: float) -> None:
    torch.testing.assert_close(step.grads, by_hand(step, loss, denominator, MAX_NORM), rtol=1e-9, atol=1e-12)


def private(engine: Any, name: str, layers: Any, batch_size: int = 8, **options: Any) -> Any:
    """What an engine makes of the named program, in float64, without noise unless asked for or for a target."""
    torch.manual_seed(0)
    build, data, collate = MODELS[name]
    model = build(layers).double()
    loader = DataLoader(data(40), batch_size=batch_size, collate_fn=collate)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    given = {"module": model, "optimizer": optimizer, "data_loader": loader, "max_grad_norm": MAX_NORM, **options}
    if "target_epsilon" in options:
        return engine.make_private_with_epsilon(**given)
    return engine.make_private(**{"noise_multiplier": 0.0, **given})


def small(model: nn.Module, data: Any = None, batch_size: int = 6, engine: Any = None, **options: Any) -> Any:
    """Training without noise, in float64 and by default on twelve examples of five numbers and of five classes."""
    model = model.double()
    optimizer = options.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(12, 5, dtype=torch.float64), torch.arange(12) % 5) if data is None else data
    return (engine or PrivacyEngine()).make_private(
        module=model, optimizer=optimizer,
        data_loader=DataLoader(data, batch_size=batch_size, collate_fn=options.pop("collate_fn", None)),
        **{"noise_multiplier": 0.0, "max_grad_norm": MAX_NORM, **options},
    )  # fmt: skip
