"""A batch is refused, or exact, whatever batches of the same graph came before it."""

import pytest
import torch
from late_programs import MIXING, MOVING, late_program
from law_checks import assert_letters
from torch import nn
from torch.nn import functional as F

import ghostclip


@pytest.mark.parametrize("name", MIXING)
def test_mixing_that_begins_in_the_third_batch_is_refused_there(name):
    assert_letters(late_program(name, "EERERR"))


@pytest.mark.parametrize("name", MOVING)
def test_rows_that_come_in_another_order_from_the_third_batch_on_are_exact(name):
    assert_letters(late_program(name, "EEEEEE"))


NONE = torch.tensor([-1, -1])


@pytest.mark.parametrize(
    "term",
    [
        lambda prior, label: F.multi_margin_loss(prior[None], label[None]),
        lambda prior, label: F.multilabel_margin_loss(prior[None], torch.cat([label[None], NONE])[None]),
        lambda prior, label: F.soft_margin_loss(prior, (2.0 * label - 3).expand(3)),
        lambda prior, label: F.nll_loss(prior[None].log_softmax(1), label[None]),
    ],
)
def test_a_loss_of_a_parameter_and_the_largest_label_of_the_batch_is_not_made_of_parameters_alone(term):
    model = nn.Sequential(nn.Linear(5, 3))
    model.register_parameter("prior", nn.Parameter(torch.zeros(3)))

    def losses(model, batch):
        return model(batch[0]).square().sum(1) + term(model.prior, batch[1].max())

    with pytest.raises(ghostclip.UnsupportedModelError, match="examples mix"):
        ghostclip.GhostClipper(model).clip(losses, (torch.randn(8, 5), torch.arange(8) // 3))
