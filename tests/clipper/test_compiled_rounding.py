"""One example moves a compiled sum by at most the bound, also where float32 leaves nothing but rounding of it.

The models and batches are those of tests/laws/test_rounding.py; trials are run on batches where nothing cancels, after
which the graph is what clips.
"""

import math

import cancelling_models as cancelling
import pytest
import torch
from cancelling_models import MAX_NORM, SHARE, FanOut, TiedHead, Twice
from graphs import interpret
from torch import nn

import ghostclip
from ghostclip.clipping import PerLayer
from ghostclip.compiled import clip as compiling
from ghostclip.compiled import trial
from ghostclip.compiled.plan import GraphPlan

# Each with the losses, and what makes batches of the model.
CASES = {
    "positions": (lambda: nn.Linear(512, 512), cancelling.squared_error,
                  lambda model: cancelling.positions_batches(model, 512, 8)),
    "a layer used twice": (lambda: Twice(64), cancelling.squared_error,
                           lambda model: cancelling.positions_batches(model, 64, 8)),
    "tied": (TiedHead, cancelling.tied_losses, lambda model: cancelling.tied_batches(9)),
    "branches": (lambda: FanOut(1 - 2**-23), lambda model, inputs: model(inputs),
                 lambda model: cancelling.fan_out_batches(3, (5,))),
}  # fmt: skip


def plain(batch):
    """A batch of the same shapes where nothing cancels."""
    return tuple(torch.randint(50, x.shape) if x.dtype == torch.int64 else torch.randn(x.shape) for x in batch)


def worst(case, clipping=MAX_NORM, **options):
    """The farthest that the last example of a batch moves a graph's sum, over the bound."""
    make, losses, batches = case
    torch.manual_seed(0)
    model = ghostclip.wrap(make())
    clipper = ghostclip.GhostClipper(model, clipping, compile=True, **options)
    eager = ghostclip.GhostClipper(model, clipping)

    def of(model, batch):
        *given, factors = batch
        return losses(model, *given) * factors

    found = 0.0
    for place, batch in enumerate(list(batches(model))[::3]):
        last = torch.zeros(len(batch[0]))
        last[-1] = 1.0
        for _ in range(0 if place else compiling.TRIALS + 2):
            model.zero_grad()
            clipper.clip(of, (*plain(batch), torch.ones(len(last))))
        model.zero_grad()
        norm = float(eager.norms(of(model, (*batch, last)))[-1])
        factor = 2.0 ** math.ceil(math.log2(10 * MAX_NORM / norm)) if 0 < norm < math.inf else 1.0
        clipper.clip(of, (*batch, factor * last))
        found = max(found, sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None))
    assert clipper.compiled.refusals == []
    assert clipper.compiled.graphs  # batches to which one gives no result, since a norm overflows, run without it
    return found**0.5 / MAX_NORM


@pytest.mark.parametrize("name", CASES)
@pytest.mark.one_in(math.inf)
def test_gradients_that_cancel_in_graphs(name, monkeypatch):
    """Of Gram forms that cancel a graph gives no result, and such batches run without it."""
    interpret(monkeypatch)
    monkeypatch.setattr(compiling, "MOST_WITHOUT_RESULT", 1000)
    assert worst(CASES[name], norm_strategy="gram") <= SHARE
    assert worst(CASES[name], second_pass="cached", norm_strategy="direct") <= SHARE
    assert worst(CASES[name], PerLayer(MAX_NORM)) <= SHARE


@pytest.mark.slow
@pytest.mark.parametrize("name", ["positions", "tied", "branches"])
def test_gradients_that_cancel_in_graphs_of_inductor(name, monkeypatch):
    note = trial.Trial.note
    monkeypatch.setattr(trial.Trial, "note", lambda self, took, eager, *rest: note(self, 0.0, 1.0, *rest))
    assert worst(CASES[name], norm_strategy="direct") <= SHARE


def test_rounding_to_narrow_gradients_counts_as_without_compiling(monkeypatch):
    """A graph's sums are rounded to p.grad as those of `backward` are, and the sensitivity has room for it."""
    interpret(monkeypatch)
    bounds = []
    for compile in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).bfloat16()
        clipper = ghostclip.GhostClipper(ghostclip.wrap(model), 0.5, compile=compile)
        for _ in range(6):
            x = torch.randn(8, 5, dtype=torch.bfloat16)
            result = clipper.clip(lambda model, x: model(x).float().square().sum(1), x)
        bounds.append((result.sensitivity, clipper.sensitivity))
    assert clipper.compiled.graphs == 1
    assert bounds[0] == bounds[1]
    assert bounds[0][0] > 0.5


@pytest.mark.parametrize("turning", [True, False])
def test_a_unit_that_rounding_turns_does_not_speak_against_a_graph(turning, monkeypatch):
    """A difference counts where it is more than eager sums change by when parameters change by rounding.

    What a ReLU is given here is zero but for rounding; beside a Tanh the same difference is none that rounding makes.
    """
    interpret(monkeypatch)
    run = GraphPlan.run

    def off(plan, asked, keep):
        found = run(plan, asked, keep)
        found.sums = [1.01 * each for each in found.sums]
        return found

    monkeypatch.setattr(GraphPlan, "run", off)
    torch.manual_seed(0)
    first = nn.Linear(6, 40, bias=False)
    with torch.no_grad():
        first.weight[:, 3:] = -first.weight[:, :3]
    model = nn.Sequential(first, nn.ReLU() if turning else nn.Tanh(), nn.Dropout(0.2), nn.Linear(40, 3))
    x, before = torch.randn(8, 3).repeat(1, 2), [each.clone() for each in model.parameters()]
    versions = [each._version for each in model.parameters()]
    clipper = ghostclip.GhostClipper(ghostclip.wrap(model), 1.0, compile=True)
    for _ in range(6):
        clipper.clip(lambda model, x: (model(x) - 1).square().sum(1), x)
    assert [each._version for each in model.parameters()] == versions
    assert all(map(torch.equal, model.parameters(), before))
    assert bool(clipper.compiled.refusals) != turning
    assert turning or "differ from eager's by 0.01" in clipper.compiled.refusals[0]
