"""Accountants, checkpoints and the validator under Opacus's names, and beside Opacus itself."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import private_runs as runs
import pytest
import torch
from opacus_programs import Characters, mean_loss, private, train
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ghostclip
from ghostclip.compat.opacus import (
    DPLSTM,
    DPMultiheadAttention,
    ModuleValidator,
    PrivacyEngine,
    PRVAccountant,
    RDPAccountant,
    from_opacus,
    import_history,
    layers,
)
from ghostclip.errors import PrivacyError
from ghostclip.events import SampledGaussian
from ghostclip.ledger import Ledger

pytestmark = pytest.mark.filterwarnings("ignore:Secure RNG", "ignore:Full backward hook")
ROOT = Path(ghostclip.__file__).parents[1]


@pytest.fixture
def opacus() -> Any:
    return pytest.importorskip("opacus")


def test_another_accountant_takes_over_what_was_counted() -> None:
    engine = PrivacyEngine()
    assert engine.get_epsilon(1e-5) == RDPAccountant().get_epsilon(1e-5) == 0
    model, optimizer, loader = private(engine, "words", layers, noise_multiplier=1.2)
    engine.accountant.step(noise_multiplier=2.0, sample_rate=0.1)
    list(train(loader, model, optimizer, mean_loss))
    engine.accountant = RDPAccountant()
    list(train(loader, model, optimizer, mean_loss))
    assert sorted(engine.accountant.history) == [(1.2, 0.2, 10), (2.0, 0.1, 1)]
    with pytest.raises(TypeError, match="must be an RDPAccountant or a PRVAccountant"):
        engine.accountant = object()


def test_steps_that_programs_put_into_the_history_count() -> None:
    """As lists are assigned and appended to in Opacus."""
    expected = RDPAccountant()
    expected.load_state_dict({"history": [(1.2, 0.2, 5), (2.0, 0.1, 7)]})
    accountant = RDPAccountant()
    accountant.history = [(3.0, 0.5, 1)]
    accountant.history = [(2.0, 0.1, 3)]
    accountant.history.append((1.2, 0.2, 5))
    accountant.history += [(2.0, 0.1, 4)]
    assert sorted(accountant.history) == [(1.2, 0.2, 5), (2.0, 0.1, 7)]
    assert accountant.get_epsilon(1e-5) == expected.get_epsilon(1e-5) > 0

    engine = PrivacyEngine()
    model, optimizer, loader = private(engine, "words", layers, noise_multiplier=1.2)
    engine.accountant.history.append((2.0, 0.1, 7))
    engine.accountant = RDPAccountant()
    list(train(loader, model, optimizer, mean_loss))
    with pytest.raises(PrivacyError, match=r"none is taken back; .*load_state_dict"):
        engine.accountant.history = []
    assert engine.get_epsilon(1e-5) == expected.get_epsilon(1e-5)


def test_a_model_made_private_again_for_a_second_phase() -> None:
    """By another optimizer, over the loader of the first phase; then by another engine of the same accountant."""
    engine, other = PrivacyEngine(accountant="rdp"), PrivacyEngine(accountant="rdp")
    other.accountant = engine.accountant
    model, optimizer, loader = private(engine, "words", layers, noise_multiplier=1.0)
    list(train(loader, model, optimizer, mean_loss))

    def again(by: PrivacyEngine) -> Any:
        return by.make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=loader,
            noise_multiplier=1.0, max_grad_norm=1.0,
        )  # fmt: skip

    for by in (engine, other):
        _, optimizer, loader = again(by)
        assert engine.get_epsilon(1e-5) > 0
        list(train(loader, model, optimizer, mean_loss))
    assert other.accountant.history == engine.accountant.history == [(1.0, 0.2, 15)]
    assert other.get_epsilon(1e-5) == engine.get_epsilon(1e-5) > 0
    model.load_state_dict(model.state_dict())
    for ask in (lambda: again(engine), lambda: engine.get_epsilon(1e-5)):
        with pytest.raises(PrivacyError, match="changed outside"):
            ask()


@pytest.mark.parametrize("orders", [[], [0.5, 2.0], [math.nan], [math.inf]])
def test_orders_that_bound_nothing_are_refused(orders: list[float]) -> None:
    accountant = RDPAccountant()
    accountant.step(noise_multiplier=1.0, sample_rate=0.1)
    with pytest.raises(ValueError, match="orders above 1"):
        accountant.get_epsilon(1e-5, alphas=orders)


@pytest.mark.parametrize(("accountant", "poisson_sampling"), [("prv", True), ("rdp", True), ("rdp", False)])
@pytest.mark.filterwarnings("ignore:the DataLoader's")
@pytest.mark.slow
def test_make_private_with_epsilon_spends_the_target_in_its_epochs(accountant: str, poisson_sampling: bool) -> None:
    engine = PrivacyEngine(accountant=accountant)
    model, optimizer, loader = private(
        engine, "words", layers, target_epsilon=4.0, target_delta=1e-5, epochs=3,
        poisson_sampling=poisson_sampling,
    )  # fmt: skip
    for _ in range(3):
        list(train(loader, model, optimizer, mean_loss))
    assert 3.99 < engine.get_epsilon(1e-5) <= 4.0


@pytest.mark.usefixtures("coarse_losses")
def test_an_opacus_history_counts_in_a_ledger(tmp_path: Path) -> None:
    path = tmp_path / "run.ledger"
    state = {"history": [(1.0, 0.01, 70), (2.0, 0.02, 3)], "mechanism": "rdp"}
    import_history(state, path)
    assert Ledger(path).events == [SampledGaussian(0.01, 1.0, 70), SampledGaussian(0.02, 2.0, 3)]
    engine = runs.engine_for(runs.network(), noise_multiplier=1.0, clipping=1.0, ledger=path)
    accountant = PRVAccountant()
    accountant.load_state_dict(state)
    assert engine.epsilon(1e-5) == accountant.get_epsilon(1e-5) > 0
    with pytest.raises(ValueError, match="must have a history"):
        accountant.load_state_dict({"mechanism": "rdp"})


def test_checkpoints_forget_nothing(tmp_path: Path) -> None:
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, loader = private(engine, "words", layers, noise_multiplier=1.0)
    list(train(loader, model, optimizer, mean_loss))
    engine.save_checkpoint(path=tmp_path / "run.pt", module=model, optimizer=optimizer, checkpoint_dict={"epoch": 1})
    again = PrivacyEngine(accountant="rdp")
    other, its, batches = private(again, "words", layers, noise_multiplier=1.0)
    list(train(batches, other, its, mean_loss))
    stored = again.load_checkpoint(path=tmp_path / "run.pt", module=other, optimizer=its)
    assert stored["epoch"] == 1
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())
    assert again.accountant.history == [(1.0, 0.2, 10)]
    list(train(batches, other, its, mean_loss))
    assert again.accountant.history == [(1.0, 0.2, 15)]


def test_arguments_of_torch_s_functions_reach_them(tmp_path: Path) -> None:
    engine, path = PrivacyEngine(), tmp_path / "run.pt"
    model, _, _ = private(engine, "words", layers)
    engine.save_checkpoint(
        path=path, module=model, module_state_dict_kwargs={"prefix": "inner."},
        torch_save_kwargs={"_use_new_zipfile_serialization": False},
    )  # fmt: skip
    load = {"path": path, "module": model, "torch_load_kwargs": {"map_location": "meta"}}
    stored = engine.load_checkpoint(**load, module_load_dict_kwargs={"strict": False})
    assert all(name.startswith("inner.") for name in stored["module_state_dict"])
    assert all(value.is_meta for value in stored["module_state_dict"].values())
    with pytest.raises(RuntimeError, match=r"inner\."):
        engine.load_checkpoint(**load)


def test_a_file_that_lacks_a_state_is_refused_by_name_before_anything_is_loaded(tmp_path: Path) -> None:
    engine, path = PrivacyEngine(accountant="rdp"), tmp_path / "run.pt"
    model, optimizer, loader = private(engine, "words", layers, noise_multiplier=1.0)
    list(train(loader, model, optimizer, mean_loss))
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    engine.save_checkpoint(path=path, module=model)
    again = PrivacyEngine(accountant="rdp")
    other, its, _ = private(again, "words", layers, noise_multiplier=1.0)
    before = runs.weights(other)
    with pytest.raises(KeyError, match=r"weights\.pt has no privacy_accountant_state_dict, module_state"):
        again.load_checkpoint(path=tmp_path / "weights.pt", module=other)
    with pytest.raises(KeyError, match=r"run\.pt has no optimizer_state_dict; .*to both or to neither"):
        again.load_checkpoint(path=path, module=other, optimizer=its)
    assert again.accountant.history == []
    assert torch.equal(runs.weights(other), before)


def opacus_names(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state of `Characters` as Opacus's wrapper and its recurrent layer name it."""
    found = {}
    for name, value in model.state_dict().items():
        if name.startswith("rnn."):
            kind, side, cell = name.removeprefix("rnn.").split("_", 2)
            name = f"rnn.{cell}.{side}.{kind}"
        found[f"_module.{name}"] = value
    return found


