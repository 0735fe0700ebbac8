"""GhostClipper: what its answers promise beyond the table of layer cases."""

import copy
import io

import oracle
import pytest
import torch
from case_models import Wired, two_linears
from case_types import project
from cases import case
from comparing import assert_close, assert_dicts_close, gradients, ready, truth, typical_norm
from torch import nn

import ghostclip

every_pass = pytest.mark.parametrize("second_pass", ["reweight", "cached"])
some_models = pytest.mark.parametrize("name", ["mlp in place", "cnn", "transformer", "lstm decoder", "tied head"])


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


@every_pass
def test_a_huge_max_norm_gives_the_ordinary_gradient(second_pass):
    row = case("transformer")
    model, clipper, losses = ready(row, clipping=1e9, second_pass=second_pass)
    result = clipper.backward(losses)
    plain = row.model()
    row.losses(plain(*row.inputs())).sum().backward()
    assert torch.equal(result.weights, torch.ones_like(result.weights))
    assert_dicts_close(gradients(model), gradients(plain), 1e-10)


def test_an_example_without_gradient_has_weight_one_and_adds_nothing():
    row = case("embedding only padding")
    model, clipper, losses = ready(row)
    result = clipper.backward(losses)
    assert torch.equal(result.norms, torch.zeros(4))
    assert torch.isfinite(result.weights).all()
    assert not gradients(model)["weight"].any()


@some_models
def test_retained_graph_serves_every_call(name):
    _, clipper, losses = ready(case(name))
    expected = truth(case(name))
    norms = clipper.norms(losses, retain_graph=True)
    layers = clipper.norms(losses, per="layer", retain_graph=True)
    grads = clipper.per_example_grads(losses, retain_graph=True)
    result = clipper.backward(losses, retain_graph=True)
    assert_close(clipper.norms(losses), norms, 1e-12)
    assert_close(torch.stack(list(layers.values())).norm(dim=0), norms, 1e-12)
    assert_dicts_close(grads, expected, 1e-10)
    assert_close(result.norms, norms, 1e-12)


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


@some_models
def test_a_copy_of_a_wrapped_model_is_a_model_of_its_own(name):
    row = case(name)
    model, clipper, losses = ready(row)
    copied = copy.deepcopy(model)
    clipper.backward(losses)
    assert all(p.grad is None for p in copied.parameters())
    other = ghostclip.GhostClipper(copied, clipping=1.0)
    other.backward(row.losses(copied(*row.inputs())))
    assert_dicts_close(gradients(copied), oracle.clipped_sum(truth(row), 1.0), 1e-10)


@some_models
def test_a_saved_state_loads_into_a_plain_model(name):
    row, file = case(name), io.BytesIO()
    model, clipper, losses = ready(row)
    clipper.backward(losses)
    torch.save(model.state_dict(), file)
    file.seek(0)
    plain = row.build(nn).double()
    plain.load_state_dict(torch.load(file, weights_only=True))
    assert_close(row.losses(plain(*row.inputs())), losses, 1e-12)


@every_pass
def test_training_steps_follow_the_loop(second_pass):
    row = case("mlp in place")
    model, clipper, _ = ready(row, second_pass=second_pass)
    reference = row.model()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9) for m in (model, reference)]
    for seed in range(4):
        inputs = row.inputs(seed=seed)
        clipper.backward(row.losses(model(*inputs)))
        expected = oracle.clipped_sum(oracle.per_example_grads(reference, row.losses, inputs), 1.0)
        for name, parameter in reference.named_parameters():
            parameter.grad = expected[name]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_dicts_close(dict(model.named_parameters()), dict(reference.named_parameters()), 1e-10)


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


@pytest.mark.parametrize(
    ("argument", "error"),
    [
        ({"clipping": 0.0}, ValueError),
        ({"clipping": float("nan")}, ValueError),
        ({"clipping": "flat"}, TypeError),
        ({"second_pass": "both"}, ValueError),
        ({"norm_strategy": "fast"}, ValueError),
        ({"memory_budget": -1}, ValueError),
    ],
)
def test_arguments_out_of_range_are_named(argument, error):
    (name,) = argument
    with pytest.raises(error, match=name):
        ghostclip.GhostClipper(two_linears(), **argument)


def test_an_unknown_kind_of_norms_is_named():
    model = ghostclip.wrap(two_linears())
    with pytest.raises(ValueError, match="per"):
        ghostclip.GhostClipper(model).norms(model(torch.randn(2, 3).double()).sum(1), per="tensor")


def test_explain_names_every_layer_and_the_strategies():
    _, clipper, losses = ready(case("cnn"))
    clipper.norms(losses)
    table = str(clipper.explain())
    assert all(name in table for name in ("0", "3", "7", "9", "Conv2d", "Linear"))
    assert "gram" in table.lower() or "direct" in table.lower()


class Hooked(nn.Module):
    """Losses [B]; hooks on what is between its layers, and on the scores, double gradients and note them."""

    def __init__(self, trained: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.dense, self.head = nn.Embedding(30, 4), nn.Linear(4, 4), nn.Linear(4, 30)
        self.head.requires_grad_(trained)
        self.seen: list[torch.Tensor | None] = []

    def twice(self, grad: torch.Tensor) -> torch.Tensor:
        self.seen.append(grad)
        return grad * 2

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.dense(self.words(words))
        scores = self.head(hidden.softmax(2))
        for tensor in (hidden, scores):
            if tensor.requires_grad:
                tensor.register_hook(self.twice)
        return scores.log_softmax(2).square().mean((1, 2))


@every_pass
@pytest.mark.parametrize("layers", [False, True])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("retain_graph", [False, True])
def test_hooks_on_tensors_change_gradients_and_break_nothing(second_pass, layers, trained, retain_graph):
    """A freed graph has no gradients to give them."""
    model = Hooked(trained).double()
    words = torch.arange(12).view(4, 3)
    grads = oracle.per_example_grads(model, lambda losses: losses, (words,))
    policy = ghostclip.clipping.PerLayer(0.01) if layers else 0.01
    clipper = ghostclip.GhostClipper(ghostclip.wrap(model), policy, second_pass=second_pass, memory_budget=1)
    for _ in range(3):
        model.zero_grad()
        result = clipper.backward(model(words), retain_graph=retain_graph)
        weights = result.weights if layers else dict.fromkeys(["words", "dense", "head"], result.weights)
        norms = result.norms if layers else dict.fromkeys(["words", "dense", "head"], result.norms)
        for name, found in gradients(model).items():
            layer = name.partition(".")[0]
            torch.testing.assert_close(found, torch.einsum("b,b...->...", weights[layer], grads[name]))
            own = {n: g for n, g in grads.items() if n.startswith(layer) or not layers}
            assert_close(norms[layer], oracle.norms(own), 1e-10)
    assert any(grad is not None for grad in model.seen)
