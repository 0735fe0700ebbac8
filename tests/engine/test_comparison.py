"""Losses and gradients that depend on other examples are refused in the first steps; no honest ones are."""

import logging
import random
from collections.abc import Callable
from typing import Any

import private_runs as runs
import pytest
import torch
from case_models import Wired
from collated import Pair
from honest_losses import HONEST, network, plain, rows
from mixing_losses import MIXING, over_their_number, own, weights_over_their_sum
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import ghostclip
from ghostclip import PrivacyEngine, VerificationError
from ghostclip.self_check import first_steps
from ghostclip.self_check.loading import LoadedRows

pytestmark = pytest.mark.filterwarnings("ignore:the DataLoader's SequentialSampler is replaced")

STEPS = 6


def engine_of(model: nn.Module, data: Any, **options: Any) -> PrivacyEngine:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    options = {"batch_size": 16, "noise_multiplier": 1.0, "clipping": 1.0, **options}
    return PrivacyEngine(model, torch.optim.SGD(trained, lr=0.1), data, **options)


def steps(engine: PrivacyEngine, loss_fn: Callable[..., Tensor], count: int = STEPS) -> None:
    """So many steps of one."""
    runs.train(engine, count - engine.steps_taken, loss_fn)


def refused(engine: PrivacyEngine, loss_fn: Callable[..., Tensor]) -> bool:
    """Whether one of the first steps is refused as it must be, with nothing released in it."""
    while engine.steps_taken < STEPS:
        before, said = runs.weights(engine.model), ""
        try:
            steps(engine, loss_fn, engine.steps_taken + 1)
        except VerificationError as error:
            said = str(error)
        if said:
            assert "examples that mix" in said
            assert torch.equal(runs.weights(engine.model), before)
            return True
    return False


