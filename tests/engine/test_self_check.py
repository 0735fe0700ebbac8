"""The first steps' self-check: wrong gradients are refused before a release, and checking changes nothing."""

import logging
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import private_runs as runs
import pytest
import torch
from case_models import By, Wired
from honest_losses import Counting, augmented
from mixing_losses import weights_over_their_sum
from own_layers import Scale
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import ghostclip
from ghostclip import PrivacyEngine, UnsupportedModelError, VerificationError
from ghostclip.clipper.random_states import random_states
from ghostclip.clipper.trial import without_trace
from ghostclip.clipping import Custom, PerLayer
from ghostclip.errors import ExamplesMixError
from ghostclip.norms.outer import OuterProduct
from ghostclip.self_check import agreement

OPTIONS: dict[str, dict[str, Any]] = {
    "reweight": {},
    "cached": {"second_pass": "cached"},
    "per layer": {"clipping": PerLayer(1.0)},
    "groups by a function": {
        "clipping": Custom(lambda norms: {g: 1 / (1 + n) for g, n in norms.items()}, 1.0, groups={"all": ["*"]})
    },
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def whole_batches(model: nn.Module, dataset: Any = None, **options: Any) -> PrivacyEngine:
    """An engine whose every batch is the whole data set."""
    dataset = runs.data(6) if dataset is None else dataset
    options = {"clipping": 1.0, "noise_multiplier": 1.0, **options}
    return runs.engine_for(model, options.pop("optimizer", None), dataset, batch_size=len(dataset), **options)


def by_step(engine: PrivacyEngine, loss_fn: Callable[..., Tensor] = runs.losses_of) -> None:
    engine.step(next(iter(engine.batches())), loss_fn)


def by_compiled_step(engine: PrivacyEngine) -> None:
    engine.compile()
    by_step(engine)


by_backward = runs.train_by_hand


def assert_refused(engine: PrivacyEngine, message: str, step: Callable[..., None], *loss_fn: Any) -> None:
    before = runs.weights(engine.model)
    for _ in range(2):  # trying again gives the same error
        with pytest.raises(VerificationError, match=message):
            step(engine, *loss_fn)
    assert torch.equal(runs.weights(engine.model), before)
    assert all(parameter.grad is None for parameter in engine.model.parameters())
    assert engine.steps_taken == 0


@every_option
@pytest.mark.parametrize("step", [by_step, by_backward, by_compiled_step])
def test_a_wrong_rule_is_refused_by_name(options: dict[str, Any], step: Callable[..., None]) -> None:
    model = nn.Sequential(nn.Linear(5, 4), Scale(4), nn.Linear(4, 3))
    assert_refused(whole_batches(model, **options), r"(?s)autograd's own.*: 1\.weight \(\d.*debugging", step)


def test_a_check_that_was_switched_off_does_not_run() -> None:
    engine = whole_batches(nn.Sequential(Scale(5), nn.Linear(5, 3)), self_check=False)
    by_step(engine)
    assert engine.steps_taken == 1


def centred() -> nn.Module:
    """Subtracts the batch's mean, and doesn't differentiate it."""
    return By(lambda x: x - x.detach().mean(0))


@pytest.mark.parametrize("size", [2, 6])
def test_a_module_in_which_examples_meet_is_named(size: int) -> None:
    model = nn.Sequential(nn.Linear(5, 4), centred(), nn.Dropout(0.2), nn.Linear(4, 3))
    assert_refused(whole_batches(model, runs.data(size)), r"^1: By.*examples that mix; use a layer", by_step)


def test_a_batch_that_is_not_finite_is_not_compared_but_a_later_one_is() -> None:
    dataset = runs.data(6)
    dataset.tensors[0][3] = float("nan")
    engine = whole_batches(nn.Sequential(nn.Linear(5, 4), Scale(4), nn.Linear(4, 3)), dataset)
    by_step(engine)
    dataset.tensors[0][3] = 1.0
    with pytest.raises(VerificationError, match=r"1\.weight"):
        by_step(engine)
    assert engine.steps_taken == 1


@pytest.mark.parametrize("options", [{"batch_size": 5}, {"batch_size": 10, "max_physical_batch_size": 5}])
def test_as_many_features_as_examples_hide_no_mixing(options: dict[str, Any]) -> None:
    model = nn.Sequential(centred(), nn.Linear(5, 3))
    engine = runs.engine_for(model, dataset=runs.data(10), sampling="without_replacement", **options)
    with pytest.raises(VerificationError, match="0: By"):
        runs.train(engine, 5)


@every_option
@pytest.mark.parametrize("step", [by_step, by_backward])
def test_checking_changes_nothing(options: dict[str, Any], step: Callable[..., None]) -> None:
    """Neither in buffers nor in what is drawn, by three sources of random numbers."""
    finished = []
    for check in (True, False):
        torch.manual_seed(2)
        np.random.seed(3)
        random.seed(4)
        model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), Counting(), nn.Tanh(), nn.Linear(8, 3))
        engine = whole_batches(model, noise="test", seed=1, self_check=check, **options)
        for _ in range(3):
            step(engine, augmented)
        drawn = torch.tensor([random.random(), np.random.rand(), float(torch.rand(())), model[2].calls])
        finished.append(torch.cat([runs.weights(model), model[2].seen[None], drawn]))
    assert torch.equal(*finished)


