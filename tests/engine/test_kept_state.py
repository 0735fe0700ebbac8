"""What a forward keeps of its examples, in buffers, attributes or frozen parameters, is refused however it is kept."""

from collections import deque

import numpy as np
import private_runs as runs
import pytest
import torch
from case_models import Wired
from keeping_models import WRITES, Codes
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import ghostclip
from ghostclip import PrivacyEngine, UnsupportedModelError
from ghostclip.clipper import trial

WIDTH = 4


def keeping(forward, **attributes):
    """A module with these attributes, of which tensors in tuples are buffers."""
    module = Wired(forward)
    for name, value in attributes.items():
        module.register_buffer(name, *value) if isinstance(value, tuple) else setattr(module, name, value)
    return module


def bank(keep, start=torch.zeros(0, WIDTH), drawing=False):  # noqa: B008
    """Takes away the mean of what ``keep`` (kept, rows) has kept of the rows until then.

    Where it draws random numbers itself, trials put it into eval mode.
    """

    def forward(m, x):
        x = F.dropout(x, 0.1, m.training and drawing)
        out = x - m.kept.mean(0) if m.kept is not None and len(m.kept) else x
        if m.training or not drawing:
            m.kept = keep(m.kept, x.detach())
        return out

    return keeping(forward, kept=start)


def at_first(m, x):
    """Registers a buffer in the first forward."""
    if not hasattr(m, "mean"):
        m.register_buffer("mean", x.detach().mean(0))
    return x - m.mean


def container(means, put):
    """Takes off the mean of what a list, dict, set or deque holds; ``put`` (container, mean) puts batches' means in."""

    def forward(m, x):
        m.calls += 1
        held = [*(m.means.values() if isinstance(m.means, dict) else m.means)]
        put(m.means, x.detach().mean(0))
        return x - torch.stack(held).mean(0) if held else x

    return keeping(forward, calls=0, means=means)


def replace(container, mean):
    if isinstance(container, set):
        container.clear()
        container.add(mean)
    else:
        container[0] = mean


def last(most):
    return lambda kept, x: torch.cat([kept, x])[-most:]


