"""Opacus itself beside `ghostclip.compat.opacus`: gradients, epsilon, sampling rates, checkpoints."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from opacus_programs import mean_loss, private, train
from torch import nn
from torch.utils.data import DataLoader

from ghostclip.compat.opacus import PrivacyEngine, RDPAccountant, layers

opacus = pytest.importorskip("opacus")
pytestmark = pytest.mark.filterwarnings("ignore:Secure RNG", "ignore:Full backward hook")


@pytest.mark.parametrize(
    ("noise", "length", "steps", "delta"), [(0.56, 391, 3910, 1e-5), (1.5, 16, 500, 1e-6), (4.0, 1, 10, 1e-5)]
)
def test_renyi_epsilon_is_opacus_s(noise: float, length: int, steps: int, delta: float) -> None:
    from opacus.accountants import RDPAccountant as Theirs

    ours, their = RDPAccountant(), Theirs()
    their.history = [(noise, 1 / length, steps)]
    ours.load_state_dict(their.state_dict())
    assert ours.get_privacy_spent(delta=delta) == pytest.approx(their.get_privacy_spent(delta=delta), rel=1e-6)


@pytest.mark.slow
def test_privacy_loss_distributions_stay_below_opacus_s_estimate_plus_its_error() -> None:
    from opacus.accountants import PRVAccountant as Theirs

    their = Theirs()
    their.history = [(1.0, 0.02, 500)]
    ours = PrivacyEngine().accountant
    ours.load_state_dict(their.state_dict())
    found, estimate = ours.get_epsilon(1e-5), their.get_epsilon(1e-5)
    assert estimate - 0.03 < found <= estimate


@pytest.mark.parametrize(
    ("examples", "batch_size", "drop_last"), [(45, 8, False), (45, 8, True), (40, 40, False), (49, 1, False)]
)
def test_rates_lengths_and_denominators_are_opacus_s(examples: int, batch_size: int, drop_last: bool) -> None:
    data = torch.utils.data.TensorDataset(torch.randn(examples, 3))

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


def test_a_checkpoint_of_opacus_is_continued(tmp_path: Path) -> None:
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


def test_the_comparison_says_where_gradients_and_epsilon_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
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
