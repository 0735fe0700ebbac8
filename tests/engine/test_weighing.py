"""Weights of a clipping function that follow from other examples' norms are refused; those of each alone are not."""

from types import SimpleNamespace
from typing import Any

import private_runs as runs
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from ghostclip import PrivacyError
from ghostclip.clipping import Adaptive, Composed, Custom, JointBound, Quantiles
from ghostclip.clipping.weighing import refuse_joint_weights


def over_the_largest(norms: torch.Tensor) -> torch.Tensor:
    return (1.0 / norms.max()).expand_as(norms)


@pytest.mark.parametrize("clipping", [
    SimpleNamespace(sensitivity=1.0, weights=over_the_largest),  # a policy of one's own
    Custom(lambda norms: norms / norms.max(), 1.0),
    Custom(lambda norms: (norms <= norms.median()).float(), 1.0),
    Custom(lambda norms: (norms == norms.max()).float(), 1.0),
    Custom(lambda norms: norms / norms.view(-1, 2).sum(1).repeat_interleave(2), 1.0),
    Custom(lambda norms: {g: 1.0 / n.sum().expand_as(n) for g, n in norms.items()}, 1.0, groups={"all": ["*"]}),
])  # fmt: skip
def test_weights_that_follow_from_other_examples(clipping: Any) -> None:
    engine = runs.engine_for(runs.network(), clipping=clipping, batch_size=24, noise_multiplier=1.0)
    before = runs.weights(engine.model)
    with pytest.raises(PrivacyError, match=r"function of the Custom clipping policy.*that example's norm alone"):
        runs.train(engine)
    assert torch.equal(runs.weights(engine.model), before)
    assert engine.steps_taken == 0


class Remembers:
    """A bound that follows a running mean of all norms so far, slowly."""

    sensitivity = 1.0

    def __init__(self) -> None:
        self.mean = 1.0

    def weights(self, norms: torch.Tensor) -> torch.Tensor:
        self.mean += 1e-4 * float(norms.mean() - self.mean)
        return self.mean / (self.mean + norms) / norms


class Largest:
    """Bounds nothing, and states what it has seen."""

    sensitivity = 1e-6

    def weights(self, norms: torch.Tensor) -> torch.Tensor:
        self.sensitivity = max(self.sensitivity, float(norms.max()))
        return torch.ones_like(norms)


def test_a_sensitivity_that_follows_from_norms() -> None:
    engine = runs.engine_for(runs.network(), clipping=Largest(), batch_size=24, noise_multiplier=1.0)
    with pytest.raises(PrivacyError, match=r"the sensitivity of Largest, .*was 1e-06 when the engine was built"):
        runs.train(engine)
    assert engine.steps_taken == 0


@pytest.mark.parametrize("part", ["partition_rule", "rule", "scaling", "noise"])
def test_parts_of_a_composed_policy_stay(part: str) -> None:
    policy = Composed()
    with pytest.raises(AttributeError, match=f"{part} of a Composed policy stays as it was given"):
        setattr(policy, part, over_the_largest)


@pytest.mark.parametrize("wrapped", [False, True])
def test_weights_that_follow_from_earlier_batches(wrapped: bool) -> None:
    """Slowly: the calls of one batch give nearly the same."""
    clipping = Custom(Remembers().weights, 1.0) if wrapped else Remembers()
    engine = runs.engine_for(runs.network(), clipping=clipping, batch_size=24, noise_multiplier=1.0)
    with pytest.raises(PrivacyError, match="other weights than in the first batch, so it remembers something"):
        runs.train(engine, steps=100)
    assert engine.steps_taken > 1


def in_place(norms: Any) -> Any:
    """Weights of each norm alone, which leaves other norms behind."""
    if isinstance(norms, dict):
        return {group: in_place(norm) for group, norm in norms.items()}
    return 1.0 / (norms.clamp_(max=0.01) + 0.1)