KEEPING = {
    "a growing bank": lambda: bank(last(10**6)),
    "a growing bank in a buffer": lambda: bank(last(10**6), (torch.zeros(0, WIDTH),)),
    "the last example": lambda: bank(last(1)),
    "the first batch": lambda: bank(lambda kept, x: x if kept is None else kept, None),
    "a buffer of a module that draws": lambda: bank(
        lambda kept, x: 0.9 * kept + 0.1 * x.mean(0), (torch.zeros(1, WIDTH),), drawing=True
    ),
    "a buffer registered in the first forward": lambda: Wired(at_first),
    "the first batch in a list": lambda: container([], lambda means, mean: means or means.append(mean)),
    "all batches in a list": lambda: container([], list.append),
    "the batch before in a list": lambda: container([torch.zeros(WIDTH)], replace),
    "the batch before in a dict": lambda: container({0: torch.zeros(WIDTH)}, replace),
    "the batch before in a set": lambda: container({torch.zeros(WIDTH)}, replace),
    "the last two batches": lambda: container(deque(maxlen=2), deque.append),
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


CODES = [
    *((write, kind) for kind in ("buffer", "attribute") for write in list(WRITES)[:5]),
    *((write, "frozen parameter") for write in ("through data", "exchanged data", "in place")),
    ("through setattr", "attribute"),
    ("as an array", "attribute"),
    ("within an array", "array"),
]


@pytest.mark.parametrize(("write", "kind"), CODES)
def test_codes_that_follow_private_embeddings_are_refused(write, kind):
    model = model_of(Codes(write, kind, WIDTH))
    before = torch.as_tensor(model[1].codes).clone()
    said = rf"keeps something of the examples in the {kind.replace('array', 'attribute')} '1\.codes'"
    with pytest.raises(UnsupportedModelError, match=said):
        steps(model)
    if kind != "frozen parameter":  # nor did trying leave anything in it
        assert torch.equal(torch.as_tensor(model[1].codes), before)


@pytest.mark.parametrize("name", KEEPING)
def test_what_follows_the_batch_in_shape_or_hides_is_refused(name):
    with pytest.raises(UnsupportedModelError):
        steps(model_of(KEEPING[name]()), 12)


def test_what_holds_tensors_is_named_before_numbers():
    with pytest.raises(UnsupportedModelError, match=r"in the attribute '1\.means'"):
        steps(model_of(KEEPING["the batch before in a list"]()), 12)


LAYOUTS = ["sparse_coo", "sparse_csr"]


def edges(layout, keep):
    """Goes along the edges of a graph in a sparse buffer; ``keep`` (buffer, rows) may write to a dense one."""

    def along(m, x):
        keep(m.mean, x.detach())
        return (m.edges @ x.mT).mT

    held = torch.eye(WIDTH).roll(1, 0).to_sparse(layout=getattr(torch, layout))
    return model_of(keeping(along, edges=(held,), mean=(torch.zeros(WIDTH),)))


@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support is in beta state:UserWarning")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sparse_buffers_are_compared_as_others_are(layout, caplog):
    honest = edges(layout, lambda mean, x: None)
    engine = steps(honest)
    assert "can't be compared" not in caplog.text
    assert "not tested" not in engine.guarantee()
    assert ghostclip.check(honest, runs.losses_of, [torch.randn(6, 5), torch.arange(6) % 3]) == []
    with pytest.raises(UnsupportedModelError, match=r"in the buffer '1\.mean'"):
        steps(edges(layout, lambda mean, x: mean.mul_(0.9).add_(x.mean(0))))


@pytest.mark.parametrize(("write", "kind"), [CODES[0], CODES[8], CODES[12]])
def test_check_finds_it(write, kind):
    torch.manual_seed(2)
    batch = [torch.randn(6, 5), torch.arange(6) % 3]
    findings = ghostclip.check(model_of(Codes(write, kind, WIDTH)), runs.losses_of, batch)
    assert {finding.path for finding in findings} == {"1"}
    assert any("'1.codes', which gets no noise" in finding.problem for finding in findings)


@pytest.mark.parametrize("held", [[0], {0: 0}, {0}, deque([0])], ids=repr)
def test_what_lists_and_the_like_of_a_model_have_in_them_is_as_before_a_trial(held):
    before, layer = held.copy(), container(held, replace)
    with trial.without_trace(layer):
        replace(layer.means, 7)
    assert layer.means is held
    assert held == before


def test_a_module_s_list_of_its_parameters_is_left_alone_by_a_trial():
    """Who exchanges parameters, as FSDP2 does, exchanges those of recurrent layers in such a list, too."""
    layer = nn.LSTM(3, 2)
    with trial.without_trace(layer):
        layer._flat_weights[0] = other = torch.zeros(8, 3)
    assert layer._flat_weights[0] is other


def noting(m, x):
    """Keeps what others may look at between forwards; none of it reaches a later one."""
    m.calls += 1
    m.step = m.step + 1
    m.seen.data.add_(1)
    m.history.append(len(x))
    if m.table is None or len(m.table) < len(x):  # a cache that grows with its batch
        m.table = torch.arange(float(len(x)))
    m.last = F.softmax(x.detach(), 1)  # as models keep their attention for a look at it
    m.array = np.asarray(m.last.sum(0))
    return x


def test_what_each_forward_overwrites_or_counts_is_kept_from_nobody():
    seen = (torch.zeros(()), False)
    model = model_of(keeping(noting, calls=0, table=None, step=torch.zeros(()), history=[], seen=seen))
    engine = steps(model)
    assert engine.steps_taken >= 6
    assert model[1].seen == model[1].step == engine.steps_taken


def test_a_metric_in_the_model_is_named_as_private_and_trains_on(caplog):
    """It counts what it has seen, as one of torchmetrics does; no loss depends on it."""

    def metric(m, x):
        m.total = m.total + (x.detach() > 0).sum()
        return x

    steps(model_of(keeping(metric, total=torch.zeros(()))))
    assert sum("the attribute '1.total' keeps something of the examples" in said for said in caplog.messages) == 1


def counter(persistent):
    def count(m, x):
        if m.training:
            m.seen += len(x)
        return x

    return keeping(count, seen=(torch.zeros(()), persistent))


@pytest.mark.parametrize("around", [[], [nn.Dropout(0.1)]], ids=["alone", "beside dropout"])
def test_a_buffer_that_counts_examples_is_refused(around):
    """How many a batch has is private, and the buffer is published with the model."""
    with pytest.raises(UnsupportedModelError, match=r"in the buffer '1\.seen'"):
        steps(model_of(counter(True), *around))


def test_a_count_that_is_no_part_of_the_model_s_state_is_left_alone():
    assert steps(model_of(counter(False))).steps_taken >= 6
