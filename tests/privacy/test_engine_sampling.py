"""The engine's sampling schemes: what is charged is what the sampler did, and forecasts go on from there."""

import math
from typing import Any

import private_runs as runs
import pytest
import torch

from ghostclip import accounting
from ghostclip.engine import PrivacyEngine
from ghostclip.events import SAMPLINGS

OPTIONS: dict[str, dict[str, Any]] = {
    "poisson": {},
    "without_replacement": {},
    "truncated": {"max_batch_size": 11},
    "cyclic_poisson": {},
    "cyclic": {},
}


def trained(epochs: int = 1, **options: Any) -> PrivacyEngine:
    engine = runs.engine_for(runs.network(), **{"noise_multiplier": 6.0, "clipping": 1.0, **options})
    for _ in range(epochs):
        runs.train(engine)
    return engine


@pytest.mark.parametrize("neighboring", ["add_or_remove_one", "replace_one"])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.one_in(3)
def test_epsilon_is_that_of_the_sampling_and_the_relation(sampling: str, neighboring: str) -> None:
    engine = trained(sampling=sampling, neighboring=neighboring, **OPTIONS[sampling])
    (event,) = engine.events
    # One band of cyclic Poisson sampling is Poisson sampling.
    charged = "poisson" if sampling == "cyclic_poisson" else sampling
    assert (event.sampling, event.relation, event.count) == (charged, neighboring, 3)  # type: ignore[union-attr]
    options = {"dataset_size": 24, **OPTIONS[sampling]} if sampling == "truncated" else {}
    setting: dict[str, Any] = {"noise_multiplier": 6.0, "sample_rate": 8 / 24, "steps": 3, "delta": 1e-5, **options}
    expected = accounting.epsilon(**setting, sampling=sampling, neighboring=neighboring)
    assert engine.epsilon() == expected
    assert (engine.sampling, engine.neighboring) == (sampling, neighboring)
    assert f"({neighboring})" in engine.guarantee()
    assert f"epsilon {expected:.4g} (PLD)" in engine.guarantee()


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_a_forecast_is_what_more_steps_will_have_spent(accountant: str) -> None:
    engine = trained()
    foretold = engine.forecast(3, accountant=accountant)
    assert engine.forecast(0, accountant=accountant) == engine.epsilon(accountant=accountant) < foretold
    assert engine.forecast(3, delta=1e-3, accountant=accountant) < foretold
    runs.train(engine)
    # By PLD a later call adds to what an earlier one composed, and rounds up.
    assert foretold <= engine.epsilon(accountant=accountant) <= foretold * (1 + 1e-3 * (accountant == "pld"))


@pytest.mark.parametrize("steps", [-1, 2.5, math.nan, math.inf, True, "3", None])
def test_a_forecast_checks_its_arguments(steps: Any) -> None:
    engine = runs.engine_for(runs.network(), noise_multiplier=1.0)
    with pytest.raises((ValueError, TypeError), match=r"^steps must be a whole number >= 0"):
        engine.forecast(steps)
    with pytest.raises(ValueError, match=r"^delta must be "):
        engine.forecast(1, delta=2.0)


def test_a_forecast_without_private_noise_is_infinite() -> None:
    engine = runs.engine_for(runs.network(), noise_multiplier=1.0, noise="test", seed=1)
    assert engine.forecast(1) == engine.forecast(0) == engine.epsilon() == math.inf
    assert engine.guarantee().endswith("nothing was released")


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_sums_are_divided_by_the_public_size_under_every_sampling(sampling: str) -> None:
    engine = runs.engine_for(runs.network(), sampling=sampling, **OPTIONS[sampling])
    found: list[torch.Tensor] = []
    runs.on_step(engine.optimizer, lambda: found.append(runs.grads(engine.model)))
    examples = runs.gather(engine, next(batch for batch in engine.batches() if sum(batch.sizes)))
    engine.optimizer.step()
    expected = torch.cat([total.flatten() / 8 for total in runs.clipped_sum(runs.network(), examples, runs.HUGE)])
    assert torch.allclose(found[0], expected, rtol=1e-4, atol=1e-6)
