"""What a forward keeps of its examples, in buffers and attributes, is refused whichever way it is written."""

import numpy as np
import private_runs as runs
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import ghostclip
from ghostclip import PrivacyEngine, UnsupportedModelError

WIDTH = 4


class Codebook(nn.Module):
    """Adds to each row the nearest of three codes, which follow the rows by exponential averages (VQ-VAE).

    Args:
        write: (module, codes [3, WIDTH]) -> None: keeps them.
        registered: as a buffer, not as a plain attribute.
    """

    def __init__(self, write, registered=True):
        super().__init__()
        self.write, codes = write, torch.randn(3, WIDTH)
        if registered:
            self.register_buffer("codes", codes)
        else:
            self.codes = codes.numpy() if write is within_an_array else codes

    def forward(self, x):
        codes = torch.as_tensor(self.codes)
        nearest = torch.cdist(x.detach(), codes).argmin(1)
        if self.training:
            sums = torch.zeros_like(codes).index_add_(0, nearest, x.detach())
            self.write(self, 0.9 * codes + 0.1 * sums)
        return x + codes[nearest]


def through_data(module, codes):
    module.codes.data.copy_(codes)


def through_numpy(module, codes):
    module.codes.numpy()[:] = codes.numpy()


def exchanged_data(module, codes):
    module.codes.data = codes.clone()


def exchanged(module, codes):
    module.codes = codes.clone()


def in_place(module, codes):
    with torch.no_grad():
        module.codes.copy_(codes)


def through_setattr(module, codes):
    object.__setattr__(module, "codes", codes.clone())


def as_an_array(module, codes):
    module.codes = codes.numpy().copy()


def within_an_array(module, codes):
    module.codes[:] = codes.numpy()


WRITES = [through_data, through_numpy, exchanged_data, exchanged, in_place]


def model_of(*layers):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, WIDTH), *layers, nn.Linear(WIDTH, 3))


def steps(model, count=6):
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(48, 5), torch.arange(48) % 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = PrivacyEngine(model, optimizer, data, batch_size=12, noise_multiplier=1.0)
    while engine.steps_taken < count:
        for batch in engine.batches():
            engine.step(batch, runs.losses_of)
    return engine


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("registered", [True, False])
def test_a_codebook_that_follows_private_embeddings_is_refused(write, registered):
    model = model_of(Codebook(write, registered))
    before = torch.as_tensor(model[1].codes).clone()
    kind = "buffer" if registered else "attribute"
    with pytest.raises(UnsupportedModelError, match=rf"keeps something of the examples in the {kind} '1\.codes'"):
        steps(model)
    assert torch.equal(torch.as_tensor(model[1].codes), before)  # nor did trying leave anything in it


@pytest.mark.parametrize("write", [through_setattr, as_an_array, within_an_array])
def test_a_codebook_that_is_exchanged_as_an_attribute_is_refused(write):
    with pytest.raises(UnsupportedModelError, match="keeps something of the examples in the attribute"):
        steps(model_of(Codebook(write, registered=False)))


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("registered", [True, False])
def test_check_finds_it(write, registered):
    torch.manual_seed(2)
    batch = [torch.randn(6, 5), torch.arange(6) % 3]
    findings = ghostclip.check(model_of(Codebook(write, registered)), runs.losses_of, batch)
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


def test_a_first_batch_that_sets_an_attribute_for_good_is_refused():
    class Scaled(nn.Module):
        scale = None

        def forward(self, x):
            if self.scale is None:
                self.scale = x.detach().std(0)
            return x / self.scale

    with pytest.raises(UnsupportedModelError, match=r"keeps something of the examples in the attribute '1\.scale'"):
        steps(model_of(Scaled()))
