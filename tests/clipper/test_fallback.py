"""Modules nobody wrote a rule for: what the laws don't say of the programs of support/outside_programs.py."""

import copy

import pytest
import torch
from case_fallback import Gated, OwnCell, with_parameters
from case_types import project
from comparing import assert_exact, batch
from torch import nn
from torch.nn.utils import parametrizations

import ghostclip


def test_a_parametrization_put_on_after_wrapping():
    model = ghostclip.wrap(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2)).double())
    parametrizations.weight_norm(model[0])
    assert_exact(model, batch(4, 5))


def test_keywords_and_results_of_any_kind_pass_through():
    model = ghostclip.wrap(OwnCell().double())
    found = model(batch(4, 6, 5), scale=0.25)
    assert list(found) == ["last", "squared"]
    twin = ghostclip.unwrap(copy.deepcopy(model))
    assert all(torch.equal(found[key], value) for key, value in twin(batch(4, 6, 5), scale=0.25).items())


@pytest.mark.parametrize("changed", [False, True], ids=["freed", "changed in place"])
def test_a_graph_that_is_stale_is_refused(changed):
    model = with_parameters(lambda m, x: x * m.p, {"p": (5,)}).double()
    clipper, hidden = ghostclip.GhostClipper(model), batch(4, 5).requires_grad_().tanh()
    losses = project(hidden * model.p)
    if changed:
        hidden.detach().mul_(2)
    else:
        clipper.norms(losses)
    with pytest.raises(ghostclip.StaleInputError):
        clipper.norms(losses)


def test_explain_names_what_has_no_rule():
    plan = {f"{row.layer}.{row.parameter}": row.rule for row in ghostclip.GhostClipper(Gated(nn)).explain()}
    assert plan[".gate"] == "fallback (Gated)"
    assert plan["project.weight"] == "Linear"
