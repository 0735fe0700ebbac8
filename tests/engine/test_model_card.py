"""The model card: every public figure of the guarantee, in metadata and text, and nothing that data decide."""

import json
import math
import re
import sys
from typing import Any

import private_runs as runs
import pytest
from charged_steps import private, steps

import ghostclip
from ghostclip.engine import PrivacyEngine

pytestmark = pytest.mark.usefixtures("coarse_losses")

hub = pytest.importorskip("huggingface_hub")


@pytest.fixture
def engine(tmp_path: Any) -> PrivacyEngine:
    return steps(private(noise_multiplier=1.5, clipping=0.25, ledger=tmp_path / "run.ledger"), 2)


def test_the_metadata_are_the_guarantee(engine: PrivacyEngine) -> None:
    card = engine.model_card()
    assert isinstance(card, hub.ModelCard)
    # As anyone reads it from the file.
    found = hub.ModelCard(card.content).data.to_dict()["differential_privacy"]
    bound = engine.risk()
    assert found == {
        "epsilon": engine.epsilon(), "delta": engine.target_delta, "accountant": "pld", "unit": "example",
        "neighboring": "add_or_remove_one", "membership_advantage": bound.advantage,
        "true_positive_rates": {f"{rate:g}": bound.true_positive_rate(rate) for rate in (0.001, 0.01, 0.1)},
        "sampling": "poisson", "sample_rate": engine.sample_rate, "expected_batch_size": engine.batch_size,
        "noise_multiplier": 1.5, "noise": "standard", "clipping": repr(engine.clipping), "steps": 2,
        "planned_steps": None, "ghostclip": ghostclip.__version__,
    }  # fmt: skip
    assert "differential-privacy" in card.data.tags


def test_the_text_says_what_is_covered_and_what_is_not(engine: PrivacyEngine) -> None:
    text = engine.model_card().text
    assert engine.guarantee() in text
    for words in ("does not cover", "choice of hyperparameters", "evaluation data", "were logged", "pretrained on"):
        assert words in text
    assert f"| clipping | `{engine.clipping!r}` |" in text
    assert "| noise multiplier | 1.5 |" in text


def test_the_last_line_of_the_ledger_is_there_as_it_stands(engine: PrivacyEngine) -> None:
    (line,) = re.findall(r"^```json\n(.*)\n```$", engine.model_card().text, re.MULTILINE)
    assert line == engine.ledger.path.read_text().splitlines()[-1]
    assert json.loads(line)["hash"] == engine.ledger.head.hash
    assert str(engine.ledger.path) not in engine.model_card().content
    assert "ledger" not in steps(private()).model_card().content


def test_it_says_what_else_the_guarantee_covers(engine: PrivacyEngine, tmp_path: Any) -> None:
    """A run that goes on with a checkpoint, in the ledger of one that took a step more and was killed."""
    words = "The guarantee also covers 1 release in the same ledger that did not lead to this model"
    engine.save(tmp_path / "saved")
    assert "also covers" not in engine.model_card().text
    steps(engine, 1)
    after = private(noise_multiplier=1.5, clipping=0.25, ledger=engine.ledger.path)
    after.restore(tmp_path / "saved")
    assert words in after.model_card().text
    assert words in steps(after, 1).model_card().text


def test_nothing_depends_on_data(tmp_path: Any) -> None:
    """Two trainings on other data, with other batches, losses and norms, have the same card."""
    cards = []
    for scale in (1.0, 100.0):
        dataset = runs.data()
        scaled = [(inputs * scale, *others) for inputs, *others in dataset]
        cards.append(steps(private(dataset=scaled), 2).model_card().content)
    assert cards[0] == cards[1]


def test_noise_that_is_not_private_says_so() -> None:
    card = steps(private(noise="test", seed=1)).model_card()
    assert hub.ModelCard(card.content).data.to_dict()["differential_privacy"]["epsilon"] == math.inf


def test_it_names_the_noise_of_all_runs_in_the_ledger(engine: PrivacyEngine) -> None:
    engine.detach()
    other = private(noise="hardened", ledger=engine.ledger.path)
    assert "| noise | `standard` |" in other.model_card().text
    assert "| noise | `hardened` |" in private(noise="hardened").model_card().text
    card = steps(other).model_card()
    assert hub.ModelCard(card.content).data.to_dict()["differential_privacy"]["noise"] == "standard and hardened"
    assert "| noise | `standard and hardened` |" in card.text
    assert other.guarantee() in card.text


def test_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = private()
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModuleNotFoundError, match="needs huggingface_hub; pip install"):
        engine.model_card()
