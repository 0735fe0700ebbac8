"""What a checkpoint isn't restored to, or can't store: refused by name, with nothing changed."""

from pathlib import Path
from typing import Any

import private_runs as runs
import pytest
import torch
from checkpointed_runs import engine_of, go, private, state_of
from torch import nn
from torch.optim import lr_scheduler

from ghostclip import PrivacyError
from ghostclip.clipping import Adaptive, Custom, PerLayer


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"noise_multiplier": 1.5}, r"noise_multiplier is 1\.0 in it and 1\.5 here"),
        ({"batch_size": 6}, r"sampling is Poisson\(.*batch_size=8.* in it and Poisson\(.*batch_size=6.* here"),
        ({"sampling": "without_replacement"}, r"sampling is Poisson\(.* in it and WithoutReplacement\(.* here"),
        ({"neighboring": "replace_one"}, "relation='add_or_remove_one'.* in it and .*relation='replace_one'"),
        ({"clipping": 2.0}, r"clipping is Flat\(max_norm=1\.0\) in it and Flat\(max_norm=2\.0\) here"),
        ({"clipping": PerLayer(1.0)}, r"clipping is Flat\(max_norm=1\.0\) in it and PerLayer\("),
        ({"clipping": Adaptive(1.0)}, r"clipping is Flat\(max_norm=1\.0\) in it and Adaptive\("),
        ({"clipping": Custom(torch.ones_like, 1.0)}, r"clipping is .* and Custom\(function=.*ones_like"),
        ({"noise": "standard", "seed": None}, "noise is test in it and standard here"),
        ({"seed": 6}, "seed is 5 in it and 6 here"),
        ({"optimizer": "adam"}, "the optimizer's class is torch.optim.sgd.SGD in it and torch.optim.adam.Adam here"),
        ({"dtype": torch.float64}, r"0\.weight is float32 \[8, 5\] in it and float64 \[8, 5\] here"),
    ],
)
def test_another_configuration_is_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    go(engine_of(), 2).save(tmp_path / "x")
    other = go(engine_of(**changes), 1)
    before = state_of(other)
    with pytest.raises(PrivacyError, match=f"is of another configuration: .*{message}"):
        other.restore(tmp_path / "x")
    assert state_of(other) == before
    assert other.steps_taken == 1
    go(other, 1)


def test_another_data_set_model_or_frozen_parameter_is_refused(tmp_path: Path) -> None:
    go(engine_of(), 1).save(tmp_path / "x")
    wide, frozen = nn.Sequential(nn.Linear(5, 3)), runs.network()
    frozen[0].bias.requires_grad_(False)
    cases = [
        (runs.network(), runs.data(25), "the number of examples is 24 in it and 25 here"),
        (wide, runs.data(), r"0\.weight is float32 \[8, 5\] in it and float32 \[3, 5\] here; .* and \d+ more"),
        (frozen, runs.data(), r"trained is \['0\.weight', '0\.bias', .* in it and \['0\.weight', '2\.weight'"),
    ]
    for model, data, message in cases:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        other = runs.engine_for(model, optimizer, data, noise="test", seed=5, noise_multiplier=1.0, clipping=1.0)
        with pytest.raises(PrivacyError, match=message):
            other.restore(tmp_path / "x")


def test_parameters_in_another_order_are_refused(tmp_path: Path) -> None:
    go(engine_of(), 1).save(tmp_path / "x")
    model = engine_of().model
    optimizer = torch.optim.SGD(reversed([*model.parameters()]), lr=0.1, momentum=0.9, nesterov=True)
    other = runs.engine_for(model, optimizer, noise="test", seed=5, noise_multiplier=1.0, clipping=1.0)
    with pytest.raises(PrivacyError, match=r"the optimizer's group 0 is \['0\.weight', .* in it and \['3\.bias'"):
        other.restore(tmp_path / "x")


def test_extra_objects_must_be_the_same(tmp_path: Path) -> None:
    engine = private()
    plan = lr_scheduler.ConstantLR(engine.optimizer)
    engine.save(tmp_path / "x", extra={"plan": plan})
    with pytest.raises(PrivacyError, match=r"saved with extra=\['plan'\], and restore got \[\]"):
        engine.restore(tmp_path / "x")
    with pytest.raises(PrivacyError, match=r"restore got \['other'\]"):
        engine.restore(tmp_path / "x", extra={"other": plan})
    for wrong, message in [(plan, "extra must be a dict"), ({"epoch": 3}, r"extra\['epoch'\] must be an object with")]:
        with pytest.raises(TypeError, match=message):
            engine.save(tmp_path / "x", extra=wrong)  # type: ignore[arg-type]


class Unstorable:
    def state_dict(self) -> Any:
        return {"hook": print}

    def load_state_dict(self, state: Any) -> None: ...


def test_an_extra_state_that_needs_code_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(PrivacyError, match=r"private\.extra\.mine\.hook is a builtins\.builtin_function_or_method"):
        private().save(tmp_path / "x", extra={"mine": Unstorable()})
    assert not (tmp_path / "x").exists()


def test_a_detached_or_foreign_tensor_type_is_named(tmp_path: Path) -> None:
    engine = private()
    engine.model.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(PrivacyError, match=r"model\.phase is of type torch\.complex64"):
        engine.save(tmp_path / "x")
