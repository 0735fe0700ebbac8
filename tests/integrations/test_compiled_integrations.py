"""torch_compile of Trainer and compile of PrivacyCallback: the engine compiles, and takes the same steps."""

import pytest
import torch
from graphs import interpret

STEPS = 12


def same(found, expected):
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.fixture
def interpreted(monkeypatch):
    interpret(monkeypatch)


@pytest.mark.usefixtures("interpreted")
def test_torch_compile_of_trainer_compiles_the_engines_steps(tmp_path):
    tt = pytest.importorskip("tiny_trainers")
    trained = {}
    for compiles in (False, True):
        torch.manual_seed(0)
        trainer = tt.trainer(tmp_path / str(compiles), max_steps=STEPS, learning_rate=0.01, torch_compile=compiles)
        trainer.train()
        trained[compiles] = [parameter.detach() for parameter in trainer.model.parameters()]
        compiled = trainer.engine._steps._clipper.compiled
        assert (compiled is not None) == compiles
    assert compiled.graphs == 1
    assert not compiled.refusals
    same(trained[True], trained[False])


def test_another_backend_is_refused_by_its_name(tmp_path):
    tt = pytest.importorskip("tiny_trainers")
    from ghostclip import PrivacyError

    with pytest.raises(PrivacyError, match="torch_compile_backend='eager' of TrainingArguments"):
        tt.trainer(tmp_path, torch_compile=True, torch_compile_backend="eager")


@pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")
@pytest.mark.filterwarnings("ignore:.*is supported for historical reasons:FutureWarning")
class TestLightning:
    @pytest.fixture(autouse=True)
    def lightning(self):
        pytest.importorskip("lightning")

    @pytest.mark.usefixtures("interpreted")
    def test_compile_of_the_callback_compiles_the_engines_steps(self, tmp_path):
        import lightning_runs as lr

        trained = {}
        for compiles in (False, True):
            steps = lr.Steps()
            made = {**lr.EXACT, "max_physical_batch_size": None, "compile": compiles}
            module = lr.Module()
            _, callback = lr.fit(tmp_path, module, callbacks=[steps], engine=made, max_epochs=4)
            trained[compiles] = steps.weights[-1]
        compiled = callback.engine._steps._clipper.compiled
        assert compiled.graphs >= 1
        assert not compiled.refusals
        same(trained[True], trained[False])

    def test_manual_optimization_is_refused(self, tmp_path):
        import lightning_runs as lr

        from ghostclip import PrivacyError

        with pytest.raises(PrivacyError, match="compile=True compiles no step of manual optimization"):
            lr.fit(tmp_path, lr.Module(manual=True), engine={"compile": True})
