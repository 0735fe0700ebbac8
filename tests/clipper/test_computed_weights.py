"""Computed weights, and modules nobody wrote a rule for: what the laws don't say of them."""

import copy

import oracle
import pytest
import torch
from case_fallback import OwnCell, with_parameters
from case_types import project
from comparing import assert_close, assert_dicts_close, assert_exact, batch, every_pass, gradients
from computed_programs import COMPUTED, FORMS, Skeleton, called
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import ghostclip
from ghostclip import GhostClipper, UnsupportedModelError


@pytest.mark.parametrize("program", [p for p in COMPUTED if p.name.startswith(("linear", "convolution"))][::4], ids=str)
def test_explain_says_so_and_an_empty_batch_has_norms(program):
    clipper = GhostClipper(program.model(torch.float64), clipping=ghostclip.clipping.PerLayer(1.0))
    x = program.inputs(0, torch.float64)[0][:0]
    assert all(norms.shape == (0,) for norms in clipper.norms(project(clipper.model(x)), per="parameter").values())
    clipper.norms(program.losses_of(clipper.model, 0, torch.float64))
    assert any(row.rule.endswith("(computed weight)") for row in clipper.explain())


def along_a_direction():
    """Of dL/dv only what rounding leaves is left: its norm is measured from the gradient itself."""
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(5, 1)), nn.Linear(1, 1)).double()
    return model, "0.parametrizations.weight.original1"


def of_rank_one():
    """The weight's gradient is a multiple of the weight; digits are measured again."""
    model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(5, 1)), nn.Linear(1, 1)).double().eval()
    weight = model[0].parametrizations.weight
    weight[0]._u.fill_(1.0)
    weight[0]._v.copy_(weight.original[0].detach() / weight.original.detach().norm())
    return model, "0.parametrizations.weight.original"


@every_pass
@pytest.mark.parametrize("make", [along_a_direction, of_rank_one])
def test_an_input_along_a_normalised_weight(make, second_pass):
    model, name = make()
    x = model.get_parameter(name).detach() * torch.tensor([[1.0], [1.0 + 1e-7]], dtype=torch.float64)
    x[1, 0] += 1e-7
    expected = oracle.per_example_grads(model, project, (x,))
    clipper = GhostClipper(model, clipping=1.0, second_pass=second_pass)
    norms = clipper.norms(project(model(x)), per="parameter")[name]
    assert_close(norms[1:], expected[name].flatten(1).norm(dim=1)[1:], 1e-6)
    clipper.backward(project(model(x)))
    assert_dicts_close(gradients(model), oracle.clipped_sum(expected, 1.0), 1e-10)


def test_spectral_norm_steps_its_vectors_once_a_forward_and_has_the_gradient_there():
    plain, model = (nn.Sequential(parametrizations.spectral_norm(nn.Linear(5, 8))).double() for _ in range(2))
    model.load_state_dict(plain.state_dict())
    clipper, x = GhostClipper(model, clipping=1e9), batch(4, 5)
    for _ in range(3):
        outputs = model(x)
        assert torch.equal(outputs, plain(x))
    clipper.backward(project(outputs))
    found = gradients(model)
    expected = oracle.per_example_grads(model.eval(), project, (x,))
    assert_dicts_close(found, {name: each.sum(0) for name, each in expected.items()}, 1e-10)


X = batch(4, 3)


def losses_of(model, x):
    return model(x).square().sum(1)


@pytest.mark.parametrize("name", FORMS)
def test_check_has_nothing_to_say_of_a_functional_call(name):
    assert ghostclip.check(called(name).double(), losses_of, X) == []


def test_functional_parameters_of_another_module_are_refused_by_name():
    model = Skeleton(lambda m, h: functional_call(m.skeleton, dict(m.other.named_parameters()), (h,)))
    model.other = nn.Linear(5, 5)
    clipper = GhostClipper(model.double())
    with pytest.raises(UnsupportedModelError, match="skeleton was given other tensors in the place of its parameters"):
        clipper.norms(losses_of(model, X))
    (problem,) = ghostclip.check(model, losses_of, X)
    assert "functional_call" in str(problem)


def test_functional_parameters_of_its_own_are_its_own_unless_they_are_exchanged_after_the_forward():
    model = nn.Sequential(nn.Linear(3, 2)).double()
    clipper, own = GhostClipper(model), dict(model.named_parameters())
    losses = functional_call(model, own, (X,)).square().sum(1)
    torch.testing.assert_close(clipper.norms(losses), oracle.norms_by_single_losses(model, losses_of(model, X)))
    losses = functional_call(model, own, (X,)).square().sum(1)
    model[0].weight = nn.Parameter(torch.zeros(2, 3, dtype=torch.float64))
    with pytest.raises(UnsupportedModelError, match="or these were exchanged since"):
        clipper.norms(losses)


def test_a_parametrization_put_on_after_wrapping():
    model = ghostclip.wrap(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2)).double())
    parametrizations.weight_norm(model[0])
    assert_exact(model, batch(4, 5))


PLACES = torch.tensor([[0, 1, 3, 4], [2, 2, 0, 4]])


def changed_at_places(m, x):
    """The few trained entries of a frozen weight, as SHiRA of peft adds them."""
    return F.linear(x, m.weight.clone() + torch.sparse_coo_tensor(PLACES, m.p, (5, 5), check_invariants=True))


def along_edges(m, x):
    """A weight whose rows are exchanged along the edges of a fixed graph."""
    return x @ torch.sparse.mm(m.edges, m.p)


SPARSE = {"weight": (changed_at_places, (4,)), "buffer": (along_edges, (5, 3))}


@pytest.mark.parametrize("name", SPARSE)
def test_weights_computed_from_sparse_tensors(name):
    wiring, shape = SPARSE[name]
    model = with_parameters(wiring, {"p": shape, "weight": (5, 5)}).double()
    model.weight.requires_grad_(False)
    model.register_buffer("edges", torch.eye(5, dtype=torch.float64).roll(1, 0).to_sparse())
    assert_exact(model, batch(4, 5))
    model.zero_grad()
    assert GhostClipper(model).verify(lambda model, x: project(model(x)), batch(4, 5)) < 1e-10


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