# By name: dropout, how many of how many runs are refused at least, and options.
SETTINGS: dict[str, tuple[float, int, int, dict[str, Any]]] = {
    "plain": (0.0, 7, 8, {}),
    "large": (0.0, 2, 2, {"batch_size": 64}),
    "in parts": (0.0, 2, 2, {"batch_size": 24, "max_physical_batch_size": 8}),
    "dropout": (0.5, 7, 8, {}),
    "compiled": (0.0, 2, 2, {}),
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", MIXING)
@pytest.mark.one_in(32)
def test_losses_that_mix_are_refused_within_six_steps(name: str, setting: str) -> None:
    dropout, least, count, options = SETTINGS[setting]
    caught = 0
    for seed in range(count):
        torch.manual_seed(seed)
        engine = engine_of(network(dropout), rows(), **options)
        engine.compile() if setting == "compiled" else None
        caught += refused(engine, MIXING[name])
    assert caught >= least


@pytest.mark.parametrize("name", ["own", "by_hook"])
def test_gradients_are_compared_beside_a_table_that_all_examples_share(name: str, caplog: Any) -> None:
    """Measuring runs the forward on other examples, as a table of positions asks for."""
    caplog.set_level(logging.INFO, "ghostclip")
    parts = {"linear": nn.Linear(5, 8), "places": nn.Embedding(8, 1)}
    first = Wired(lambda m, x: m.linear(x) + m.places(torch.arange(8)).T, **parts)
    model = nn.Sequential(first, nn.Tanh(), nn.Linear(8, 3))
    assert refused(engine_of(model, rows()), MIXING.get(name, own)) == (name != "own")
    assert "not compared" not in caplog.text


@pytest.fixture
def every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparisons go on at every batch."""
    monkeypatch.setattr(first_steps, "SELDOM", 1)


@pytest.mark.parametrize("name", HONEST)
@pytest.mark.usefixtures("every_batch")
@pytest.mark.one_in(12)
def test_honest_losses_are_not_refused(name: str) -> None:
    for seed in range(2):
        torch.manual_seed(seed)
        model, data, loss_fn = HONEST[name]()
        steps(engine := engine_of(model, data, batch_size=16), loss_fn, 10)
        assert engine.steps_taken == 10


@pytest.mark.usefixtures("every_batch")
@pytest.mark.parametrize("loss_fn", [weights_over_their_sum, over_their_number])
def test_a_term_that_starts_later_is_refused(loss_fn: Callable[..., Tensor]) -> None:
    engine = engine_of(network(), rows())
    steps(engine, plain, 8)
    with pytest.raises(VerificationError, match="examples that mix"):
        steps(engine, loss_fn, 20)


def test_later_batches_are_drawn_as_seldom_as_is_said_and_by_no_seed_of_the_user_s() -> None:
    turns, drawn = engine_of(network(), rows())._steps._self_check, []
    batches = [runs.data() for _ in range(STEPS)]  # whatever can be referred to
    assert [turns._take_turn(batch) for batch in batches] == [True] * STEPS
    for _ in range(2):
        random.seed(0)
        drawn.append([turns._take_turn(0) for _ in range(100_000)])
    expected = 100_000 / first_steps.SELDOM
    assert abs(sum(drawn[0]) - expected) < 6 * expected**0.5
    assert drawn[0] != drawn[1]


def test_how_often_the_loss_function_is_called(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    caplog.set_level(logging.INFO, "ghostclip")
    monkeypatch.setattr(first_steps, "SELDOM", 10**9)
    engine = runs.engine_for(runs.network(), batch_size=24, max_physical_batch_size=12)
    calls: list[int] = []

    def counted(model: nn.Module, examples: list[Tensor]) -> Tensor:
        calls.append(len(examples[0]))
        return own(model, examples)

    for step in range(8):
        calls.clear()
        steps(engine, counted, step + 1)
        assert calls == [*([12, 6, 6, 12] if step < STEPS else []), *([12] if step == 0 else []), 12, 12]
    monkeypatch.setattr(first_steps, "SELDOM", 1)
    calls.clear()
    steps(engine, counted, 9)
    assert calls == [12, 6, 6, 12, 12] * 2
    assert caplog.text.count("the self-check computes losses of up to 32 examples a few times more") == 1


def test_users_rows_may_depend_on_each_other_and_on_no_other_users() -> None:
    users = [row // 3 for row in range(24)]
    data = TensorDataset(torch.randn(24, 5), torch.arange(24) % 3)

    def among_own(model: nn.Module, batch: Any) -> Tensor:
        losses = own(model, batch).view(-1, 3)
        return (losses * losses.detach().softmax(1)).flatten()

    options = {"unit_ids": users, "batch_size": 4, "max_physical_batch_size": None}
    engine = engine_of(runs.network(), data, **options)
    steps(engine, among_own)
    assert refused(engine_of(runs.network(), data, **options), weights_over_their_sum)


def test_a_loss_function_that_fails_on_small_batches_is_tried_by_exchanging_rows(caplog: Any) -> None:
    caplog.set_level(logging.INFO, "ghostclip")
    for loss_fn, mixes in ((own, False), (weights_over_their_sum, True)):

        def for_large_batches(model: nn.Module, batch: Any, loss_fn: Any = loss_fn) -> Tensor:
            if len(batch[0]) < 12:
                raise RuntimeError("too few")
            return loss_fn(model, batch)

        torch.manual_seed(0)
        engine = engine_of(network(), rows(), sampling="without_replacement")
        assert refused(engine, for_large_batches) == mixes
        assert "RuntimeError: too few" in caplog.text


def test_rows_that_are_views_are_copied_by_themselves():
    kept, rows = [], [Pair(row, 0) for row in torch.randn(1000, 8)]
    LoadedRows(rows, kept.extend, [3, 4], lambda batch: batch).load([0, 1])
    assert all(row.x.untyped_storage().nbytes() < 1000 for row in kept)


class Slots:
    __slots__ = ("x", "y")


@pytest.mark.parametrize("kind", ["arrays", "slots", "keys"])
def test_check_does_not_call_a_batch_fine_that_it_can_not_take_apart(kind):
    x, y = torch.randn(8, 5), torch.arange(8) % 3
    slots = Slots()
    slots.x, slots.y = x, y
    batch, read = {
        "arrays": ([x.numpy(), y.numpy()], lambda b: [torch.from_numpy(part) for part in b]),
        "slots": (slots, lambda b: [b.x, b.y]),
        "keys": (
            {"x": {f"row {n}": x[n] for n in range(8)}, "y": y}, lambda b: [torch.stack([*b["x"].values()]), b["y"]],
        ),
    }[kind]  # fmt: skip

    def loss_fn(model, batch):
        x, y = read(batch)
        return F.cross_entropy(model(x - x.mean(0)), y, reduction="none")

    assert ghostclip.check(nn.Linear(5, 3), loss_fn, batch)
