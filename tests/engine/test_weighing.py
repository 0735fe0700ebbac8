"""Weights of a clipping function that follow from other examples' norms are refused; those of each alone are not."""

from typing import Any

import private_runs as runs
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from ghostclip import PrivacyError
from ghostclip.clipping import Custom


class Joint:
    """A policy of one's own whose bound holds for each share, and whose weights follow from the largest norm."""

    sensitivity = 1.0

    def weights(self, norms: torch.Tensor) -> torch.Tensor:
        return (1.0 / norms.max()).expand_as(norms)


@pytest.mark.parametrize("clipping", [
    Joint(),
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


def test_weights_that_follow_from_each_example_alone() -> None:
    dataset = runs.data()
    dataset.tensors[0][3] = float("nan")
    options = {"clipping": Custom(lambda norms: 1.0 / (0.1 + norms).sqrt(), 1.0), "max_physical_batch_size": 5}
    assert len(runs.train(runs.engine_for(runs.network(), None, dataset, batch_size=24, **options))) == 1


@pytest.mark.parametrize("rest", [1e-3, 1e-5, 1e-7])
@pytest.mark.parametrize("groups", [None, {"all": ["*"]}])
@pytest.mark.parametrize("second_pass", ["cached", "reweight"])
def test_a_margin_for_rounding_is_no_weight_of_other_examples(rest: float, groups: Any, second_pass: str) -> None:
    """Positions that cancel make the norm that is weighed by another one than the norm that was measured."""
    signs = torch.tensor([1.0, -1.0 - rest]).repeat(4)
    inputs, targets = 1e3 * torch.randn(8, 1, 6).expand(8, 8, 6), torch.randn(8, 1, 4) * signs[:, None]

    def alone(norms: Any) -> Any:
        return 1.0 / (0.1 + norms).sqrt() if groups is None else {g: 1.0 / (0.1 + n) for g, n in norms.items()}

    options = {"clipping": Custom(alone, 1.0, groups), "second_pass": second_pass}
    engine = runs.engine_for(nn.Linear(6, 4), dataset=TensorDataset(inputs, targets), **options)
    assert runs.train(engine, loss_fn=lambda model, batch: (model(batch[0]) * batch[1]).sum((1, 2)))
