"""Many examples of a logical batch without a finite gradient, or all: one warning says so, and nothing else changes."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import private_runs as runs
import pytest
import torch
from ranks import on_ranks
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ghostclip.clipping import Adaptive, Custom, PerLayer
from ghostclip.engine import PrivacyEngine

SIZE = 24
EVERY = torch.ones(SIZE, dtype=torch.bool)

# From losses [B] to losses of which the chosen ones aren't finite, or have no finite gradient.
SPOILT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "nan": lambda losses, bad: losses * torch.where(bad, torch.nan, 1.0),
    "minus inf": lambda losses, bad: losses - torch.where(bad, torch.inf, 0.0),
    "overflow": lambda losses, bad: (losses + 1) * torch.where(bad, 1e30, 1.0) * torch.where(bad, 1e30, 1.0),
    "norms overflow": lambda losses, bad: losses * torch.where(bad, 1e30, 1.0),
}
POLICIES: dict[str, Any] = {
    "flat": 1.0,
    "per layer": PerLayer(1.0),
    "adaptive": Adaptive(1.0),
    "custom": Custom(lambda norms: 1 / (1 + norms), 1.0),
}
LOOPS = {"by hand": runs.train_by_hand, "engine.step": lambda engine, loss_fn: runs.train(engine, None, loss_fn)}


def losses_with(kind: str) -> Callable[[nn.Module, Any], Tensor]:
    """Losses of examples [x, y, whether they are bad]."""
    return lambda model, examples: SPOILT[kind](runs.losses_of(model, examples), examples[2])


def engine_for(bad: Tensor, **options: Any) -> PrivacyEngine:
    settings = {"noise_multiplier": 1.0, "clipping": 1.0, "max_physical_batch_size": 4, "seed": 2, "noise": "test"}
    data = TensorDataset(*runs.data(SIZE).tensors, bad)
    return runs.engine_for(runs.network(), None, data, **{**settings, **options})


def said(messages: list[str]) -> list[str]:
    return [message for message in messages if "a finite loss and gradient" in message]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", SPOILT)
@pytest.mark.one_in(16)
def test_data_without_a_finite_example_are_named_once(caplog: Any, kind: str, policy: str, loop: str) -> None:
    engine = engine_for(EVERY, clipping=POLICIES[policy])
    for _ in range(2):
        LOOPS[loop](engine, losses_with(kind))
    (message,) = said(caplog.messages)
    assert "private: not for release" in message
    assert engine.steps_taken == 6


@pytest.mark.parametrize(("bad", "told"), [(6, ""), (7, "only 17 of the 24"), (SIZE - 1, "only 1 of the 24")])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("kind", SPOILT)
@pytest.mark.one_in(16)
def test_some_finite_examples_are_counted(caplog: Any, kind: str, loop: str, first: bool, bad: int, told: str) -> None:
    """Wherever they are in the logical batch; it is said where more than a quarter is not finite."""
    places = torch.arange(SIZE) if first else torch.arange(SIZE).flip(0)
    engine = engine_for(places < bad, batch_size=SIZE)
    LOOPS[loop](engine, losses_with(kind))
    assert engine.steps_taken == 1
    assert [message.split(" examples")[0] for message in said(caplog.messages)] == ([told] if told else [])


def test_users_are_counted_where_they_are_the_units(caplog: Any) -> None:
    engine = engine_for(torch.arange(SIZE) % 3 == 1, unit_ids=torch.arange(SIZE) // 3, batch_size=8)
    runs.train(engine, None, losses_with("nan"))
    assert said(caplog.messages)[0].startswith("none of the 8 examples")


def test_empty_and_discarded_batches_are_not_named(caplog: Any) -> None:
    engine = engine_for(EVERY, batch_size=1)
    for batch in engine.batches():
        if not batch.sizes:
            engine.step(batch, losses_with("nan"))
            continue
        for examples in batch.physical():
            engine.backward(losses_with("nan")(engine.model, examples))
        batch.discard()
    assert engine.steps_taken == SIZE
    assert not said(caplog.messages)


class Kept(logging.Handler):
    """Keeps what is said, or fails with it, as a handler of the program's may."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.said, self.fails = list[str](), fails

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())
        if self.fails and said(self.said):
            self.fails = False
            raise OSError("disk full")


def test_a_warning_that_fails_costs_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for(EVERY)
    monkeypatch.setattr(logging.getLogger("ghostclip"), "handlers", [Kept(fails=True)])
    with pytest.raises(OSError, match="disk full"):
        runs.train(engine, 1, losses_with("nan"))
    engine.optimizer.zero_grad()
    runs.train(engine, 1, losses_with("nan"))
    assert engine.steps_taken == 2


def messages(bad: Tensor) -> list[str]:
    """What this rank says of a step over all examples, of which it has a half."""
    logging.getLogger("ghostclip").addHandler(kept := Kept())
    engine = engine_for(bad, batch_size=SIZE, noise_multiplier=0.0, self_check=False)
    runs.train(engine, None, losses_with("nan"))
    return said(kept.said)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("good", [None, 1])
def test_ranks_ask_each_other_before_one_of_them_says_it(good: int | None, tmp_path: Path) -> None:
    bad = EVERY if good is None else torch.arange(SIZE) % 2 != good
    leading, other = on_ranks(partial(messages, bad), tmp_path)
    assert not other
    assert [message.partition(" examples")[0] for message in leading] == [
        "none of the 24" if good is None else "only 12 of the 24"
    ]