def test_a_single_example_has_no_company() -> None:
    engine = whole_batches(runs.network(), max_physical_batch_size=1)
    by_step(engine, weights_over_their_sum)  # by itself, alone in its batch, an example can't mix with any
    assert engine.steps_taken == 1


def test_a_trial_ends_as_it_began_even_by_an_error() -> None:
    model = nn.Sequential(Counting(), nn.Dropout()).train()
    states = random_states()

    @torch.no_grad()
    def interrupted() -> None:
        with without_trace(model):
            assert torch.is_grad_enabled()
            model.eval()
            model[0].seen += 1 + torch.rand(()) * random.random() * np.random.rand()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert model[1].training
    assert model[0].seen == 0
    assert random_states() == states


class Recorded(nn.Linear):
    """Adds a hook at its first forward, and marks that it did, as transformers' models do to record outputs."""

    def forward(self, input: Tensor) -> Tensor:
        if not hasattr(self, "recorded"):
            self.recorded: list[Tensor] = []
            self.register_forward_hook(lambda module, inputs, output: self.recorded.append(output.detach()))
        return super().forward(input)


def test_hooks_that_a_forward_adds_are_not_added_twice() -> None:
    model = Recorded(2, 3)
    with without_trace(model):
        model(torch.ones(1, 2))
    assert not model._forward_hooks
    model(torch.ones(1, 2))
    with without_trace(model):
        model(torch.ones(1, 2))
    assert len(model._forward_hooks) == 1


def adapted() -> Wired:
    """A frozen layer and a low-rank adapter, whose second factor starts at zero."""
    model = Wired(
        lambda m, x: m.base(x) + m.up(m.down(x)), base=nn.Linear(5, 3).requires_grad_(False),
        down=nn.Linear(5, 2, bias=False), up=nn.Linear(2, 3, bias=False),
    )  # fmt: skip
    nn.init.zeros_(model.up.weight)
    return model


def with_unused() -> nn.Module:
    model = adapted().requires_grad_(True)
    model.spare = nn.Linear(2, 2)
    return model


def transposed() -> nn.Module:
    """Weights that are not contiguous, as those of a model in the memory format channels_last."""
    model = runs.network()
    for layer in (model[0], model[2]):
        layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    return model


def of_ones() -> nn.Module:
    model = runs.network(torch.bfloat16)
    nn.init.ones_(model[0].weight)
    return model


def sgd(rate: float, part: int | None = None) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda model: torch.optim.SGD((model if part is None else model[part]).parameters(), lr=rate)


# By name: model, optimizer, options, what is said once.
SAID: dict[str, tuple[Callable[[], nn.Module], Any, dict[str, Any], str]] = {
    "all is well": (adapted, sgd(0.5), {}, ""),
    "all is well without noise": (adapted, sgd(0.5), {"noise_multiplier": 0.0}, ""),
    "unused": (with_unused, sgd(0.5), {}, "no loss of the first batch depends on spare.weight, spare.bias:"),
    "not held": (runs.network, sgd(0.1, 2), {}, "the optimizer doesn't hold 0.weight, 0.bias:"),
    "lost in rounding": (
        of_ones, sgd(1e-4), {"dataset": runs.data(6, torch.bfloat16), "noise_multiplier": 0.1},
        "the first update left 0.weight, ",
    ),
    "not contiguous": (transposed, sgd(0.5), {}, ""),
    "not contiguous, lost": (transposed, sgd(1e-30), {}, "the first update left 0.weight, 0.bias, 2.weight"),
}  # fmt: skip


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    """What was said: "", or the one message."""
    caplog.set_level(logging.WARNING, "ghostclip")

    def message() -> str:
        assert len(caplog.messages) <= 1
        return caplog.text

    return message


