"""Programs written for Opacus: a plain loss.backward() clips, charges and steps as losses [B] do."""

import math
from typing import Any

import pytest
import torch
from case_models import Wired
from opacus_programs import MAX_NORM, MODELS, assert_by_hand, mean_loss, private, small, taken, train
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ghostclip import LossShapeError
from ghostclip.compat.opacus import BatchMemoryManager, PrivacyEngine, layers
from ghostclip.events import FixedSizeGaussian
from ghostclip.sampling.schemes import Poisson

one_size = pytest.mark.filterwarnings("ignore:the DataLoader's .* is replaced")


@pytest.fixture
def five(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of five examples each."""
    monkeypatch.setattr(Poisson, "count", lambda *_: 5)


def summed_loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")


@pytest.mark.parametrize(
    ("name", "loss", "denominator"), [*((name, mean_loss, 8) for name in MODELS), ("images", summed_loss, 1)]
)
def test_a_loss_run_backward_is_clipped_example_by_example(name: str, loss: Any, denominator: int) -> None:
    options = {"loss_reduction": "sum"} if denominator == 1 else {}
    model, optimizer, loader = private(PrivacyEngine(), name, layers, **options)
    steps = list(train(loader, model, optimizer, loss))
    assert len(steps) == len(loader) == 5
    for step in steps:
        assert_by_hand(step, loss, denominator)


def test_clipping_by_parameter() -> None:
    norms = [0.1 * (place + 1) for place in range(10)]
    model, optimizer, loader = private(PrivacyEngine(), "images", layers, clipping="per_layer", max_grad_norm=norms)
    assert optimizer.max_grad_norm == pytest.approx(float(torch.tensor(norms).norm()))
    for step in train(loader, model, optimizer, mean_loss):
        for place, parameter in enumerate(step.model.parameters()):
            for other in step.model.parameters():
                other.requires_grad_(other is parameter)
            alone = [torch.autograd.grad(mean_loss(step.model, [p[i : i + 1] for p in step.batches[0]]), parameter)[0]
                     for i in range(len(step.batches[0][0]))]  # fmt: skip
            clipped = sum(each * min(1.0, norms[place] / float(each.norm())) for each in alone)
            expected = clipped / optimizer.expected_batch_size
            torch.testing.assert_close(step.grads[place], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["images", "characters"])
def test_batch_memory_manager_steps_once_for_all_parts(name: str) -> None:
    model, optimizer, loader = private(PrivacyEngine(), name, layers, batch_size=20)
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=6, optimizer=optimizer) as parts:
        assert len(parts) == 7
        steps = list(train(parts, model, optimizer, mean_loss))
    assert len(steps) == 2
    for step in steps:
        assert max(len(batch[0]) for batch in step.batches) <= 6 < sum(len(batch[0]) for batch in step.batches)
        assert_by_hand(step, mean_loss, 20)


def test_what_runs_backward_twice_is_added_up_before_clipping() -> None:
    model, optimizer, loader = private(PrivacyEngine(), "images", layers)
    x, y = batch = next(iter(loader))

    def backward() -> None:
        outputs = model(x)
        nn.functional.cross_entropy(outputs, y).backward(retain_graph=True)
        outputs.mean().backward()

    step = taken(optimizer, model, batch, backward)
    assert_by_hand(step, lambda model, batch: mean_loss(model, batch) + model(batch[0]).mean(), 8)


@pytest.mark.parametrize("of", ["optimizer", "model"])
def test_zero_grad_forgets_what_ran_backward(of: str) -> None:
    engine = PrivacyEngine()
    model, optimizer, loader = private(engine, "words", layers)
    batch = next(iter(loader))

    def backward() -> None:
        (-100 * mean_loss(model, batch)).backward()
        loss = mean_loss(model, batch)
        {"optimizer": optimizer, "model": model}[of].zero_grad()
        loss.backward()

    assert_by_hand(taken(optimizer, model, batch, backward), mean_loss, 8)
    engine.detach()
    assert engine.accountant.history == [(0.0, 0.2, 1)]
    assert "zero_grad" not in vars(model)
    model.zero_grad()
    mean_loss(model, batch).backward()
    expected = [p.detach() - 0.5 * p.grad for p in model.parameters()]
    optimizer.step()  # which is not private any more
    assert all(map(torch.equal, model.parameters(), expected))


def gan_loss(model: nn.Module, batch: Any) -> Tensor:
    real, made = (model(part).squeeze(1) for part in batch)
    judge = nn.functional.binary_cross_entropy
    return judge(real, torch.ones_like(real)) + judge(made, torch.zeros_like(made))


@pytest.mark.parametrize("first", ["discriminator", "generator"])
def test_a_discriminator_is_private_and_its_generator_learns_through_it(first: str) -> None:
    generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 6)).double()
    judge = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2, inplace=True), nn.Linear(8, 1), nn.Sigmoid()).double()
    data = TensorDataset(torch.randn(40, 6, dtype=torch.float64))
    model, optimizer, loader = small(judge, data, 8)
    other = torch.optim.SGD(generator.parameters(), lr=0.5)

    def train_generator(made: Tensor) -> None:
        # What the discriminator's graph should give, from a copy without hooks.
        wanted = torch.autograd.grad(-plain(made).log().mean(), list(generator.parameters()), retain_graph=True)
        other.zero_grad()
        (-model(made).log().mean()).backward()
        torch.testing.assert_close([p.grad for p in generator.parameters()], list(wanted), rtol=1e-9, atol=1e-12)
        other.step()

    for (real,) in loader:
        plain, made = nn.Sequential(*model), generator(torch.randn(len(real), 3).double())
        if first == "generator":
            train_generator(generator(torch.randn(len(real), 3).double()))
        optimizer.zero_grad(set_to_none=True)
        batch = [real, made.detach()]
        step = taken(optimizer, model, batch, lambda batch=batch: gan_loss(model, batch).backward())
        assert_by_hand(step, gan_loss, optimizer.expected_batch_size)
        if first == "discriminator":
            train_generator(made)
            optimizer.zero_grad()


def sequences(mean: bool, sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Module, Any, Any]:
    """Takes [T, B, 3] and returns [T, B, 2], or the mean over time [B, 7]; batches have these sizes."""
    torch.manual_seed(5)
    counts = iter(sizes)
    monkeypatch.setattr(Poisson, "count", lambda *_: next(counts))
    model = Wired(
        lambda m, x: m.out(m.rnn(x)[0]).mean(0) if mean else m.out(m.rnn(x)[0]),
        rnn=nn.RNN(3, 5), out=nn.Linear(5, 7 if mean else 2),
    )  # fmt: skip
    data = TensorDataset(torch.randn(30, 4, 3, dtype=torch.float64))
    return small(model, data, 10, batch_first=False, collate_fn=lambda rows: torch.stack([row[0] for row in rows], 1))


def squares(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0].transpose(0, 1)).square().mean()


@pytest.mark.parametrize("mean", [False, True])
def test_outputs_as_wide_as_a_batch_is_large_are_read_by_their_examples(
    mean: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer, loader = sequences(mean, [9, 7, 7], monkeypatch)
    for number, inputs in enumerate(loader):
        lost = 3 if number == 2 else None  # an example with a loss that isn't finite
        if lost is not None:
            inputs[:, lost] = math.nan
        left = [row for row in range(inputs.shape[1]) if row != lost]
        batch = [inputs.transpose(0, 1)[left]]
        step = taken(optimizer, model, batch, lambda inputs=inputs: model(inputs).square().mean().backward())
        assert_by_hand(step, squares, 10)


def test_outputs_that_do_not_show_their_examples_are_refused_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, loader = sequences(True, [7], monkeypatch)
    model(next(iter(loader))).square().mean().backward()
    with pytest.raises(LossShapeError, match=r"doesn't show which dimension holds them; begin with a batch of another"):
        optimizer.step()


def classified(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize("table", [False, True])
@pytest.mark.usefixtures("five")
def test_an_output_of_the_batch_s_size_without_a_row_for_each_example_is_refused(table: bool) -> None:
    """Features of the examples, and a vector for each class."""
    classes = nn.Embedding(5, 4) if table else nn.ParameterList([torch.zeros(5, 4)])
    prototypes = Wired(
        lambda m, x: (m.features(x), m.classes(torch.arange(5)) if table else m.classes[0]),
        features=nn.Linear(5, 4), classes=classes,
    )  # fmt: skip
    model, optimizer, loader = small(prototypes)
    inputs, targets = next(iter(loader))
    features, vectors = model(inputs)
    nn.functional.cross_entropy(features @ vectors.T, targets).backward()
    with pytest.raises(LossShapeError, match=r"shape \[5, 4\] for one example less than 5, too"):
        optimizer.step()


@one_size
def test_a_forward_of_public_rows_as_many_as_a_batch_has_is_refused_in_the_first_one() -> None:
    model, optimizer, loader = small(nn.Linear(5, 4), poisson_sampling=False)
    inputs, targets = next(iter(loader))
    nn.functional.cross_entropy(model(inputs) @ model(torch.randn(6, 5).double()).T, targets).backward()
    with pytest.raises(LossShapeError, match=r"shape \[6, 4\], but the physical batch has [1-5] examples"):
        optimizer.step()


@one_size
def test_a_batch_cut_into_slices_by_hand_is_refused_and_the_error_names_the_batch_memory_manager() -> None:
    model, optimizer, loader = small(nn.Linear(5, 5), poisson_sampling=False)
    inputs, targets = next(iter(loader))
    nn.functional.cross_entropy(model(inputs[1:]), targets[1:]).backward()
    optimizer.signal_skip_step(do_skip=True)
    with pytest.raises(LossShapeError, match="use BatchMemoryManager in place of slices"):
        optimizer.step()


@pytest.mark.parametrize("secure", [False, True])
@one_size
def test_batches_of_one_size_are_charged_as_such_and_have_some_examples_less_now_and_then(secure: bool) -> None:
    engine = PrivacyEngine(secure_mode=secure)
    model, optimizer, loader = small(nn.Linear(5, 5), engine=engine, poisson_sampling=False, noise_multiplier=1.0)
    sizes = []
    for _ in range(9):
        for batch in loader:
            sizes.append(len(batch[0]))
            optimizer.zero_grad()
            classified(model, batch).backward()
            optimizer.step()
    assert len(sizes) == 18
    assert [step for step, size in enumerate(sizes) if size < 6] == [0, 16]
    assert min(sizes) >= 1
    assert loader.batch_size == 6
    (event,) = engine.accountant.events
    assert (type(event), event.sample_rate, event.count) == (FixedSizeGaussian, 0.5, 18)


def test_an_empty_batch_is_a_step_of_noise_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Poisson, "count", lambda *_: 0)
    model, optimizer, loader = small(nn.Linear(5, 500), noise_multiplier=2.0)
    batch = next(iter(loader))
    assert [(part.shape, part.dtype) for part in batch] == [((0, 5), torch.float64), ((0,), torch.int64)]
    step = taken(optimizer, model, batch, lambda: classified(model, batch).backward())
    assert float(6 * step.grads[0].std()) == pytest.approx(2.0 * MAX_NORM, rel=0.05)


# Outputs of a model, how many examples are drawn, and the loss.
SHAPES: dict[str, Any] = {
    "a class whose score is infinite": (
        lambda m, x: m.out(x).masked_fill(torch.arange(6) == 5, -math.inf), 5, classified,
    ),
    "a number, squeezed in a batch of one row": (
        lambda m, x: m.out(x)[:, :1].squeeze(), 1, lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_outputs_whose_values_or_shapes_are_unusual(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wiring, count, loss = SHAPES[name]
    monkeypatch.setattr(Poisson, "count", lambda *_: count)
    model, optimizer, loader = small(Wired(wiring, out=nn.Linear(5, 6)))
    batch = next(iter(loader))
    step = taken(optimizer, model, batch, lambda: loss(model, batch).backward())
    assert float(step.grads[0].norm()) > 0
    assert_by_hand(step, loss, 6)


@pytest.mark.parametrize("way", ["torch.autograd.grad", "inputs="])
@pytest.mark.usefixtures("five")
def test_gradients_of_the_inputs_alone_do_not_count(way: str) -> None:
    """As of an attack on the inputs, on which the model is trained then."""
    model, optimizer, loader = small(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 5)))
    inputs, targets = next(iter(loader))
    given = inputs.clone().requires_grad_()
    loss = classified(model, (given, targets))
    if way == "inputs=":
        loss.backward(inputs=[given])
        slopes = given.grad
    else:
        (slopes,) = torch.autograd.grad(loss, given)
    assert float(slopes.norm()) > 0
    moved = inputs + 0.3 * slopes.sign()
    step = taken(optimizer, model, (moved, targets), lambda: classified(model, (moved, targets)).backward())
    assert_by_hand(step, classified, 6)


def test_a_forward_before_the_loop_s_own_is_no_forward_of_examples() -> None:
    model, optimizer, loader = private(PrivacyEngine(), "words", layers)
    for batch in loader:
        model(batch[0][:1])  # to see the shape of what it returns
        step = taken(optimizer, model, batch, lambda batch=batch: mean_loss(model, batch).backward())
        assert_by_hand(step, mean_loss, optimizer.expected_batch_size)


@pytest.mark.usefixtures("coarse_losses")
def test_the_optimizer_has_what_programs_ask_of_opacus_s() -> None:
    engine = PrivacyEngine(secure_mode=True)
    model, optimizer, loader = private(engine, "words", layers, noise_multiplier=1.5)
    assert (optimizer.noise_multiplier, optimizer.max_grad_norm, optimizer.accumulated_iterations) == (1.5, MAX_NORM, 1)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.state_dict() == optimizer.original_optimizer.state_dict()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    assert len(list(train(loader, model, optimizer, mean_loss))) == 5
    schedule.step()
    assert optimizer.original_optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    assert 0 < engine.get_epsilon(1e-5) < math.inf


@pytest.mark.parametrize(("reduction", "denominator"), [("mean", 8), ("sum", 1)])
@pytest.mark.parametrize("weight", [None, torch.tensor([1.0, 20.0, 0.1], dtype=torch.float64)])
def test_the_criterion_of_the_mode_ghost_has_one_loss_for_each_example(
    weight: Tensor | None, reduction: str, denominator: int
) -> None:
    """As in Opacus: no loss is divided by the weights of its batch, and the default follows loss_reduction."""
    criterion = None if weight is None else nn.CrossEntropyLoss(weight, reduction=reduction)
    model, optimizer, returned, loader = private(
        PrivacyEngine(), "images", layers, grad_sample_mode="ghost", criterion=criterion, loss_reduction=reduction
    )
    assert model._module is model
    for step in train(loader, model, optimizer, lambda model, batch: returned(model(batch[0]), batch[1])):
        alone = lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1], weight, reduction="sum")  # noqa: E731
        assert_by_hand(step, alone, denominator)
    assert criterion is None or criterion.reduction == reduction


def test_the_criterion_of_the_mode_ghost_takes_the_shape_of_token_outputs() -> None:
    *_, mean, _ = private(PrivacyEngine(), "words", layers, grad_sample_mode="ghost")
    *_, total, _ = private(PrivacyEngine(), "words", layers, grad_sample_mode="ghost", loss_reduction="sum")
    outputs, targets = torch.randn(3, 4, 5), torch.randint(0, 5, (3, 4))
    targets[0, 1:], targets[1] = -100, -100
    alone = [nn.functional.cross_entropy(outputs[row], targets[row], reduction="sum") for row in range(3)]
    flat = outputs.view(12, 5), targets.view(12)
    assert_close = torch.testing.assert_close
    assert_close(mean(*flat, shape=outputs.shape), (alone[0] / 1 + alone[1] / 1 + alone[2] / 4) / 3)
    assert_close(mean(flat[0], target=flat[1], shape=outputs.shape), mean(*flat, shape=outputs.shape))
    assert_close(total(*flat, shape=outputs.shape), sum(alone))
    assert_close(mean(*flat), sum(alone) / 12)