@pytest.mark.parametrize("clipping", [
    SimpleNamespace(sensitivity=1.0, weights=in_place),
    Custom(in_place, 1.0),
    Custom(in_place, 1.0, groups={"all": ["*"]}),
    Composed(thresholds=JointBound(in_place, 1.0)),
    Composed(scaling=lambda norms, limits: in_place(norms) + 0 * limits.fill_(1e9)),
])  # fmt: skip
def test_norms_that_a_function_changes_are_clipped_as_they_were(clipping: Any) -> None:
    data = runs.data()
    engine = runs.engine_for(runs.network(), None, data, clipping=clipping, batch_size=24, noise_multiplier=0.0)
    batch = next(iter(engine.batches()))
    for examples in batch.physical():
        result = engine.backward(runs.losses_of(engine.model, examples))
        norms, weights = (found if isinstance(found, dict) else {"": found} for found in (result.norms, result.weights))
        whole = torch.stack([norms[group].double() * weights[group].double() for group in norms]).norm(dim=0)
        assert (whole <= engine.clipping.sensitivity).all()
        assert float(max(norm.max() for norm in norms.values())) > 1
    batch.discard()


def test_a_small_difference_in_all_rows_is_one_of_the_sum() -> None:
    """Of a mean over thousands of norms one norm is a small part, which moves every weight."""
    norms = torch.ones(8192)
    norms[5] = 5.0
    with pytest.raises(PrivacyError, match="that example's norm alone"):
        refuse_joint_weights(Custom(lambda norms: 0.9 * norms.clamp(max=5.0).mean() / norms, 1.0), norms)
    refuse_joint_weights(Custom(lambda norms: (-norms).exp() / (0.1 + norms).sqrt(), 1.0), 3 * torch.rand(8192))


@pytest.mark.parametrize("rest", [1e-3, 1e-5, 1e-7])
@pytest.mark.parametrize("groups", [None, {"all": ["*"]}])
@pytest.mark.parametrize("second_pass", ["cached", "reweight"])
@pytest.mark.one_in(3)
def test_a_margin_for_rounding_is_no_weight_of_other_examples(rest: float, groups: Any, second_pass: str) -> None:
    """Positions that cancel make the norm that is weighed by another one than the norm that was measured."""
    signs = torch.tensor([1.0, -1.0 - rest]).repeat(4)
    inputs, targets = 1e3 * torch.randn(8, 1, 6).expand(8, 8, 6), torch.randn(8, 1, 4) * signs[:, None]

    def alone(norms: Any) -> Any:
        return 1.0 / (0.1 + norms).sqrt() if groups is None else {g: 1.0 / (0.1 + n) for g, n in norms.items()}

    options = {"clipping": Custom(alone, 1.0, groups), "second_pass": second_pass}
    engine = runs.engine_for(nn.Linear(6, 4), dataset=TensorDataset(inputs, targets), **options)
    assert runs.train(engine, loss_fn=lambda model, batch: (model(batch[0]) * batch[1]).sum((1, 2)))


class Gentle(Adaptive):
    """Whose weights don't keep to the norm."""

    def weights(self, norms: torch.Tensor) -> torch.Tensor:
        return self.max_norm / (0.1 * norms + self.max_norm)


def test_subclasses_that_nothing_bounds_are_refused() -> None:
    """Whose counts could be any."""
    for make in (lambda: Gentle(1.0), lambda: Composed(thresholds=type("Own", (Quantiles,), {})(1.0))):
        with pytest.raises(TypeError, match=r"subclass of .* counts"):
            runs.engine_for(runs.network(), clipping=make())


@pytest.mark.parametrize(
    ("clipping", "later"),
    [
        (Adaptive(1.0, count_noise=10.0), 1e-3),
        (Composed(thresholds=Quantiles(1.0, count_noise=10.0)), 1e-3),
        (Adaptive(1.0), 0.3),  # 0.4 by default, at batches of 8
        (Composed(thresholds=Quantiles(1.0)), 0.3),
    ],
)
def test_counts_get_the_noise_that_is_charged(clipping: Any, later: float) -> None:
    engine = runs.engine_for(runs.network(), clipping=clipping, noise_multiplier=1.0)
    runs.train(engine, 1)
    getattr(engine.clipping, "rule", engine.clipping).count_noise = later
    before = runs.weights(engine.model)
    with pytest.raises(PrivacyError, match="less noise than is charged: count_noise was changed"):
        runs.train(engine, 1)
    assert engine.steps_taken == 1
    assert torch.equal(runs.weights(engine.model), before)
