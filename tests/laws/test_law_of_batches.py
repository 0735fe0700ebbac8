"""Each batch of a program is exact or refused, as it must be, whatever batches of the same graph came before it."""

import pytest
import torch
from late_programs import MIXING, MOVING, late_program
from law_checks import assert_letters
from moving_programs import MOVES, PARTS
from open_programs import LENGTHS, OPEN, STEPS
from torch import nn
from torch.nn import functional as F
from trap_programs import TRAPS

import ghostclip


@pytest.mark.parametrize("program", TRAPS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.one_in(8)
def test_traps(program, dtype):
    """That a stored layout, or marks read carelessly, get wrong."""
    assert_letters(program, dtype)


@pytest.mark.parametrize("name", [*MIXING, *MOVING])
@pytest.mark.one_in(3)
def test_what_is_late(name):
    """Mixing that begins in the third batch is refused there; rows in another order from there on are exact."""
    assert_letters(late_program(name, "EERERR" if name in MIXING else "EEEEEE"))


@pytest.mark.parametrize("program", [*PARTS, *LENGTHS, *OPEN, *STEPS, *MOVES], ids=str)
@pytest.mark.one_in(24)
def test_moves(program):
    """Rows that are moved in some batches only, and rows that gradients don't settle at first."""
    assert_letters(program, torch.float64)


LOSSES = [
    lambda prior, label: F.multi_margin_loss(prior[None], label[None]),
    lambda prior, label: F.multilabel_margin_loss(prior[None], torch.cat([label[None], torch.tensor([-1, -1])])[None]),
    lambda prior, label: F.soft_margin_loss(prior, (2.0 * label - 3).expand(3)),
    lambda prior, label: F.nll_loss(prior[None].log_softmax(1), label[None]),
]


@pytest.mark.parametrize("term", LOSSES)
@pytest.mark.one_in(2)
def test_a_loss_of_a_parameter_and_the_largest_label_of_the_batch_is_not_made_of_parameters_alone(term):
    model = nn.Sequential(nn.Linear(5, 3))
    model.register_parameter("prior", nn.Parameter(torch.zeros(3)))

    def losses(model, batch):
        return model(batch[0]).square().sum(1) + term(model.prior, batch[1].max())

    with pytest.raises(ghostclip.UnsupportedModelError, match="examples mix"):
        ghostclip.GhostClipper(model).clip(losses, (torch.randn(8, 5), torch.arange(8) // 3))