@pytest.mark.parametrize("name", SAID)
def test_parameters_that_are_not_trained_are_named_once(name: str, said: Callable[[], str]) -> None:
    make, optimizer, options, text = SAID[name]
    model = make()
    runs.train(whole_batches(model, optimizer=optimizer(model), **options), 2)
    assert (text in said()) if text else said() == ""
    assert "the optimizer" not in said().partition("Freeze")[0] or name != "unused"


def test_parameters_of_a_criterion_are_warned_of(said: Callable[[], str]) -> None:
    temperature = nn.Parameter(torch.ones(()))
    by_step(whole_batches(runs.network()), lambda model, part: temperature * runs.losses_of(model, part))
    assert "parameters outside of the model (of shape []), which get no gradient" in said()
    assert temperature.grad is None


def test_a_learning_rate_of_zero_is_waited_for(said: Callable[[], str]) -> None:
    optimizer = sgd(0.0, 2)(model := runs.network())
    engine = whole_batches(model, optimizer=optimizer)
    by_step(engine)
    assert said() == ""
    optimizer.param_groups[0]["lr"] = 0.1
    by_step(engine)
    assert "doesn't hold 0.weight, 0.bias" in said()


def test_losses_that_depend_on_no_parameter_are_refused() -> None:
    """Each step would be noise alone."""
    engine = whole_batches(runs.network())
    with pytest.raises(UnsupportedModelError, match="no loss of the first batch depends on a trainable parameter"):
        by_step(engine, lambda model, batch: model(batch[0]).detach().requires_grad_().sum(1))
    assert engine.steps_taken == 0


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda engine: engine.model.eval(), "in eval mode, without dropout: call model.train()"),
        (
            lambda engine: engine.model[0].requires_grad_(False),
            "2 of the parameters that were trained so far are frozen",
        ),
        (
            lambda engine: engine.optimizer.load_state_dict(engine.optimizer.state_dict()),
            "put another state into the optimizer in mid-run",
        ),
    ],
)
def test_a_change_in_mid_run_is_said_once(caplog: Any, tmp_path: Any, change: Any, line: str) -> None:
    engine = whole_batches(runs.network())
    by_step(engine)
    engine.save(tmp_path / "checkpoint")
    engine.restore(tmp_path / "checkpoint")
    by_step(engine)
    assert caplog.text == ""
    for _ in range(2):
        change(engine)
        by_step(engine)
    assert caplog.text.count(line) == 1 == len(caplog.messages)


@pytest.mark.usefixtures("coarse_losses")
def test_losses_without_a_loss_function_are_said_to_be_untested(caplog: pytest.LogCaptureFixture) -> None:
    engine, tested = (whole_batches(runs.network()) for _ in range(2))
    unchecked = whole_batches(runs.network(), self_check=False)
    by_backward(engine)
    by_backward(engine)
    assert sum("a loop that computes its own losses" in said for said in caplog.messages) == 1
    assert "ghostclip.check(model, loss_fn, loader)" in caplog.text
    caplog.clear()
    by_backward(unchecked)
    checked = whole_batches(runs.network())
    assert ghostclip.check(checked.model, runs.losses_of, list(runs.data(6)[:])) == []
    by_backward(checked)
    by_step(tested)
    by_backward(tested)
    assert caplog.text == ""
    untested = "It holds if no loss depends on other examples of its batch, which was not tested."
    assert [untested in each.guarantee() for each in (engine, unchecked, checked, tested)] == [True, True, False, False]
    unchecked_model = whole_batches(checked.model, self_check=False)
    assert untested not in unchecked_model.guarantee()
    by_step(unchecked_model)
    assert untested not in unchecked_model.guarantee()
    assert untested in str(engine.model_card())


def by_a_generator_of_its_own() -> Callable[..., Tensor]:
    """Losses that see the whole batch, which nothing shows: they are other ones each time."""
    generator = np.random.default_rng()

    def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
        noise = torch.from_numpy(generator.standard_normal(tuple(batch[0].shape))).float()
        losses = runs.losses_of(model, [batch[0] + 0.1 * noise, batch[1]])
        return losses / losses.detach().mean()

    return loss_fn


ZEROS = TensorDataset(torch.zeros(10, 5), torch.zeros(10, dtype=torch.long))


