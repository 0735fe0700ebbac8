"""torch.distributed.checkpoint with an engine: shards are written by all ranks, and read by another number of them."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import private_runs as runs
import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import examples, on_ranks
from sharded import QUIET, settled, sharded, weights
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from ghostclip import PrivacyError
from ghostclip.clipping import Adaptive

pytestmark = [pytest.mark.filterwarnings(text) for text in (*QUIET, "ignore::FutureWarning", "ignore:.*:UserWarning")]

OPTIONS: dict[str, Any] = {
    "batch_size": 8, "noise_multiplier": 1.0, "clipping": Adaptive(0.3, count_noise=2.0),
}  # fmt: skip


def model_and_optimizer() -> tuple[Any, torch.optim.Optimizer]:
    model = sharded(runs.network(torch.float64))
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def saved(folder: Path) -> tuple[Tensor, list[Tensor], float, float]:
    """Three steps, and what is in the checkpoint after them: weights, Adam's moments, epsilon and the adaptive norm."""
    model, optimizer = model_and_optimizer()
    engine = runs.engine_for(model, optimizer, examples(), **OPTIONS)
    for batch in engine.batches():
        engine.step(batch, runs.losses_of)
    settled(model)
    states = get_state_dict(model, optimizer)
    dcp.save({"model": states[0], "optimizer": states[1], "engine": engine}, checkpoint_id=folder)
    return weights(model), moments(optimizer), engine.epsilon(), engine.clipping.sensitivity


def moments(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    found = [state["exp_avg"] for state in optimizer.state.values()]
    return [(each.full_tensor() if hasattr(each, "full_tensor") else each).clone() for each in found]


def resumed(folder: Path) -> tuple[Tensor, list[Tensor], float, float, int]:
    """The same of a new engine that takes it all back, and how many steps it counts after three more."""
    model, optimizer = model_and_optimizer()
    found = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(found, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    engine = runs.engine_for(model, optimizer, examples(), **OPTIONS)
    dcp.load({"engine": engine}, checkpoint_id=folder)
    there = weights(model), moments(optimizer), engine.epsilon(), engine.clipping.sensitivity
    for batch in engine.batches():
        engine.step(batch, runs.losses_of)
    return *there, engine.steps_taken


def on(ranks: int, work: Any, folder: Path) -> Any:
    return on_ranks(work, folder, ranks)


@pytest.mark.parametrize(("first", "second"), [(2, 1), (1, 2), (2, 2)])
@pytest.mark.one_in(math.inf)
def test_a_run_goes_on_with_another_number_of_ranks(first: int, second: int, tmp_path: Path) -> None:
    place = tmp_path / "checkpoint"
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    before = on(first, partial(saved, place), tmp_path / "first")[0]
    for after in on(second, partial(resumed, place), tmp_path / "second"):
        torch.testing.assert_close(after[:2], before[:2], rtol=0, atol=0)
        assert after[2:] == (*before[2:], 6)


def test_what_is_no_state_of_an_engine_is_refused() -> None:
    engine = runs.engine_for(runs.network(torch.float64), None, examples())
    for state in ({}, {"progress": "{}"}, {"progress": "1"}, {"progress": None}):
        with pytest.raises(PrivacyError, match=r"takes what engine.state_dict\(\) gave"):
            engine.load_state_dict(state)


def test_an_engine_of_another_configuration_is_refused() -> None:
    state = runs.engine_for(runs.network(torch.float64), None, examples(), noise_multiplier=1.0).state_dict()
    other = runs.engine_for(runs.network(torch.float64), None, examples(), noise_multiplier=2.0)
    with pytest.raises(PrivacyError, match=r"noise_multiplier is 1\.0 in it and 2\.0 here"):
        other.load_state_dict(state)
