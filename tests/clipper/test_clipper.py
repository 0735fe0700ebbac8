"""GhostClipper: what its answers promise beyond the table of layer cases, and what must never pass silently."""

import copy
import gc
import re

import oracle
import pytest
import torch
from case_fallback import with_parameters
from case_models import Wired, two_linears
from case_types import project
from cases import case
from comparing import assert_close, assert_dicts_close, every_pass, gradients, ready, truth, typical_norm
from torch import nn
from torch.nn import functional as F

import ghostclip
from ghostclip import GhostClipError, GradientLeakError, LossShapeError, StaleInputError

CALLS = ["norms", "per_example_grads", "backward"]


@every_pass
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_example_contributes_more_than_the_sensitivity(second_pass, dtype):
    row, max_norm = case("cnn"), 0.5 * typical_norm(truth(case("cnn")))
    model, clipper, losses = ready(row, dtype, 1, max_norm, second_pass=second_pass)
    result = clipper.backward(losses)
    contribution = torch.cat([value.double().flatten() for value in gradients(model).values()]).norm()
    assert result.sensitivity == pytest.approx(max_norm, rel=1e-5)
    assert float(contribution) <= result.sensitivity * (1 + 1e-6)
    assert float(contribution) >= max_norm * (1 - 1e-4)
    assert bool((result.weights * result.norms <= result.sensitivity).all())


def test_two_forwards_before_the_first_backward():
    row = case("cnn")
    model, clipper, first = ready(row)
    second = row.losses(model(*row.inputs(batch=3, seed=5)))
    other = oracle.per_example_grads(row.model(), row.losses, row.inputs(batch=3, seed=5))
    assert_close(clipper.norms(first), oracle.norms(truth(row)), 1e-10)
    assert_close(clipper.norms(second), oracle.norms(other), 1e-10)


@every_pass
def test_losses_from_two_forwards_of_the_same_examples(second_pass):
    model = two_linears()
    x, y = torch.randn(2, 5, 3, dtype=torch.float64)
    twice = Wired(lambda m, a, b: (m.body(a), m.body(b)), body=model)
    found = oracle.per_example_grads(twice, project, (x, y))
    expected = {name.removeprefix("body."): grad for name, grad in found.items()}
    clipper = ghostclip.GhostClipper(model, clipping=0.5, second_pass=second_pass)
    clipper.backward(project((model(x), model(y))))
    assert_dicts_close(gradients(model), oracle.clipped_sum(expected, 0.5), 1e-10)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_forwards_without_gradients_leave_nothing_behind(mode):
    row = case("lstm decoder")
    model, clipper, losses = ready(row)
    with mode():
        outputs = model(*row.inputs(batch=7))
    assert outputs.grad_fn is None
    assert_close(clipper.norms(losses), oracle.norms(truth(row)), 1e-10)
    assert_close(clipper.norms(row.losses(model(*row.inputs()))), oracle.norms(truth(row)), 1e-10)


def test_a_copy_of_a_wrapped_model_is_a_model_of_its_own():
    row = case("lstm decoder")
    model, clipper, losses = ready(row)
    copied = copy.deepcopy(model)
    clipper.backward(losses)
    assert all(p.grad is None for p in copied.parameters())
    other = ghostclip.GhostClipper(copied, clipping=1.0)
    other.backward(row.losses(copied(*row.inputs())))
    assert_dicts_close(gradients(copied), oracle.clipped_sum(truth(row), 1.0), 1e-10)


def test_parameters_frozen_after_wrapping():
    row = case("cnn")
    model, clipper, _ = ready(row)
    model[0].requires_grad_(False)
    expected = {name: grad for name, grad in truth(row).items() if not name.startswith("0.")}
    assert_dicts_close(clipper.per_example_grads(row.losses(model(*row.inputs()))), expected, 1e-10)
    clipper.backward(row.losses(model(*row.inputs())))
    assert model[0].weight.grad is None


def test_keyword_inputs_to_layers():
    row = case("attention self")
    model = ghostclip.wrap(row.model())
    (x,) = row.inputs()
    outputs = model.attention(key=x, value=x, query=x)
    clipper = ghostclip.GhostClipper(model)
    assert_dicts_close(clipper.per_example_grads(project(outputs)), truth(row), 1e-10)


@pytest.mark.parametrize("argument", [{"second_pass": "both"}, {"norm_strategy": "fast"}, {"memory_budget": -1}])
def test_arguments_out_of_range_are_named(argument):
    with pytest.raises(ValueError, match=next(iter(argument))):
        ghostclip.GhostClipper(two_linears(), **argument)


def test_explain_names_every_layer_and_says_what_the_strategies_stand_for():
    _, clipper, losses = ready(case("cnn"))
    clipper.norms(losses)
    table, text = clipper.explain(), str(clipper.explain())
    assert [row.layer for row in table] == [name for name in "0379" for _ in ("weight", "bias")]
    assert all(f"\n{row.layer}  {row.parameter}  " in re.sub(" +", "  ", text) for row in table)
    assert all(f"\n{row.strategy}: " in text for row in table)


