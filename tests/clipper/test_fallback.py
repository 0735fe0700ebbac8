"""Modules nobody wrote a rule for: bare Parameters, parametrized weights, own forwards; exact, or refused."""

import copy

import oracle
import pytest
import torch
from case_fallback import Gated, OwnCell, with_parameters
from case_models import Wired
from case_types import project
from cases import case
from comparing import assert_close, assert_dicts_close, assert_exact, batch, gradients, truth
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import ghostclip
from ghostclip import UnsupportedModelError

every_pass = pytest.mark.parametrize("second_pass", ["reweight", "cached"])
EACH_LAYER = ghostclip.clipping.PerLayer(1.0)


def test_a_parametrization_put_on_after_wrapping():
    model = ghostclip.wrap(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2)).double())
    parametrizations.weight_norm(model[0])
    assert_exact(model, batch(4, 5))


def test_spectral_norm_in_train_mode_is_the_gradient_at_the_vectors_it_came_to():
    model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(5, 8)), nn.Linear(8, 2)).double()
    clipper, x = ghostclip.GhostClipper(model, clipping=1e9), batch(4, 5)
    losses = project(model(x))
    clipper.backward(losses)
    found = gradients(model)
    expected = oracle.per_example_grads(model.eval(), project, (x,))
    assert_dicts_close(found, {name: each.sum(0) for name, each in expected.items()}, 1e-10)


def test_a_forward_of_ones_own_that_uses_the_parents_weight_again():
    class Doubled(nn.Linear):
        def forward(self, x):
            return super().forward(torch.tanh(F.linear(x, self.weight))) * self.bias

    assert_exact(nn.Sequential(nn.Linear(3, 5), Doubled(5, 5)).double(), batch(4, 3))


def test_the_same_parameter_given_twice_to_one_operation():
    model = with_parameters(lambda m, x: m.layer(x + torch.stack([m.p] * len(x))), {"p": (6, 5)}, layer=nn.Linear(5, 5))
    assert_exact(model.double(), batch(4, 6, 5))


def test_keywords_and_results_of_any_kind_pass_through():
    model = ghostclip.wrap(OwnCell().double())
    found = model(batch(4, 6, 5), scale=0.25)
    assert list(found) == ["last", "squared"]
    twin = ghostclip.unwrap(copy.deepcopy(model))
    assert all(torch.equal(found[key], value) for key, value in twin(batch(4, 6, 5), scale=0.25).items())


@every_pass
def test_dropout_inside_draws_what_torch_draws(second_pass):
    model = with_parameters(lambda m, x: F.dropout(x @ m.p, 0.4) @ m.q, {"p": (5, 9), "q": (9, 2)}).double()
    clipper, x = ghostclip.GhostClipper(model, clipping=1.0, second_pass=second_pass), batch(6, 5)
    torch.manual_seed(3)
    losses = project(model(x))
    each = [torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for loss in losses]
    expected = torch.stack([torch.cat([part.flatten() for part in parts]).norm() for parts in each])
    assert_close(clipper.backward(losses).norms, expected, 1e-10)


@every_pass
@pytest.mark.parametrize("clipping", [1.0, EACH_LAYER], ids=["flat", "each layer"])
def test_batches_of_every_size_one_after_the_other(second_pass, clipping):
    row = case("vision transformer")
    model = ghostclip.wrap(row.model())
    clipper = ghostclip.GhostClipper(model, clipping=clipping, second_pass=second_pass)
    for size in (4, 1, 7, 8, 0, 3, 6, 5):
        model.zero_grad()
        losses = row.losses(model(*row.inputs(size)))
        norms = clipper.norms(losses, retain_graph=True)
        assert_close(norms, oracle.norms(truth(row, size)), 1e-10)
        result = clipper.backward(losses)
        if clipping == 1.0:
            assert_dicts_close(gradients(model), oracle.clipped_sum(truth(row, size), 1.0), 1e-10)
        else:
            assert set(result.norms) == {name.rpartition(".")[0] for name, _ in model.named_parameters()}


