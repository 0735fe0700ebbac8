"""check with a batch: where examples meet is found, the module and the line of code; nothing is left behind."""

import inspect
import pickle
import re
from contextlib import nullcontext

import pytest
import torch
from case_models import By
from torch import nn
from torch.nn import functional as F

import ghostclip
from ghostclip.errors import UnsupportedModelError

EXAMPLES = 5
torch.manual_seed(0)
BATCH = torch.randn(EXAMPLES, 6), torch.arange(EXAMPLES) % 3


class Network(nn.Module):
    """A linear layer, what a test has in between, with parts of its own, and a head."""

    def __init__(self, between=lambda m, h: h, **parts):
        super().__init__()
        self.low, self.table, self.head = nn.Linear(6, 6), nn.Parameter(torch.randn(6, 6)), nn.Linear(6, 3)
        self.router, self.experts = nn.Linear(6, 2), nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.between, self.parts = between, nn.ModuleDict(parts)

    def forward(self, x):
        return self.head(self.between(self, torch.tanh(self.low(x))))


def centred(m, h):
    return h - h.mean(0)  # the line


def of_another_row(m, h):
    return h + h.detach().roll(1, 0)  # the line


def shared(m, h):
    """A product of parameters alone, where nothing is as long as the batch."""
    both = torch.cat([h.flatten(), m.table[0]])  # the line
    return h + both[:-6].view_as(h) + both[-6:]


def capacity(m, h):
    gates, found = m.router(h).softmax(1), torch.zeros_like(h)
    for number, expert in enumerate(m.experts):
        first = gates[:, number].topk(2).indices
        found = found.index_add(0, first, expert(h[first]))  # the line
    return found


def functional(m, h):
    return F.batch_norm(h, None, None, training=True)  # the line


def attention(m, h):
    """Scores [B, T, T] with as many positions as examples, before the mean of the batch."""
    rows = h[:, :EXAMPLES, None]
    h = h + torch.softmax(rows @ rows.transpose(1, 2), 2).sum((1, 2))[:, None]
    return h - h.mean(0)  # the line


def dropped(m, h):
    """Dropout starts from memory that nothing was written to."""
    for _ in range(3):
        h = F.dropout(h + torch.empty_like(h).fill_(1.0), 0.2)
    return h - h.mean(0)  # the line


