"""torch_compile of Trainer and compile of PrivacyCallback: the engine compiles, and takes the same steps."""

import pytest
import torch
from graphs import interpret

from ghostclip import PrivacyError


def trained_below_a_frozen_head(folder, compiles):
    """(weights, engine) after 6 steps of Trainer; the losses are computed in chunks where they aren't compiled."""
    tt = pytest.importorskip("tiny_trainers")
    torch.manual_seed(0)
    model = tt.gpt2()
    model.transformer.wte.weight.requires_grad_(False)
    trainer = tt.trainer(folder, model, max_steps=6, learning_rate=0.01, torch_compile=compiles)
    trainer.train()
    return [parameter.detach() for parameter in trainer.model.parameters()], trainer.engine


def trained_by_lightning(folder, compiles):
    pytest.importorskip("lightning")
    import lightning_runs as lr

    steps = lr.Steps()
    made = {**lr.EXACT, "max_physical_batch_size": None, "compile": compiles}
    _, callback = lr.fit(folder, callbacks=[steps], engine=made, max_epochs=2)
    return steps.weights[-1], callback.engine


@pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")
@pytest.mark.filterwarnings("ignore:.*is supported for historical reasons:FutureWarning")
@pytest.mark.parametrize("train", [trained_below_a_frozen_head, trained_by_lightning])
def test_the_engines_steps_are_compiled(train, tmp_path, monkeypatch):
    interpret(monkeypatch)
    expected, eager = train(tmp_path / "eager", False)
    found, engine = train(tmp_path / "compiled", True)
    assert eager._steps._clipper.compiled is None
    assert engine._steps._clipper.compiled.graphs >= 1
    assert not engine._steps._clipper.compiled.refusals
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_manual_optimization_is_refused(tmp_path):
    pytest.importorskip("lightning")
    import lightning_runs as lr

    with pytest.raises(PrivacyError, match="compile=True compiles no step of manual optimization"):
        lr.fit(tmp_path, lr.Module(manual=True), engine={"compile": True})
