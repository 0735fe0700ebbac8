"""Small private runs for the engine's tests: models, data, and a training loop."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import oracle
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from ghostclip.engine import PrivacyEngine, StepRecord

HUGE = 1e9


def data(size: int = 24, dtype: torch.dtype = torch.float32) -> TensorDataset:
    """Examples of five features and one of three classes."""
    return TensorDataset(torch.randn(size, 5, dtype=dtype), torch.arange(size) % 3)


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """The same small network each time."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def losses_of(model: nn.Module, examples: list[Tensor]) -> Tensor:
    return F.cross_entropy(model(examples[0]), examples[1], reduction="none")


def engine_for(model: nn.Module, optimizer: Any = None, dataset: Any = None, **changes: Any) -> PrivacyEngine:
    """An engine without noise or effective clipping, but for what ``changes`` say."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5) if optimizer is None else optimizer
    options: dict[str, Any] = {"batch_size": 8, "noise_multiplier": 0.0, "clipping": HUGE, **changes}
    return PrivacyEngine(model, optimizer, data() if dataset is None else dataset, **options)


def nonempty(engine: PrivacyEngine) -> Iterator[Any]:
    """Logical batches of at least two physical ones, without end; of others nothing is charged."""
    while True:
        for batch in engine.batches():
            if len(batch.sizes) > 1:
                yield batch
            else:
                leave(engine)


def clipped_sum(model: nn.Module, batches: Iterable[Any], max_norm: float) -> list[Tensor]:
    """The slow loop: each example's gradient by itself, clipped, added up."""
    ones = [[x[None], y[None]] for inputs, targets in batches for x, y in zip(inputs, targets, strict=True)]
    if not ones:
        return [torch.zeros_like(p) for p in model.parameters()]
    losses = torch.cat([losses_of(model, one) for one in ones])
    return list(oracle.clipped_sum(oracle.grads_of_single_losses(model, losses), max_norm).values())


def leave(engine: PrivacyEngine) -> None:
    """Ends the logical batch that was handed out last, as an exception in a step would."""
    engine._steps.abandon(KeyboardInterrupt())


def gather(engine: PrivacyEngine, batch: Any) -> list[Any]:
    """Every physical batch of one logical batch, forward and backward; returns them."""
    seen = []
    for examples in batch.physical():
        engine.backward(losses_of(engine.model, examples))
        seen.append(examples)
    return seen


def train(engine, steps=None, loss_fn=losses_of, after=lambda: None):
    """So many steps by engine.step, or an epoch of them; what they returned."""
    found: list[StepRecord] = []
    while steps != len(found):
        for batch in engine.batches():
            found.append(engine.step(batch, loss_fn))
            after()
            if len(found) == steps:
                return found
        if steps is None:
            return found
    return found


def train_by_hand(engine: PrivacyEngine, loss_fn: Any = losses_of, between: Callable[[], Any] = lambda: None) -> None:
    """An epoch of the loop that users write out; ``between`` comes after each backward."""
    for batch in engine.batches():
        for examples in batch.physical():
            engine.backward(loss_fn(engine.model, examples))
            between()
        engine.optimizer.step()
        engine.optimizer.zero_grad()


def train_by_closure(engine: PrivacyEngine, between: Callable[[], Any] = lambda: None, keyword: bool = False) -> None:
    """The same by closures, which the optimizer's steps call."""
    for batch in engine.batches():

        def closure(batch: Any = batch) -> float:
            engine.optimizer.zero_grad()
            for examples in batch.physical():
                engine.backward(losses_of(engine.model, examples))
                between()
            return 7.0

        assert (engine.optimizer.step(closure=closure) if keyword else engine.optimizer.step(closure)) == 7.0
        engine.optimizer.zero_grad()


def grads(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def on_step(optimizer: torch.optim.Optimizer, note: Callable[[], None]) -> None:
    """Calls ``note`` after the engine's hook has worked and before the parameters change."""
    optimizer.register_step_pre_hook(lambda *_: note())


def plain_backward(model: nn.Module) -> None:
    """The gradient of a mean loss, as in training that is not private."""
    dtype = next(model.parameters()).dtype
    losses_of(model, data(dtype=dtype)[:4]).mean().backward()


def assert_refused(engine, error, message, call=None):
    """``call`` (optimizer.step) raises, moves no parameter and charges nothing; then training goes on."""
    before, charged = weights(engine.model), engine.steps_taken
    with pytest.raises(error, match=message) as raised:
        (call or engine.optimizer.step)()
    assert torch.equal(weights(engine.model), before)
    assert engine.steps_taken == charged
    engine.optimizer.zero_grad()
    engine.step(next(nonempty(engine)), losses_of)
    assert engine.steps_taken == charged + 1
    return raised
