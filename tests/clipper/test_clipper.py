"""GhostClipper: what its answers promise beyond the table of layer cases."""

import copy
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


def test_explain_names_every_layer_and_says_what_the_strategies_stand_for():
    _, clipper, losses = ready(case("cnn"))
    clipper.norms(losses)
    table, text = clipper.explain(), str(clipper.explain())
    assert [row.layer for row in table] == [name for name in "0379" for _ in ("weight", "bias")]
    assert all(f"\n{row.layer}  {row.parameter}  " in re.sub(" +", "  ", text) for row in table)
    assert all(f"\n{row.strategy}: " in text for row in table)


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
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("retain_graph", [False, True])
def test_hooks_on_tensors_change_gradients_and_break_nothing(second_pass, trained, retain_graph):
    """A freed graph has no gradients to give them."""
    model = Hooked(trained).double()
    words = torch.arange(12).view(4, 3)
    grads = oracle.per_example_grads(model, lambda losses: losses, (words,))
    clipper = ghostclip.GhostClipper(ghostclip.wrap(model), 0.01, second_pass=second_pass, memory_budget=1)
    for _ in range(3):
        model.zero_grad()
        result = clipper.backward(model(words), retain_graph=retain_graph)
        assert_close(result.norms, oracle.norms(grads), 1e-10)
        assert_dicts_close(gradients(model), oracle.clipped_sum(grads, 0.01), 1e-10)
    assert any(grad is not None for grad in model.seen)


@every_pass
@pytest.mark.parametrize(
    "lookup",
    [
        lambda table, words, sparse: F.embedding(words, table, sparse=sparse).sum(1),
        lambda table, words, sparse: F.embedding_bag(words, table, mode="sum", sparse=sparse),
    ],
    ids=["embedding", "embedding_bag"],
)
def test_sparse_lookups_in_a_bare_table_give_the_sums_of_dense_ones(second_pass, lookup):
    words, found = torch.randint(0, 7, (5, 4)), []
    for sparse in (False, True):
        torch.manual_seed(0)
        model = with_parameters(lambda m, i, sparse=sparse: lookup(m.table, i, sparse), {"table": (7, 3)})
        clipper = ghostclip.GhostClipper(model, 0.5, second_pass=second_pass)
        clipper.backward(model(words).square().sum(1))
        found.append(model.table.grad)
    assert_close(found[1], found[0], 1e-6)
