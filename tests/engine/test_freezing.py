"""Parameters may be frozen and thawed between logical batches; the noise tells nothing of the batch."""

import statistics

import private_runs as runs
import pytest
import torch
from torch import nn

from ghostclip.clipping import ByParameter, Composed, EqualNoise, Fixed, PerLayer, ProportionalNoise

POLICIES = {
    "thresholds by pattern": lambda: PerLayer(thresholds={"*": 1.0}),
    "by parameter": lambda: Composed(partition=ByParameter(), thresholds=Fixed(1.0)),
    "equal noise": lambda: Composed(noise=EqualNoise()),
}


def spread(policy, thaws, seed):
    """Whether the batch after the change of what is trained is empty, and the spread of its step in one parameter."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 3), nn.Linear(3, 1000))
    model[0].requires_grad_(not thaws)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = runs.engine_for(
        model, optimizer, batch_size=1, noise_multiplier=1.0, clipping=policy, noise="test", seed=seed, self_check=False
    )
    batches = iter(engine.batches())
    engine.step(next(batches), runs.losses_of)
    model[0].requires_grad_(thaws)
    before, batch = model[2].weight.detach().clone(), next(batches)
    empty = not batch.sizes
    engine.step(batch, runs.losses_of)
    return empty, float((model[2].weight.detach() - before).std())


@pytest.mark.parametrize("thaws", [True, False], ids=["thawed", "frozen"])
@pytest.mark.parametrize("name", POLICIES)
def test_empty_batches_get_the_noise_of_others(name, thaws):
    found = [spread(POLICIES[name](), thaws, seed) for seed in range(16)]
    empty, others = ([each for is_empty, each in found if is_empty == wanted] for wanted in (True, False))
    assert statistics.mean(empty) == pytest.approx(statistics.mean(others), rel=0.03)


def test_a_group_without_trained_parameters_is_refused_before_the_charge():
    """Where the noise of each group was given, nothing of such a step could be released."""
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 3))
    policy = Composed(noise=ProportionalNoise({"0": 2.0, "1": 1.0}))
    engine = runs.engine_for(model, noise_multiplier=1.0, clipping=policy)
    runs.train(engine, 1)
    model[0].requires_grad_(False)
    with pytest.raises(ValueError, match="a group whose parameters are all frozen is none"):
        runs.train(engine, 1)
    assert engine.steps_taken == 1
