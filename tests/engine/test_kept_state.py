"""What a forward keeps of its examples, in buffers, attributes or frozen parameters, is refused however it is kept."""

from collections import deque
from collections.abc import Callable

import numpy as np
import private_runs as runs
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import ghostclip
from ghostclip import PrivacyEngine, UnsupportedModelError
from ghostclip.clipper import trial

WIDTH = 4


class Codebook(nn.Module):
    """Adds to each row the nearest of three codes, which follow the rows by exponential averages (VQ-VAE).

    Args:
        write: how it keeps them, a name of WRITES.
        kind: "buffer", "attribute", "array" or "parameter".
    """

    def __init__(self, write, kind):
        super().__init__()
        self.write, codes = WRITES[write], torch.randn(3, WIDTH)
        if kind == "buffer":
            self.register_buffer("codes", codes)
        elif kind == "parameter":
            self.codes = nn.Parameter(codes, requires_grad=False)
        else:
            self.codes = codes.numpy() if kind == "array" else codes

    def forward(self, x):
        codes = torch.as_tensor(self.codes)
        nearest = torch.cdist(x.detach(), codes).argmin(1)
        if self.training:
            sums = torch.zeros_like(codes).index_add_(0, nearest, x.detach())
            with torch.no_grad():
                self.write(self, 0.9 * codes + 0.1 * sums)
        return x + codes[nearest]


class Kept(nn.Module):
    """Takes away the mean of what ``keep`` (kept, rows) has kept of the rows until then.

    Args:
        drawing: it draws random numbers itself, so that trials put it into eval mode.
    """

    def __init__(self, keep, start=torch.zeros(0, WIDTH), registered=False, drawing=False):  # noqa: B008
        super().__init__()
        self.keep, self.drawing = keep, drawing
        if registered:
            self.register_buffer("kept", start)
        else:
            self.kept = start

    def forward(self, x):
        x = F.dropout(x, 0.1, self.training and self.drawing)
        out = x - self.kept.mean(0) if self.kept is not None and len(self.kept) else x
        if self.training or not self.drawing:
            self.kept = self.keep(self.kept, x.detach())
        return out


class AtFirst(nn.Module):
    """Registers a buffer in the first forward."""

    def forward(self, x):
        if not hasattr(self, "mean"):
            self.register_buffer("mean", x.detach().mean(0))
        return x - self.mean


class InContainer(nn.Module):
    """Takes off the mean of what a list, dict, set or deque holds; ``put`` (container, mean) puts batches' means in."""

    def __init__(self, container, put):
        super().__init__()
        self.calls, self.means, self.put = 0, container, put

    def forward(self, x):
        self.calls += 1
        held = [*(self.means.values() if isinstance(self.means, dict) else self.means)]
        self.put(self.means, x.detach().mean(0))
        return x - torch.stack(held).mean(0) if held else x


def replace(container, mean):
    if isinstance(container, set):
        container.clear()
        container.add(mean)
    else:
        container[0] = mean


# How codes [3, WIDTH] are kept.
WRITES = {
    "through data": lambda module, codes: module.codes.data.copy_(codes),
    "through numpy": lambda module, codes: np.copyto(module.codes.numpy(), codes.numpy()),
    "exchanged data": lambda module, codes: setattr(module.codes, "data", codes.clone()),
    "exchanged": lambda module, codes: setattr(module, "codes", codes.clone()),
    "in place": lambda module, codes: module.codes.copy_(codes),
    "through setattr": lambda module, codes: object.__setattr__(module, "codes", codes.clone()),
    "as an array": lambda module, codes: setattr(module, "codes", codes.numpy().copy()),
    "within an array": lambda module, codes: np.copyto(module.codes, codes.numpy()),
}
TENSORS = [(write, kind) for kind in ("buffer", "attribute") for write in list(WRITES)[:5]]
CODEBOOKS = [*TENSORS, ("through setattr", "attribute"), ("as an array", "attribute"), ("within an array", "array")]


def bank(most):
    """The rows of the batches before, as many as there were."""
    return lambda kept, x: torch.cat([kept, x])[-most:]


KEEPING: dict[str, Callable[[], nn.Module]] = {
    "a growing bank": lambda: Kept(bank(10**6)),
    "a growing bank in a buffer": lambda: Kept(bank(10**6), registered=True),
    "a bank of 100": lambda: Kept(bank(100)),
    "the last batch": lambda: Kept(bank(1)),
    "the first batch": lambda: Kept(lambda kept, x: x if kept is None else kept, None),
    "a buffer registered in the first forward": AtFirst,
    "the first batch in a list": lambda: InContainer([], lambda means, mean: means or means.append(mean)),
    "all batches in a list": lambda: InContainer([], list.append),
    "the first batch in a dict": lambda: InContainer({}, lambda means, mean: means.setdefault(0, mean)),
    "all batches in a set": lambda: InContainer(set(), set.add),
    "the batch before in a list": lambda: InContainer([torch.zeros(WIDTH)], replace),
    "the batch before in a dict": lambda: InContainer({0: torch.zeros(WIDTH)}, replace),
    "the batch before in a set": lambda: InContainer({torch.zeros(WIDTH)}, replace),
    "the batch before in a deque": lambda: InContainer(deque([torch.zeros(WIDTH)], 1), replace),
    "the last two batches": lambda: InContainer(deque(maxlen=2), deque.append),
    "a buffer of a module that draws": lambda: Kept(
        lambda kept, x: 0.9 * kept + 0.1 * x.mean(0), torch.zeros(1, WIDTH), registered=True, drawing=True
    ),
    "a frozen parameter, through data": lambda: Codebook("through data", "parameter"),
    "a frozen parameter, exchanged data": lambda: Codebook("exchanged data", "parameter"),
    "a frozen parameter, in place": lambda: Codebook("in place", "parameter"),
}