@pytest.mark.usefixtures("coarse_losses")
@pytest.mark.parametrize("alike", [True, False], ids=["all alike", "other ones each time"])
@pytest.mark.filterwarnings("ignore:.* has rows several times")
def test_losses_that_could_not_be_compared_do_not_count_as_tested(alike: bool, caplog: Any) -> None:
    """Neither in training nor by `check`; the same training on other batches, or by other losses, does."""
    for compared in (False, True):
        loss_fn = runs.losses_of if alike or compared else by_a_generator_of_its_own()
        dataset = ZEROS if alike and not compared else runs.data(10)
        for by_check in (False, True):
            caplog.clear()
            torch.manual_seed(0)
            engine = whole_batches(runs.network(), dataset)
            if by_check:
                assert ghostclip.check(engine.model, loss_fn, dataset[:]) == []
                assert ("no losses could be compared in other batches" in caplog.text) != compared
                by_backward(engine) if compared else runs.train(engine, 3, loss_fn)
            else:
                runs.train(engine, 3, loss_fn)
            assert ("was not tested" in engine.guarantee()) != compared


def test_a_batch_that_had_its_step_is_let_go_of() -> None:
    """It holds the workers of its data loader, which end promptly where nothing else refers to them."""
    engine = whole_batches(runs.network())
    batch = next(iter(engine.batches()))
    engine.step(batch, runs.losses_of)
    seen = weakref.ref(batch)
    del batch
    assert seen() is None


def of_a_closure(size: int) -> Callable[..., Tensor]:
    """Losses of the same rows, whichever it is given."""
    batch = runs.data(size)[:]
    return lambda model, _: runs.losses_of(model, batch)


def test_a_head_of_zeros_with_random_targets_trains() -> None:
    """Whose first losses follow the random numbers of their places alone."""
    model = runs.network()
    nn.init.zeros_(model[2].weight)
    nn.init.zeros_(model[2].bias)
    engine = runs.engine_for(model, dataset=runs.data(80), batch_size=40)
    runs.train(engine, 2, lambda model, batch: (model(batch[0]) - torch.randn(len(batch[0]), 3)).square().sum(1))
    assert engine.steps_taken == 2


@pytest.mark.parametrize("size", [8, 40])
def test_a_loss_function_that_ignores_its_batch_is_refused(size: int) -> None:
    data = runs.data(80)
    engine = runs.engine_for(runs.network(), dataset=data, batch_size=size, sampling="without_replacement")
    with pytest.raises(ExamplesMixError, match="losses stay as they are when other examples take the places"):
        runs.train(engine, 1, of_a_closure(size))
    found = ghostclip.check(engine.model, of_a_closure(size), torch.utils.data.DataLoader(data, batch_size=size))
    assert "doesn't use its batch" in str(found)


@every_option
@pytest.mark.parametrize("scale", [1024.0, 2.0**-4])
@pytest.mark.parametrize("physical", [None, 2])
@pytest.mark.one_in(2)
def test_scaled_losses_of_a_sound_model_pass(options, scale, physical):
    engine = runs.engine_for(runs.network(), loss_scale=scale, max_physical_batch_size=physical, **options)
    runs.train(engine)
    assert engine.steps_taken == len(engine.batches())


@every_option
def test_a_rule_that_sums_otherwise_than_it_measures_is_refused(options: dict[str, Any], monkeypatch) -> None:
    """Whether the sum is formed of what was kept, in a second backward, or group by group."""
    original = OuterProduct.weighted_sum
    monkeypatch.setattr(OuterProduct, "weighted_sum", lambda term, weights: 1.1 * original(term, weights))
    model = nn.Sequential(nn.Linear(5, 40), nn.Tanh(), nn.Linear(40, 30))
    data = TensorDataset(torch.randn(6, 2, 5), torch.randn(6))
    engine = whole_batches(model, data, **options)
    with pytest.raises(VerificationError, match=r"2\.weight"):
        by_step(engine, lambda model, batch: model(batch[0]).square().sum((1, 2)))


def test_rounding_errors_are_compared_with_no_gradient_of_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd's gradients may be exactly zero where ours are not, by other kernels."""
    original = agreement._gradients
    monkeypatch.setattr(
        agreement, "_gradients", lambda *given: {name: 0 * grad for name, grad in original(*given).items()}
    )
    by_step(engine := whole_batches(runs.network()))
    assert engine.steps_taken == 1