def losses(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def contrastive(model, batch):
    found = model(batch[0])
    logits = found @ found.T  # the line
    return F.cross_entropy(logits, torch.arange(EXAMPLES), reduction="none")


def weighed(model, batch):
    found = losses(model, batch)
    return found / found.detach().sum()  # the line


def broadcast(model, batch):
    """Outputs [B, 1] and labels [B]."""
    return (model(batch[0]).sum(1, keepdim=True) - batch[1]).square().mean(1)  # the line


def time_first(m, h):
    """Four positions of each example, through a layer that takes these for examples."""
    found = m.parts["inner"](h[:, None].expand(-1, 4, -1))
    return (found[0] if isinstance(found, tuple) else found).mean(1)


def line_in(where):
    """The line that is marked: file, number and text."""
    source, first = inspect.getsourcelines(where)
    (number,) = [n for n, text in enumerate(source) if text.rstrip().endswith("# the line")]
    return f"test_check_lines.py:{first + number}: {source[number].strip()}"


OF_LOSSES = {"problem": "the loss of example 1 depends on the data of example 0$",
             "remedy": "^compute each loss from its own example only"}  # fmt: skip
LINES = {
    centred: {
        "problem": "^Network: what it gives for example 1 depends on", "remedy": "treats each example by itself",
    },
    shared: {
        "problem": "^one example's loss depends on rows of others in what CatBackward0", "remedy": "its own example",
    },
    of_another_row: {}, capacity: {}, functional: {}, attention: {}, dropped: {},
    contrastive: OF_LOSSES, weighed: OF_LOSSES,
    broadcast: {
        "problem": r"^the loss function makes \[B, B\] of two shapes",
        "remedy": r"^give both one shape, by outputs\[:, 0\]",
    },
}  # fmt: skip


@pytest.mark.parametrize("where", LINES)
def test_the_line_is_found(where):
    of_loss = where in (contrastive, weighed, broadcast)
    model, loss_fn = (Network(), where) if of_loss else (Network(where), losses)
    (finding,) = ghostclip.check(model, loss_fn, BATCH)
    assert finding.path == ""
    assert finding.line.endswith(line_in(where))
    assert finding.line in str(finding)
    assert re.search(LINES[where].get("problem", "."), finding.problem)
    assert re.search(LINES[where].get("remedy", "."), finding.remedy)


BATCH_NORM = "^BatchNorm1d: normalizes by the mean and variance of the batch"
FIRST = "build it with batch_first=True"
MODULES = {
    "the innermost that was running": (lambda: By(Network(centred)), "operation", "^Network: what it gives", "."),
    "batch norm": (lambda: Network(norm=nn.BatchNorm1d(6)), "parts.norm", BATCH_NORM, "GroupNorm"),
    "lstm": (lambda: Network(time_first, inner=nn.LSTM(6, 6)), "parts.inner", ".", FIRST),
    "encoder": (lambda: Network(time_first, inner=nn.TransformerEncoderLayer(6, 2, 8)), "parts.inner.*", ".", FIRST),
    "of the last example": (
        lambda: nn.Sequential(By(lambda x: x + x[-1:].detach()), nn.Linear(6, 3)), "0", "data of example 4$", ".",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "path", "problem", "remedy"), MODULES.values(), ids=MODULES)
def test_the_module_is_named_with_the_remedy(make, path, problem, remedy):
    (finding,) = ghostclip.check(make(), losses, BATCH)
    assert re.fullmatch(path, finding.path)
    assert re.search(problem, finding.problem)
    assert re.search(remedy, finding.remedy)


def failing(model, batch):
    losses(model, batch)
    raise KeyError("labels")


def state(model):
    """What a check might change, and whether hooks are left."""
    hooked = any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    values = {name: value.clone() for name, value in model.state_dict().items()}
    kinds = [(type(module), module.training) for module in model.modules()]
    return values, [hooked, torch.is_anomaly_enabled(), kinds, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize(
    ("loss_fn", "parts"),
    [(losses, {}), (losses, {"norm": nn.BatchNorm1d(6)}), (failing, {})],
    ids=["exact", "with a finding", "that fails"],
)
def test_nothing_is_left_behind(loss_fn, parts):
    model, (inputs, _) = Network(**parts), BATCH
    numbers, before, kept = torch.get_rng_state(), state(model), inputs.clone()
    for _ in range(2):
        with pytest.raises(KeyError) if loss_fn is failing else nullcontext():
            assert len(ghostclip.check(model, loss_fn, BATCH)) == len(parts)
    torch.testing.assert_close(state(model)[0], before[0], rtol=0, atol=0)
    assert state(model)[1] == before[1]
    assert torch.equal(torch.get_rng_state(), numbers)
    assert torch.equal(inputs, kept)


def test_outside_of_check_a_refusal_says_the_same_without_a_line():
    with pytest.raises(UnsupportedModelError, match=r"low: .*examples mix") as caught:
        ghostclip.GhostClipper(Network(centred)).clip(losses, BATCH)
    assert caught.value.name == "low"
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


class Remembers(nn.Module):
    """Keeps a mean of what it has seen, in place or in a new tensor, and how often it was called."""

    def __init__(self, in_place):
        super().__init__()
        self.in_place = in_place
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        if self.training and self.in_place:
            self.mean.copy_(x.mean(0))
        elif self.training:
            self.mean = x.mean(0)
        return x


@pytest.mark.parametrize("in_place", [True, False])
def test_a_buffer_that_keeps_something_of_the_data_is_found(in_place):
    model = nn.Sequential(Remembers(in_place), nn.Linear(6, 3))
    mean, calls = model[0].mean, model[0].calls
    (finding,) = ghostclip.check(model, losses, BATCH)
    assert finding.path == "0"
    assert "buffer '0.mean'" in finding.problem
    assert model[0].mean is mean
    assert mean.abs().sum() == calls == 0
    assert ghostclip.check(model.eval(), losses, BATCH) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_data_without_a_finite_example_are_a_finding(value):
    model, (inputs, labels) = Network(), BATCH
    (finding,) = ghostclip.check(model, losses, (torch.full_like(inputs, value), labels))
    assert "no example's loss and gradient are finite" in finding.problem
    one = torch.cat([inputs[:1], torch.full_like(inputs[1:], value)])  # is clipped and trained on
    assert ghostclip.check(model, losses, (one, labels)) == []


def test_losses_with_a_gradient_of_their_own_are_checked():
    def penalized(model, batch):
        x = batch[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return losses(model, batch) + slope.square().sum(1)

    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
    assert ghostclip.check(model, penalized, BATCH) == []
    mixing = nn.Sequential(By(lambda x: x - x.mean(0)), *model)
    assert [finding.path for finding in ghostclip.check(mixing, penalized, BATCH)] == ["0"]