def test_names_of_wrapped_models_and_recurrent_cells() -> None:
    model = Characters(DPLSTM)
    stored = opacus_names(model)
    assert "_module.rnn.l1_reverse.hh.bias" in stored
    assert from_opacus(stored).keys() == model.state_dict().keys()
    own = Characters(DPLSTM)
    own.load_state_dict({name.removeprefix("_module."): value for name, value in stored.items()})
    private_one = private(PrivacyEngine(), "characters", layers)[0]
    private_one.load_state_dict(stored)
    for loaded in (own, private_one):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(loaded.state_dict()[name], value, check_dtype=False)
    assert from_opacus(model.state_dict()).keys() == model.state_dict().keys()
    with pytest.raises(RuntimeError, match="Missing key"):
        own.load_state_dict({"rnn.l0.ih.weight": stored["_module.rnn.l0.ih.weight"]})


def test_names_of_attention() -> None:
    layer = DPMultiheadAttention(4, 2, add_bias_kv=True)
    weights, biases = layer.in_proj_weight.detach().chunk(3), layer.in_proj_bias.detach().chunk(3)
    stored = {f"{letter}linear.weight": value for letter, value in zip("qkv", weights, strict=True)}
    stored |= {f"{letter}linear.bias": value for letter, value in zip("qkv", biases, strict=True)}
    stored |= {f"seq_bias_{letter}.bias": getattr(layer, f"bias_{letter}").detach().flatten() for letter in "kv"}
    stored |= {f"out_proj.{kind}": value for kind, value in layer.out_proj.state_dict().items()}
    other = DPMultiheadAttention(4, 2, add_bias_kv=True)
    other.load_state_dict(stored)
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in layer.state_dict().items())