@every_pass
@pytest.mark.parametrize(("trained", "retain_graph"), [(False, False), (True, False), (True, True)])
def test_hooks_on_tensors_change_gradients_and_break_nothing(second_pass, trained, retain_graph):
    """A freed graph has no gradients to give them."""
    seen = []

    def twice(grad):
        seen.append(grad)
        return grad * 2

    def wiring(m, words):
        hidden = m.dense(m.words(words))
        scores = m.head(hidden.softmax(2))
        for tensor in (hidden, scores):
            if tensor.requires_grad:
                tensor.register_hook(twice)
        return scores.log_softmax(2).square().mean((1, 2))

    model = Wired(wiring, words=nn.Embedding(30, 4), dense=nn.Linear(4, 4), head=nn.Linear(4, 30)).double()
    model.head.requires_grad_(trained)
    words = torch.arange(12).view(4, 3)
    grads = oracle.per_example_grads(model, lambda losses: losses, (words,))
    clipper = ghostclip.GhostClipper(ghostclip.wrap(model), 0.01, second_pass=second_pass, memory_budget=1)
    for _ in range(3):
        model.zero_grad()
        result = clipper.backward(model(words), retain_graph=retain_graph)
        assert_close(result.norms, oracle.norms(grads), 1e-10)
        assert_dicts_close(gradients(model), oracle.clipped_sum(grads, 0.01), 1e-10)
    assert any(grad is not None for grad in seen)


LOOKUPS = {
    "embedding": lambda table, words, sparse: F.embedding(words, table, sparse=sparse).sum(1),
    "embedding_bag": lambda table, words, sparse: F.embedding_bag(words, table, mode="sum", sparse=sparse),
}


@every_pass
@pytest.mark.parametrize("lookup", LOOKUPS.values(), ids=LOOKUPS)
def test_sparse_lookups_in_a_bare_table_give_the_sums_of_dense_ones(second_pass, lookup):
    words, found = torch.randint(0, 7, (5, 4)), []
    for sparse in (False, True):
        torch.manual_seed(0)
        model = with_parameters(lambda m, i, sparse=sparse: lookup(m.table, i, sparse), {"table": (7, 3)})
        clipper = ghostclip.GhostClipper(model, 0.5, second_pass=second_pass)
        clipper.backward(model(words).square().sum(1))
        found.append(model.table.grad)
    assert_close(found[1], found[0], 1e-6)


# What must never pass silently ---


@pytest.mark.parametrize(
    ("wrong", "remedy"),
    [
        (lambda out: out.sum(1, keepdim=True), r"take \[:, 0\] of them"),
        (lambda out: out, "average over all dimensions but the first"),
        (lambda out: out.mean(), "reduction=.none."),
        (lambda out: out.sum(1).unsqueeze(0), "average over all dimensions but the first"),
        (lambda out: F.mse_loss(out, torch.zeros_like(out)), "reduction=.none."),
    ],
    ids=["[B, 1]", "[B, 2]", "scalar", "[1, B]", "mean loss"],
)
def test_losses_of_another_shape_are_refused_by_every_call(wrong, remedy):
    model = ghostclip.wrap(two_linears())
    clipper = ghostclip.GhostClipper(model)
    for call in (clipper.norms, clipper.per_example_grads, clipper.backward):
        with pytest.raises(LossShapeError, match=remedy) as error:
            call(wrong(model(torch.randn(5, 3).double())))
        assert "per example" in str(error.value)
        assert isinstance(error.value, ValueError)
    assert all(p.grad is None for p in model.parameters())


def test_parameters_are_no_losses():
    """Norms of zero would say that no example moves them."""
    model = nn.Linear(3, 4)
    clipper = ghostclip.GhostClipper(model)
    for call in (clipper.norms, clipper.per_example_grads, clipper.backward):
        with pytest.raises(LossShapeError, match="compute them from the batch"):
            call(model.bias)
    assert model.bias.grad is None


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", ["linear", "linear 3-D", "conv2d plain", "embedding repeated", "layernorm 3-D",
                                  "groupnorm 4-D", "lstm output", "gru output"])  # fmt: skip
def test_an_input_changed_in_place_is_noticed(name, call):
    row = case(name)
    model, clipper, _ = ready(row)
    (x,) = row.inputs()
    losses = row.losses(model(x))
    x.zero_()
    with pytest.raises(StaleInputError, match="in place"):
        getattr(clipper, call)(losses)
    assert all(p.grad is None for p in model.parameters())


def test_the_input_of_a_frozen_layer_may_change():
    row = case("frozen first")
    model, clipper, _ = ready(row)
    (x,) = row.inputs()
    losses = row.losses(model(x))
    x.zero_()
    assert_close(clipper.norms(losses), oracle.norms(truth(row)), 1e-10)


