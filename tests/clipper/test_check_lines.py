"""What check says of a model and a batch that can't be clipped exactly: the module, and the line of code."""

import inspect
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ghostclip
from ghostclip.errors import UnsupportedModelError

EXAMPLES = 5
torch.manual_seed(0)
BATCH = torch.randn(EXAMPLES, 6), torch.arange(EXAMPLES) % 3


class Network(nn.Module):
    """A linear layer, what a test has in between, and a head."""

    def __init__(self):
        super().__init__()
        self.low, self.table, self.head = nn.Linear(6, 6), nn.Parameter(torch.randn(6, 6)), nn.Linear(6, 3)
        self.router, self.experts = nn.Linear(6, 2), nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x):
        return self.head(self.between(torch.tanh(self.low(x))))

    def between(self, h):
        return h + self.experts[0](h) + self.experts[1](h) + self.router(h).sum(1, keepdim=True) + h @ self.table


class WithoutNorm(Network):
    def __init__(self):
        super().__init__()
        del self.norm


class Centred(WithoutNorm):
    def between(self, h):
        return h - h.mean(0)  # the line


class OfAnotherRow(WithoutNorm):
    def between(self, h):
        return h + h.detach().roll(1, 0)  # the line


class Shared(WithoutNorm):
    """A product of parameters alone, where nothing is as long as the batch."""

    def between(self, h):
        both = torch.cat([h.flatten(), self.table[0]])  # the line
        return h + both[:-6].view_as(h) + both[-6:]


class Capacity(WithoutNorm):
    def between(self, h):
        gates, found = self.router(h).softmax(1), torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            first = gates[:, number].topk(2).indices
            found = found.index_add(0, first, expert(h[first]))  # the line
        return found


class Functional(WithoutNorm):
    def between(self, h):
        return F.batch_norm(h, None, None, training=True)  # the line


def losses(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def contrastive(model, batch):
    found = model(batch[0])
    logits = found @ found.T  # the line
    return F.cross_entropy(logits, torch.arange(EXAMPLES), reduction="none")


def weighed(model, batch):
    found = losses(model, batch)
    return found / found.detach().sum()  # the line


def only_finding(kind, loss_fn=losses):
    torch.manual_seed(1)
    (finding,) = ghostclip.check(kind(), loss_fn, BATCH)
    return finding


def line_in(where):
    """The line that is marked: file, number and text."""
    source, first = inspect.getsourcelines(where)
    (number,) = [n for n, text in enumerate(source) if text.rstrip().endswith("# the line")]
    return f"test_check_lines.py:{first + number}: {source[number].strip()}"


@pytest.mark.parametrize("kind", [Centred, OfAnotherRow, Shared, Capacity, Functional])
def test_the_line_of_a_forward_is_found(kind):
    finding = only_finding(kind)
    assert finding.line.endswith(line_in(kind.between))
    assert finding.line in str(finding)
    assert finding.problem
    assert finding.remedy


@pytest.mark.parametrize("loss_fn", [contrastive, weighed])
def test_the_line_of_a_loss_function_is_found(loss_fn):
    finding = only_finding(WithoutNorm, loss_fn)
    assert finding.line.endswith(line_in(loss_fn))
    assert finding.problem == "the loss of example 1 depends on the data of example 0"


@pytest.mark.parametrize(
    ("kind", "path", "problem", "remedy"),
    [
        (Centred, "", "Centred: what it gives for example 1 depends on", "treats each example by itself"),
        (Shared, "", "one example's loss depends on rows of others in what CatBackward0", "from its own example"),
        (Network, "norm", "BatchNorm1d: normalizes by the mean and variance of the batch", "GroupNorm"),
    ],
)
def test_what_is_said_names_the_module_and_the_remedy(kind, path, problem, remedy):
    finding = only_finding(kind)
    assert finding.path == path
    assert finding.problem.startswith(problem)
    assert remedy in finding.remedy


class Attention(WithoutNorm):
    """Scores [B, T, T] with as many positions as examples, before the mean of the batch."""

    def between(self, h):
        rows = h[:, :EXAMPLES, None]
        h = h + torch.softmax(rows @ rows.transpose(1, 2), 2).sum((1, 2))[:, None]
        return h - h.mean(0)  # the line


class Dropped(WithoutNorm):
    """Dropout starts from memory that nothing was written to."""

    def between(self, h):
        for _ in range(3):
            h = F.dropout(h + torch.empty_like(h).fill_(1.0), 0.2)
        return h - h.mean(0)  # the line


@pytest.mark.parametrize("kind", [Attention, Dropped])
def test_what_comes_before_the_line_isn_t_taken_for_it(kind):
    assert only_finding(kind).line.endswith(line_in(kind.between))


def test_the_module_is_the_innermost_that_was_running():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Centred()

        def forward(self, x):
            return self.inner(x)

    assert only_finding(Outer).path == "inner"


def test_a_model_that_is_exact_has_no_finding_and_keeps_its_state():
    model = WithoutNorm()
    ghostclip.check(model, losses, BATCH)
    assert ghostclip.check(model, losses, BATCH) == []
    assert not torch.is_anomaly_enabled()
    assert type(model.low) is nn.Linear
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_outside_of_check_a_refusal_says_the_same_without_a_line():
    with pytest.raises(UnsupportedModelError, match=r"low: .*examples mix") as caught:
        ghostclip.GhostClipper(Centred()).clip(losses, BATCH)
    assert caught.value.name == "low"
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_loss_that_fails_leaves_no_hook():
    def failing(model, batch):
        model(batch[0])
        raise KeyError("labels")

    model = Centred()
    with pytest.raises(KeyError):
        ghostclip.check(model, failing, BATCH)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