def test_the_validator_replaces_what_mixes_examples() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 48, 3), nn.Sequential(nn.BatchNorm2d(48), nn.InstanceNorm2d(48, track_running_stats=True))
    )
    assert not ModuleValidator.is_valid(model)
    with pytest.raises(ghostclip.UnsupportedModelError, match="BatchNorm"):
        ModuleValidator.validate(model, strict=True)
    fixed = ModuleValidator.fix_and_validate(model)
    assert (fixed[1][0].num_groups, fixed[1][0].num_channels) == (16, 48)
    assert isinstance(model[1][0], nn.BatchNorm2d)
    assert torch.equal(fixed[0].weight, model[0].weight)
    assert ModuleValidator.fix(model, num_groups=4)[1][0].num_groups == 4
    assert not ModuleValidator.is_valid(fixed.eval())
    engine = PrivacyEngine()
    assert not engine.is_compatible(module=model, optimizer=None, data_loader=None)
    assert engine.is_compatible(module=engine.get_compatible_module(model))
    with pytest.raises(TypeError, match="num_groups as its only option"):
        ModuleValidator.fix(model, replace_bn_with_in=True)


def test_the_page_has_the_table_that_was_measured() -> None:
    measured = (ROOT / "experiments/results/opacus_examples.md").read_text()
    assert measured.count("\n") > 7
    assert (ROOT / "docs/coming_from_opacus.md").read_text().endswith(f"{measured}")