@pytest.mark.parametrize("second", CALLS)
@pytest.mark.parametrize("first", CALLS)
def test_a_freed_graph_is_named_with_its_remedy(first, second):
    _, clipper, losses = ready(case("mlp in place"))
    getattr(clipper, first)(losses)
    with pytest.raises(GhostClipError, match="retain_graph=True"):
        getattr(clipper, second)(losses)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_zeroed_gradient_is_no_leak(set_to_none):
    row = case("mlp in place")
    model, clipper, losses = ready(row)
    losses.sum().backward()
    model.zero_grad(set_to_none=set_to_none)
    for _ in range(2):
        clipper.backward(row.losses(model(*row.inputs())))
        assert_dicts_close(gradients(model), oracle.clipped_sum(truth(row), 1.0), 1e-10)
        model.zero_grad(set_to_none=set_to_none)


LEAKS = {
    "backward": lambda model, losses: losses.sum().backward(),
    "assignment": lambda model, losses: setattr(model[0].bias, "grad", torch.ones_like(model[0].bias)),
    "one parameter": lambda model, losses: model[0].bias.backward(torch.ones_like(model[0].bias)),
}


@every_pass
@pytest.mark.parametrize("leak", LEAKS.values(), ids=LEAKS)
@pytest.mark.parametrize("first", [True, False])
def test_a_gradient_from_elsewhere_is_refused_and_left_there(second_pass, leak, first):
    row = case("mlp in place")
    model, clipper, losses = ready(row, second_pass=second_pass)
    if not first:
        clipper.backward(losses)
    leak(model, row.losses(model(*row.inputs())))
    before = {name: value.clone() for name, value in gradients(model).items()}
    with pytest.raises(GradientLeakError, match="zero_grad"):
        clipper.backward(row.losses(model(*row.inputs())))
    assert all(torch.equal(value, before[name]) for name, value in gradients(model).items())


@pytest.mark.parametrize("norm_strategy", ["auto", "gram", "direct"])
def test_near_constant_inputs_do_not_cancel(norm_strategy):
    model = nn.Linear(8, 6, bias=False)
    x = 1.0 + 4e-4 * torch.randn(3, 256, 8)
    coefficients = torch.randn(3, 256, 6)
    coefficients -= coefficients.mean(dim=1, keepdim=True)
    exact = torch.einsum("btp,btd->bpd", coefficients.double(), x.double()).flatten(1).norm(dim=1)
    gram = ((x @ x.mT) * (coefficients @ coefficients.mT)).sum((1, 2)).abs().sqrt()
    assert float(((gram - exact) / exact).abs().max()) > 0.05, "the plain Gram form should fail here"
    clipper = ghostclip.GhostClipper(model, norm_strategy=norm_strategy)
    norms = clipper.norms((model(x) * coefficients).sum((1, 2)))
    assert_close(norms, exact, 1e-3)


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


@pytest.mark.parametrize("name", ["cnn", "transformer", "lstm decoder"])
def test_abandoned_forwards_leak_nothing(name):
    row = case(name)
    model, clipper, losses = ready(row)
    clipper.norms(losses)
    for _ in range(8):  # so many calls are noted
        model(*row.inputs(batch=3))
    before = live_tensors()
    for _ in range(3):
        model(*row.inputs(batch=3))
    assert live_tensors() <= before
    assert_close(clipper.norms(row.losses(model(*row.inputs()))), oracle.norms(truth(row)), 1e-10)


def test_unused_parameters_answer_zero_every_time():
    model, clipper, losses = ready(case("branches of the loss"))
    clipper.norms(losses)
    x = torch.randn(4, 5, dtype=torch.float64)
    per = clipper.norms(project(model.second(x)), per="parameter")
    assert list(per) == ["first.weight", "first.bias", "second.weight", "second.bias"]
    assert not per["first.weight"].any()
    assert per["second.weight"].all()
    grads = clipper.per_example_grads(project(model.second(x)))
    assert grads["first.weight"].shape == (4, 5, 5)
    assert not grads["first.weight"].any()


def test_gradients_lie_in_memory_as_their_parameters():
    """An optimizer takes half as long again where they don't: parameters in channels_last have such sums."""
    model = ghostclip.wrap(nn.Sequential(nn.Conv2d(4, 6, 3), nn.Flatten(), nn.Linear(24, 2)))
    images, expected = torch.randn(5, 4, 4, 4), {}
    for layout in (torch.contiguous_format, torch.channels_last):
        model.to(memory_format=layout)
        clipper = ghostclip.GhostClipper(model, 1.0)
        clipper.backward(model(images.to(memory_format=layout)).square().sum(1))
        for name, parameter in model.named_parameters():
            assert parameter.grad.stride() == parameter.stride()
            torch.testing.assert_close(parameter.grad, expected.setdefault(name, parameter.grad))
        model.zero_grad()
