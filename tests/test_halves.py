"""Large batches of images in two halves: the same sums from less memory, and only where nothing tells them apart."""

from collections.abc import Callable
from typing import Any

import private_runs as runs
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ghostclip import GhostClipper, clipping, halves, regroup
from ghostclip.engine import comparison
from ghostclip.errors import UnsupportedModelError

EXAMPLES, MAX_NORM = 65, 0.05
Batch = tuple[Tensor, Tensor]


@pytest.fixture(autouse=True)
def small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of small images count as large ones."""
    monkeypatch.setattr(halves, "IMAGE_BYTES", 0)
    monkeypatch.setattr(halves, "LEAST_DATA", 0)


def network(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Dropout(dropout), nn.Linear(32, 3)]
    return nn.Sequential(*layers).double()


def batch(examples: int = EXAMPLES) -> Batch:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(examples, 1, 8, 8, generator=generator, dtype=torch.float64)
    return images, torch.arange(examples) % 3


def losses(model: nn.Module, examples: Batch) -> Tensor:
    return F.cross_entropy(model(examples[0]), examples[1], reduction="none")


def sizes_seen(clipper: GhostClipper, loss_fn: Callable[..., Tensor] = losses, examples: Any = None) -> list[int]:
    """Of the batches a loss function is given, in the second of two clips."""
    seen: list[int] = []

    def watched(model: nn.Module, examples: Batch) -> Tensor:
        seen.append(len(examples[0]))
        return loss_fn(model, examples)

    for _ in range(2):
        seen.clear()
        clipper.model.zero_grad()
        clipper.clip(watched, batch() if examples is None else examples)
    return [size for size in seen if size > halves.FEW]


@pytest.mark.parametrize("policy", [clipping.Flat(MAX_NORM), clipping.Automatic(MAX_NORM)], ids=["flat", "automatic"])
def test_halves_give_what_the_whole_gives(policy: clipping.Flat) -> None:
    parted, other = GhostClipper(network(), policy), GhostClipper(network(), policy)
    for _ in range(2):
        found, expected = parted.clip(losses, batch()), other.backward(losses(other.model, batch()))
    assert sizes_seen(GhostClipper(network(), policy)) == [32, 33]
    assert "in two halves" in str(parted.explain())
    torch.testing.assert_close(found.norms, expected.norms, rtol=1e-10, atol=0)
    torch.testing.assert_close(found.weights, expected.weights, rtol=1e-10, atol=0)
    torch.testing.assert_close(found.losses, losses(other.model, batch()).detach())
    for mine, theirs in zip(parted.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-14)


def test_an_example_that_is_not_finite_is_left_out_of_its_half() -> None:
    images, targets = batch()
    images[40] = torch.inf
    clipper = GhostClipper(network(), MAX_NORM)
    result = clipper.clip(losses, (images, targets))
    assert clipper._halves.function is not None
    assert result.weights.count_nonzero() == EXAMPLES - 1
    assert result.weights[40] == 0
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in clipper.model.parameters())


@pytest.mark.parametrize(
    "options",
    [{"second_pass": "cached"}, {"clipping": clipping.PerLayer(max_norm=MAX_NORM)},
     {"clipping": clipping.Custom(torch.ones_like, MAX_NORM)}],
    ids=["cached", "per layer", "custom"],
)  # fmt: skip
def test_what_gains_nothing_or_weighs_jointly_comes_whole(options: dict[str, Any]) -> None:
    assert sizes_seen(GhostClipper(network(), **{"clipping": MAX_NORM, **options})) == [EXAMPLES]


def test_hooks_on_gradients_see_one_backward_a_batch() -> None:
    model = network()
    model[0].weight.register_hook(lambda grad: None)
    assert sizes_seen(GhostClipper(model, MAX_NORM)) == [EXAMPLES]


def test_small_batches_and_linear_networks_come_whole() -> None:
    assert sizes_seen(GhostClipper(network(), MAX_NORM), examples=batch(63)) == [63]
    linear = nn.Sequential(nn.Flatten(), nn.Linear(64, 3)).double()
    assert sizes_seen(GhostClipper(linear, MAX_NORM)) == [EXAMPLES]


def test_losses_that_depend_on_how_many_there_are_come_whole() -> None:
    def divided(model: nn.Module, examples: Batch) -> Tensor:
        return losses(model, examples) / len(examples[1])

    assert sizes_seen(GhostClipper(network(), MAX_NORM), divided) == [EXAMPLES]


def test_losses_that_depend_on_where_examples_stand_come_whole() -> None:
    weights = torch.arange(1.0, EXAMPLES + 1.0, dtype=torch.float64)

    def weighed(model: nn.Module, examples: Batch) -> Tensor:
        return weights[: len(examples[1])] * losses(model, examples)

    assert sizes_seen(GhostClipper(network(), MAX_NORM), weighed) == [EXAMPLES]


def test_a_loss_function_of_one_size_is_left_alone() -> None:
    def picky(model: nn.Module, examples: Batch) -> Tensor:
        return F.cross_entropy(model(examples[0].view(EXAMPLES, 1, 8, 8)), examples[1], reduction="none")

    assert sizes_seen(GhostClipper(network(), MAX_NORM), picky) == [EXAMPLES]


def test_another_loss_function_than_the_rehearsed_one_comes_whole() -> None:
    clipper = GhostClipper(network(), MAX_NORM)
    clipper.clip(losses, batch())
    assert clipper.comes_whole(lambda model, examples: losses(model, examples), batch())
    assert not clipper.comes_whole(losses, batch())


def test_a_loss_function_of_other_settings_comes_whole() -> None:
    def made(mean: bool) -> Callable[[nn.Module, Batch], Tensor]:
        return lambda model, examples: losses(model, examples) / (len(examples[1]) if mean else 1)

    clipper = GhostClipper(network(), MAX_NORM)
    clipper.clip(made(mean=False), batch())
    assert not clipper.comes_whole(made(mean=False), batch())
    assert clipper.comes_whole(made(mean=True), batch())


def test_a_rehearsal_leaves_random_numbers_and_buffers_as_they_were() -> None:
    model = network(dropout=0.5)
    clipper = GhostClipper(model, clipping.PerLayer(max_norm=MAX_NORM))
    torch.manual_seed(3)
    expected = losses(model, batch()).detach()
    torch.manual_seed(3)
    assert torch.equal(clipper.clip(losses, batch()).losses, expected)


def test_a_failure_in_the_second_half_leaves_the_gradients_as_they_were() -> None:
    clipper = GhostClipper(network(), MAX_NORM)
    clipper.clip(losses, batch())
    before = [(p.grad, p.grad._version, p.grad.clone()) for p in clipper.model.parameters() if p.grad is not None]
    function = clipper._halves.function
    failing = {33}

    def fails(*_: Any) -> None:
        raise MemoryError

    handle = clipper.model.register_forward_pre_hook(lambda _, given: fails() if len(given[0]) in failing else None)
    with pytest.raises(MemoryError):
        clipper.clip(losses, batch())
    handle.remove()
    assert clipper._halves.function == function
    for parameter, (grad, version, value) in zip(clipper.model.parameters(), before, strict=True):
        assert parameter.grad is grad
        assert grad._version == version
        assert torch.equal(grad, value)
    clipper.clip(losses, batch())


def test_engine_steps_on_halves_and_checks_the_whole_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "SELDOM", 10**9)
    model, seen = network(), list[int]()
    dataset = torch.utils.data.TensorDataset(*batch(130))

    def watched(model: nn.Module, examples: Batch) -> Tensor:
        seen.append(len(examples[0]))
        return losses(model, examples)

    engine = runs.engine_for(
        model, dataset=dataset, batch_size=65, sampling="without_replacement", noise="test", seed=1
    )
    while engine.steps_taken < comparison.STEPS + 2:
        for logical in engine.batches():
            seen.clear()
            record = engine.step(logical, watched)
            assert record.norms.shape == record.losses.shape == (65,)
            assert seen[-2:] == [32, 33]
            assert (65 in seen) == (engine.steps_taken <= comparison.STEPS)
    assert seen == [32, 33]


def test_what_a_rehearsal_proved_is_not_proved_again_on_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    proved: list[int] = []
    original = regroup.majors_of
    monkeypatch.setattr(regroup, "majors_of", lambda losses, *a: (proved.append(len(losses)), original(losses, *a))[1])
    clipper = GhostClipper(network(), clipping.PerLayer(max_norm=MAX_NORM))
    for _ in range(3):
        clipper.clip(losses, batch())
    assert proved == [halves.FEW]


@pytest.mark.parametrize("way", [{}, {"second_pass": "cached"}, {"clipping": clipping.PerLayer(max_norm=MAX_NORM)}])
@pytest.mark.parametrize("unseen", [0, halves.FEW], ids=["seen", "unseen"])
def test_examples_that_mix_are_refused_on_every_large_batch(way: dict[str, Any], unseen: int) -> None:
    """A rehearsal that fails, or whose examples have no gradient, is no proof of the batch that follows."""
    model = network()
    model[1].register_forward_hook(lambda _, given, output: output - output.mean(0))
    present = (torch.arange(EXAMPLES) >= unseen).double()
    clipper = GhostClipper(model, **{"clipping": MAX_NORM, **way})
    for _ in range(4):
        with pytest.raises(UnsupportedModelError, match="mix"):
            clipper.clip(lambda model, examples: losses(model, examples[:2]) * examples[2], (*batch(), present))
    assert all(parameter.grad is None for parameter in model.parameters())


class Faint(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 1e-6


def test_faint_gradients_are_proved_where_nothing_cancels(monkeypatch: pytest.MonkeyPatch) -> None:
    proved: list[int] = []
    original = regroup.majors_of
    monkeypatch.setattr(regroup, "majors_of", lambda losses, *a: (proved.append(len(losses)), original(losses, *a))[1])
    model = network().float()
    model.insert(1, Faint())
    clipper = GhostClipper(model, clipping.PerLayer(max_norm=MAX_NORM))
    images, targets = batch()
    for _ in range(3):
        clipper.clip(losses, (images.float(), targets))
    assert proved == [halves.FEW]