@pytest.mark.parametrize(
    ("noise", "length", "steps", "delta"), [(0.56, 391, 3910, 1e-5), (1.5, 16, 500, 1e-6), (4.0, 1, 10, 1e-5)]
)
@pytest.mark.usefixtures("opacus")
def test_renyi_epsilon_is_opacus_s(noise: float, length: int, steps: int, delta: float) -> None:
    from opacus.accountants import RDPAccountant as Theirs

    ours, their = RDPAccountant(), Theirs()
    their.history = [(noise, 1 / length, steps)]
    ours.load_state_dict(their.state_dict())
    assert ours.get_privacy_spent(delta=delta) == pytest.approx(their.get_privacy_spent(delta=delta), rel=1e-6)


@pytest.mark.parametrize(
    ("examples", "batch_size", "drop_last"), [(45, 8, False), (45, 8, True), (40, 40, False), (49, 1, False)]
)
def test_rates_lengths_and_denominators_are_opacus_s(
    opacus: Any, examples: int, batch_size: int, drop_last: bool
) -> None:
    data = TensorDataset(torch.randn(examples, 3))

    def made(engine: Any) -> Any:
        model = nn.Linear(3, 2)
        loader = DataLoader(data, batch_size=batch_size, drop_last=drop_last)
        return engine.make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=loader,
            noise_multiplier=1.0, max_grad_norm=1.0,
        )  # fmt: skip

    (_, own, ours), (_, its, theirs) = made(PrivacyEngine()), made(opacus.PrivacyEngine())
    assert (len(ours), ours.sample_rate) == (len(theirs), theirs.sample_rate)
    # Opacus divides by zero where 49 * (1 / 49) rounds below 1.
    assert own.expected_batch_size == max(1, its.expected_batch_size)


def test_a_checkpoint_of_opacus_is_continued(opacus: Any, tmp_path: Path) -> None:
    import opacus.layers as their_layers

    their = opacus.PrivacyEngine(accountant="rdp")
    model, optimizer, loader = private(their, "characters", their_layers, noise_multiplier=1.0)
    for batch in loader:
        optimizer.zero_grad()
        mean_loss(model, batch).backward()
        optimizer.step()
    their.save_checkpoint(path=tmp_path / "run.pt", module=model, optimizer=optimizer)
    engine = PrivacyEngine(accountant="rdp")
    own, its, batches = private(engine, "characters", layers, noise_multiplier=1.0)
    engine.load_checkpoint(path=tmp_path / "run.pt", module=own, optimizer=its)
    inputs = torch.randint(1, 20, (4, 5))
    torch.testing.assert_close(own(inputs), model(inputs))
    assert engine.accountant.history == their.accountant.history == [(1.0, 0.2, 5)]
    list(train(batches, own, its, mean_loss))
    assert engine.accountant.history == [(1.0, 0.2, 10)]


@pytest.mark.usefixtures("opacus")
def test_the_comparison_says_where_gradients_and_epsilon_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.setattr("os.getloadavg", lambda: (0.1, 0.0, 0.0))
    from experiments.peers import opacus_examples as script

    small = replace(script.EXAMPLES["imdb"], batch_size=8)
    monkeypatch.setattr(script, "EXAMPLES", {"imdb": small})
    assert script.main(["--seconds", "0.05", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "opacus_examples.md").read_text() == capsys.readouterr().out.removesuffix("\n")
    found = {"gradients": 2e-5, "epsilon": {script.OURS: 1.0, script.THEIRS: 1.0}}
    assert not script.agrees(found)
    assert script.agrees({**found, "gradients": 0.0})
    assert not script.agrees({"gradients": 0.0, "epsilon": {script.OURS: 1.001, script.THEIRS: 1.0}})


def test_a_model_inside_of_their_wrapper_is_refused_with_the_way_out(opacus: Any) -> None:
    model = opacus.GradSampleModule(torch.nn.Sequential(torch.nn.Linear(3, 2)))
    with pytest.raises(ghostclip.UnsupportedModelError, match=r"model = model\.to_standard_module\(\)"):
        ghostclip.wrap(model)
    assert ghostclip.check(ghostclip.wrap(model.to_standard_module())) == []
