"""Memory that runs out: the batch is divided, or discarded uncharged with an error that says what to do."""

from collections import UserDict
from collections.abc import Callable
from typing import Any, NamedTuple

import private_runs as runs
import pytest
import torch
from case_models import Wired
from checked_training import NORM, small_engine
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ghostclip.clipping import Adaptive, PerLayer
from ghostclip.engine import PrivacyEngine
from ghostclip.engine.micro_batching import slice_rows


def no_memory(*_: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class Fragile(torch.autograd.Function):
    """The identity, whose backward fails when a budget of backwards of large batches is spent."""

    left = 0

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        Fragile.left -= len(grad) > 2
        return no_memory() if len(grad) > 2 and Fragile.left < 0 else grad


def trained(left: int, dtype: torch.dtype = torch.float32, **changes: Any) -> PrivacyEngine:
    """An engine after three steps, with so many large backwards to go before memory runs out."""
    Fragile.left = left
    torch.manual_seed(2)
    options = {"noise": "test", "seed": 4, "noise_multiplier": 1.0, **changes}
    engine = small_engine(dtype, **options)
    engine.model.register_module("1", Wired(lambda m, x: Fragile.apply(x.tanh())))
    runs.train(engine, 3)
    return engine


@pytest.mark.parametrize(
    "changes",
    [
        {"second_pass": "reweight"},
        {"second_pass": "cached"},
        {"dtype": torch.bfloat16},
        {"clipping": PerLayer(NORM)},
        {"max_physical_batch_size": None},
        {"unit_ids": [row // 2 for row in range(24)], "batch_size": 4},
    ],
    ids=str,
)
@pytest.mark.parametrize("left", [0, 3])
@pytest.mark.one_in(2)
def test_a_divided_batch_gives_the_same_step_with_one_draw_and_one_charge(left: int, changes: dict[str, Any]) -> None:
    whole, divided = (trained(budget, **changes) for budget in (10**6, left))
    near = 1e-2 if changes.get("dtype") == torch.bfloat16 else 1e-6
    torch.testing.assert_close(runs.weights(divided.model), runs.weights(whole.model), atol=near, rtol=10 * near)
    assert divided.steps_taken == whole.steps_taken == 3
    assert divided._snapshots.noise.positions() == whole._snapshots.noise.positions()
    assert divided._steps.micro_batches.most is not None


def test_a_divided_batch_is_counted_once_by_an_adaptive_norm() -> None:
    whole, divided = (trained(budget, clipping=Adaptive(NORM)).clipping.max_norm for budget in (10**6, 1))
    assert whole == pytest.approx(divided, rel=1e-9)
    assert whole != NORM


@pytest.mark.parametrize(("place", "name"), [("release", "saw"), ("_sums", "drop_gradients")])
def test_memory_that_runs_out_after_sums_were_added_ends_the_batch(place, name, monkeypatch):
    """The piece doesn't come again: its examples would count twice, or those of earlier pieces not at all."""
    engine = small_engine(max_physical_batch_size=None, batch_size=24)
    engine._steps.micro_batches.most = 4
    before, owner, failures = runs.weights(engine.model), getattr(engine._steps, place), [no_memory]
    plain = getattr(owner, name)
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, lambda *args: (failures.pop() if failures else plain)(*args))
        with pytest.raises(torch.OutOfMemoryError):
            runs.train(engine, 1)
    assert engine.steps_taken == 0
    assert torch.equal(runs.weights(engine.model), before)


def none_for_python(*_: Any) -> Any:
    raise MemoryError


@pytest.mark.parametrize("fail", [no_memory, none_for_python, lambda: torch.empty(2**50)])
def test_what_fits_is_remembered_and_logged(fail: Callable[[], Any], caplog: pytest.LogCaptureFixture) -> None:
    tried: list[int] = []

    def losses_of(model: nn.Module, examples: list[Tensor]) -> Tensor:
        tried.append(len(examples[1]))
        return fail() if tried[-1] > 3 else runs.losses_of(model, examples)

    engine = small_engine(max_physical_batch_size=None, batch_size=24)
    (record,) = runs.train(engine, loss_fn=losses_of)
    assert tried == [24, 12, 6, *[3] * 8]
    assert len(record.losses) == len(record.norms) == 24
    assert "memory ran out with 24 examples in a physical batch" in caplog.text
    assert "max_physical_batch_size=3 would save the attempt" in caplog.text
    runs.train(engine, loss_fn=losses_of)
    assert max(tried[11:]) == 3


@pytest.mark.parametrize(
    ("labels_of", "message"),
    [
        (lambda rows: [int(y) for _, y in rows], "divided: it holds something of type int.*smaller max_physical_batch"),
        (lambda rows: torch.tensor(3), r"can't be divided: it holds a tensor of shape \[\]"),
        (None, "with 1 example in a physical batch, which can't be divided"),
    ],
)
@pytest.mark.filterwarnings("ignore:the DataLoader's")
def test_what_can_t_be_divided_says_so_and_is_discarded(labels_of: Any, message: str) -> None:
    collate = lambda rows: (torch.stack([x for x, _ in rows]), labels_of(rows))  # noqa: E731
    engine = small_engine(data=DataLoader(runs.data(), 8, collate_fn=collate)) if labels_of else small_engine()
    before = runs.weights(engine.model)
    with pytest.raises(torch.OutOfMemoryError, match=message):
        engine.step(next(runs.nonempty(engine)), no_memory)
    assert torch.equal(runs.weights(engine.model), before)
    assert engine.steps_taken == 0
    engine.step(next(runs.nonempty(engine)), lambda model, examples: model(examples[0]).square().sum(1))
    assert engine.steps_taken == 1


class Pair(NamedTuple):
    left: Tensor
    right: Any


def test_rows_are_taken_from_any_nesting() -> None:
    numbers = torch.arange(12).view(6, 2)
    found = slice_rows(UserDict(a=[numbers, (numbers, None)], b=Pair(numbers, numbers[:, 0])), 6, 2, 4)
    assert type(found) is UserDict
    assert type(found["b"]) is Pair
    for part in (found["a"][0], found["a"][1][0], found["b"].left):
        assert torch.equal(part, numbers[2:4])
    assert found["b"].right.tolist() == [4, 6]
    for wrong in (numbers[:5], torch.tensor(1), ["a"], {"x": 3}, Pair(numbers, "text"), numbers.to_sparse()):
        with pytest.raises(TypeError, match=r"it holds (a tensor|something)"):
            slice_rows(wrong, 6, 2, 4)


def test_other_errors_are_not_tried_again() -> None:
    tried: list[int] = []

    def losses_of(model: nn.Module, examples: Any) -> Tensor:
        tried.append(1)
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    engine = small_engine()
    with pytest.raises(RuntimeError, match="mat1"):
        engine.step(next(runs.nonempty(engine)), losses_of)
    assert tried == [1]