def model_of(*layers):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, WIDTH), *layers, nn.Linear(WIDTH, 3))


def steps(model, count=6):
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(48, 5), torch.arange(48) % 3)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    engine = PrivacyEngine(model, optimizer, data, batch_size=12, noise_multiplier=1.0)
    runs.train(engine, count)
    return engine


@pytest.mark.parametrize(("write", "kind"), CODEBOOKS)
def test_a_codebook_that_follows_private_embeddings_is_refused(write, kind):
    model = model_of(Codebook(write, kind))
    before = torch.as_tensor(model[1].codes).clone()
    said = rf"keeps something of the examples in the {kind.replace('array', 'attribute')} '1\.codes'"
    with pytest.raises(UnsupportedModelError, match=said):
        steps(model)
    assert torch.equal(torch.as_tensor(model[1].codes), before)  # nor did trying leave anything in it


@pytest.mark.parametrize("container", [[0], {0: 0}, {0}, deque([0])], ids=repr)
def test_what_lists_and_the_like_of_a_model_have_in_them_is_as_before_a_trial(container):
    before = container.copy()
    layer = InContainer(container, replace)
    with trial.without_trace(layer):
        layer.put(layer.means, 7)
    assert layer.means is container
    assert container == before


def test_what_holds_tensors_is_named_before_numbers():
    with pytest.raises(UnsupportedModelError, match=r"in the attribute '1\.means'"):
        steps(model_of(InContainer([torch.zeros(WIDTH)], replace)), 12)


def test_a_module_s_list_of_its_parameters_is_left_alone_by_a_trial():
    """Who exchanges parameters, as FSDP2 does, exchanges those of recurrent layers in such a list, too."""
    layer = nn.LSTM(3, 2)
    with trial.without_trace(layer):
        layer._flat_weights[0] = other = torch.zeros(8, 3)
    assert layer._flat_weights[0] is other


@pytest.mark.parametrize("name", KEEPING)
def test_what_follows_the_batch_in_shape_or_hides_is_refused(name):
    with pytest.raises(UnsupportedModelError):
        steps(model_of(KEEPING[name]()), 12)


@pytest.mark.parametrize(("write", "kind"), TENSORS)
@pytest.mark.one_in(2)
def test_check_finds_it(write, kind):
    torch.manual_seed(2)
    batch = [torch.randn(6, 5), torch.arange(6) % 3]
    findings = ghostclip.check(model_of(Codebook(write, kind)), runs.losses_of, batch)
    assert {finding.path for finding in findings} == {"1"}
    assert any("'codes', which gets no noise" in finding.problem for finding in findings)


class Noting(nn.Module):
    """Keeps what others may look at between forwards; none of it reaches a later one."""

    def __init__(self):
        super().__init__()
        self.calls, self.table = 0, None
        self.step = torch.zeros(())
        self.history: list[int] = []
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x):
        self.calls += 1
        self.step = self.step + 1
        self.seen.data.add_(1)
        self.history.append(len(x))
        if self.table is None or len(self.table) < len(x):  # a cache that grows with its batch
            self.table = torch.arange(float(len(x)))
        self.last = F.softmax(x.detach(), 1)  # as models keep their attention for a look at it
        self.array = np.asarray(self.last.sum(0))
        return x


def test_what_each_forward_overwrites_or_counts_is_kept_from_nobody():
    model = model_of(Noting())
    engine = steps(model)
    assert engine.steps_taken >= 6
    assert model[1].seen == model[1].step == engine.steps_taken


class Metric(nn.Module):
    """Counts what it has seen, as a metric of torchmetrics in a model does; no loss depends on it."""

    def __init__(self):
        super().__init__()
        self.total = torch.zeros(())

    def forward(self, x):
        self.total = self.total + (x.detach() > 0).sum()
        return x


def test_a_metric_in_the_model_is_named_as_private_and_trains_on(caplog):
    steps(model_of(Metric()))
    assert sum("the attribute '1.total' keeps something of the examples" in said for said in caplog.messages) == 1


class Counter(nn.Module):
    """Counts examples in a buffer."""

    def __init__(self, persistent=True):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()), persistent)

    def forward(self, x):
        if self.training:
            self.seen += len(x)
        return x


@pytest.mark.parametrize("around", [[], [nn.Dropout(0.1)]], ids=["alone", "beside dropout"])
def test_a_buffer_that_counts_examples_is_refused(around):
    """How many a batch has is private, and the buffer is published with the model."""
    with pytest.raises(UnsupportedModelError, match=r"in the buffer '1\.seen'"):
        steps(model_of(Counter(), *around))


def test_a_count_that_is_no_part_of_the_model_s_state_is_left_alone():
    assert steps(model_of(Counter(persistent=False))).steps_taken >= 6