def test_a_graph_is_freed_as_any_other():
    model = with_parameters(lambda m, x: x * m.p, {"p": (5,)}).double()
    clipper = ghostclip.GhostClipper(model)
    losses = project(model(batch(4, 5)))
    clipper.norms(losses)
    with pytest.raises(ghostclip.StaleInputError):
        clipper.norms(losses)


def test_a_tensor_changed_in_place_is_refused():
    model = with_parameters(lambda m, x: m.layer(x) @ m.p, {"p": (5, 2)}, layer=nn.Linear(5, 5)).double()
    clipper, x = ghostclip.GhostClipper(model), batch(4, 5)
    hidden = model.layer(x)
    losses = project(hidden @ model.p)
    hidden.detach().mul_(2)
    with pytest.raises(ghostclip.StaleInputError):
        clipper.norms(losses)


MIXING = {
    "centred": lambda m, x: (lambda h: h - h.mean(0))(x * m.p),
    "centred product": lambda m, x: (lambda h: h - h.mean(0))(x @ m.q),
    "pairs": lambda m, x: (lambda h: h @ h.T)(x @ m.q),
    "normalised by the batch": lambda m, x: F.batch_norm(x, None, None, m.p, training=True),
    "pairwise distances": lambda m, x: (m.layer(x)[:, None] - (x * m.p)[None]).square().sum(-1),
}


@pytest.mark.parametrize("name", MIXING)
def test_examples_that_mix_are_refused(name):
    model = with_parameters(MIXING[name], {"p": (5,), "q": (5, 3)}, layer=nn.Linear(5, 5)).double()
    with pytest.raises(UnsupportedModelError, match="mix"):
        ghostclip.GhostClipper(model).backward(model(batch(4, 5)).square().mean(1))
    assert all(p.grad is None for p in model.parameters())


def test_a_bias_put_together_of_parameters_and_a_constant():
    whole = lambda m, x: x.repeat(1, 1, 3) * torch.cat([m.q, m.zeros, m.v])  # noqa: E731
    model = with_parameters(whole, {"q": (4,), "v": (4,)}).double()
    model.register_buffer("zeros", torch.zeros(4, dtype=torch.float64), persistent=False)
    assert_exact(model, batch(4, 6, 4))
    del model.zeros
    model.zeros = batch(4)
    model.zero_grad()
    assert_exact(model, batch(4, 6, 4))


def test_a_table_scaled_by_how_often_the_batch_reads_a_row_is_refused():
    read = lambda m, i: F.embedding(i, m.p, scale_grad_by_freq=True)  # noqa: E731
    model = with_parameters(read, {"p": (7, 4)}).double()
    with pytest.raises(UnsupportedModelError, match="mixes examples; leave scale_grad_by_freq out"):
        ghostclip.GhostClipper(model).norms(project(model(torch.randint(7, (4, 6)))))


def test_complex_parameters_are_refused():
    model = nn.Sequential(nn.Linear(3, 4))
    model[0].register_parameter("phase", nn.Parameter(torch.zeros(4, dtype=torch.complex64)))
    (finding,) = ghostclip.check(model)
    assert "complex" in str(finding)
    assert finding.path == "0"


def test_explain_names_what_has_no_rule():
    plan = {f"{row.layer}.{row.parameter}": row.rule for row in ghostclip.GhostClipper(Gated(nn)).explain()}
    assert plan[".gate"] == "fallback (Gated)"
    assert plan["project.weight"] == "Linear"


def test_one_module_in_two_places_with_a_parameter_of_its_own():
    inner = with_parameters(lambda m, x: torch.tanh(m.layer(x) + m.p), {"p": (5,)}, layer=nn.Linear(5, 5))
    assert_exact(Wired(lambda m, x: m.second(m.first(x)), first=inner, second=inner).double(), batch(4, 6, 5))
