"""Weights of groups in a second first pass, made because another example was not finite in the first one."""

import pytest
import torch

from ghostclip.clipper.groupwise import GroupSums
from ghostclip.norms.term import Dense
from ghostclip.planner import Planner


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_a_norm_that_only_this_pass_finds_not_finite_has_weight_zero(wrong):
    """Numbers whose squares overflow below a gradient of zero: one kernel finds a norm of 0, another inf * 0."""
    parameter, gradients = torch.nn.Parameter(torch.zeros(2)), torch.tensor([[3.0, 4.0], [0.0, 0.0], [1.0, 0.0]])
    finite = torch.tensor([True, True, False])
    sums = GroupSums({id(parameter): "group"}, {"group": 0.5}, None, finite, torch.float32, Planner())
    part = (id(parameter), None)
    sums.expect([part])
    sums.add([part], torch.tensor([25.0, wrong, 1.0]), None, Dense(gradients))
    sums.finalize()
    assert sums.weights["group"].tolist() == pytest.approx([0.1, 0.0, 0.0], rel=1e-5)
    ((_, total),) = sums.pop()
    torch.testing.assert_close(total, torch.tensor([0.3, 0.4]))
