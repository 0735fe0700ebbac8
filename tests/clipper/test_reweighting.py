"""How far down the passes of a step go: the sums above that are exact, whichever gradients were kept."""

from typing import Any

import oracle
import pytest
import torch
from case_fallback import with_parameters
from case_models import Wired
from comparing import assert_close, assert_dicts_close, every_pass, gradients
from torch import Tensor, nn

import ghostclip
from ghostclip.clipper.collector import Keep

MAX_NORM = 0.05


def residual(m: Any, inputs: Tensor) -> Tensor:
    """Losses [B] of a network with branches that meet again, so that its lowest layer is hard to find."""
    first, second, third, beside, last = m.layers
    hidden = torch.tanh(first(inputs))
    hidden = hidden + torch.tanh(second(hidden))
    ahead, _ = m.over_time(hidden)
    hidden = third(ahead) * torch.sigmoid(beside(inputs)) + hidden
    return last(hidden).square().mean((1, 2))


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.one_in(8)
def test_the_second_backward_ends_at_the_lowest_layer_that_has_to_be_summed(seed, monkeypatch):
    """Whichever parameters are kept, the sums of the others are exact."""
    layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(5)])
    over_time = nn.LSTM(6, 6, num_layers=2, bidirectional=True, proj_size=3, batch_first=True)
    model, inputs = Wired(residual, layers=layers, over_time=over_time).double(), torch.randn(5, 4, 6).double()
    grads = oracle.per_example_grads(model, lambda losses: losses, (inputs,))
    clipper = ghostclip.GhostClipper(ghostclip.wrap(model), MAX_NORM)
    kept = torch.rand(100, generator=torch.Generator().manual_seed(seed)) < (seed % 4 + 1) / 5
    parameters = {id(p): bool(kept[number]) for number, p in enumerate(model.parameters())}
    first_pass = clipper.passes.first_pass

    def keeps_some(losses: Tensor, keep: Keep, **options: object) -> object:
        """A first pass that kept those parameters, and no others."""
        run = first_pass(losses, retain_graph=True)
        run.holds_graph = True
        other = first_pass(losses, Keep.MATERIALISED, retain_graph=True)
        run.kept = {parts: term for parts, term in other.kept.items() if parameters[parts[0][0]]}
        return run

    monkeypatch.setattr(clipper.passes, "first_pass", keeps_some)
    losses = model(inputs)
    clipper.backward(losses)
    assert_dicts_close(gradients(model), oracle.clipped_sum(grads, MAX_NORM), 1e-10)
    with pytest.raises(ghostclip.StaleInputError, match="freed"):
        first_pass(losses, retain_graph=False)


@every_pass
def test_adapters_start_below_the_last_place_where_examples_enter(second_pass):
    """Of bare LoRA matrices the first has no gradient until the second moves; no layer is below either."""
    torch.manual_seed(2)
    wiring = lambda m, x: (x + x @ m.first @ m.second).square().sum(1)  # noqa: E731
    model = with_parameters(wiring, {"first": (4, 2), "second": (2, 4)}, layer=nn.Identity()).double()
    model.second.data.zero_()
    clipper = ghostclip.GhostClipper(model, MAX_NORM, second_pass=second_pass)
    for number in range(7):
        x = torch.randn(5, 4, dtype=torch.float64)
        model.zero_grad()
        norms = clipper.backward(model(x)).norms
        each = oracle.per_example_grads(model, lambda losses: losses, [x])
        assert_close(norms, oracle.norms(each), 1e-10)
        assert_dicts_close(gradients(model), oracle.clipped_sum(each, MAX_NORM), 1e-10)
        if number == 4:
            model.second.data.normal_()
