"""What one example reaches through state that trials overlook, or through gradients that losses don't show."""

import dataclasses

import private_runs as runs
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import ghostclip
from ghostclip import PrivacyEngine, UnsupportedModelError

pytestmark = pytest.mark.filterwarnings("ignore:the DataLoader's SequentialSampler is replaced")


def train(model, data, loss_fn, steps=12, **options):
    options = {"batch_size": 16, "noise_multiplier": 1.0, **options}
    parameters = [p for p in model.parameters() if p.requires_grad]
    engine = PrivacyEngine(model, torch.optim.SGD(parameters, lr=options.pop("lr", 0.1)), data, **options)
    while engine.steps_taken < steps:
        for batch in engine.batches():
            engine.step(batch, loss_fn)
            if engine.steps_taken == steps:
                break
    return engine


def around(*layers):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), *layers, nn.Linear(4, 3))


class Bank(nn.Module):
    """Embeddings of the batches before, as many as there were."""

    def __init__(self, registered, most):
        super().__init__()
        self.most = most
        self.register_buffer("bank", torch.zeros(0, 4))
        if not registered:
            del self._buffers["bank"]
            self.bank = torch.zeros(0, 4)

    def forward(self, x):
        out = x - self.bank.mean(0) if len(self.bank) else x
        self.bank = torch.cat([self.bank, x.detach()])[-self.most :]
        return out


class LastBatch(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = torch.zeros(1, 4)

    def forward(self, x):
        out, self.last = x - self.last.mean(0), x.detach()
        return out


class AtFirst(nn.Module):
    def forward(self, x):
        if not hasattr(self, "mean"):
            self.register_buffer("mean", x.detach().mean(0))
        return x - self.mean


class Codes(nn.Module):
    def __init__(self, write):
        super().__init__()
        self.write, self.codes = write, nn.Parameter(torch.randn(3, 4), requires_grad=False)

    @torch.no_grad()
    def follow(self, x, nearest):
        codes = 0.9 * self.codes + 0.1 * torch.zeros_like(self.codes).index_add_(0, nearest, x)
        if self.write == "data":
            self.codes.data.copy_(codes)
        elif self.write == "exchanged":
            self.codes.data = codes
        else:
            self.codes.copy_(codes)

    def forward(self, x):
        nearest = torch.cdist(x.detach(), self.codes).argmin(1)
        self.follow(x.detach(), nearest)
        return x + self.codes[nearest]


class DrawingMean(nn.Module):
    """A running mean in a module that draws random numbers itself, so that trials put it into eval mode."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        x = F.dropout(x, 0.1, self.training)
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return x - self.mean


KEEPING = {
    "a growing bank": lambda: Bank(False, 10**6),
    "a growing bank in a buffer": lambda: Bank(True, 10**6),
    "a bank of 100": lambda: Bank(False, 100),
    "the last batch": LastBatch,
    "a buffer registered in the first forward": AtFirst,
    "a frozen parameter, copy_": lambda: Codes("copy_"),
    "a frozen parameter, data": lambda: Codes("data"),
    "a frozen parameter, exchanged": lambda: Codes("exchanged"),
    "a buffer of a module that draws": DrawingMean,
}


@pytest.mark.parametrize("name", KEEPING)
def test_what_follows_the_batch_in_shape_or_hides_is_refused(name):
    with pytest.raises(UnsupportedModelError):
        train(around(KEEPING[name]()), runs.data(64), runs.losses_of)


class Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


def by_hook(model, batch):
    hidden, factor = model[0](batch[0]), float(batch[0].abs().max())
    if hidden.requires_grad:
        hidden.register_hook(lambda gradient: gradient * factor)
    return F.cross_entropy(model[1](hidden), batch[1], reduction="none")


def by_function(model, batch):
    return F.cross_entropy(model[1](Times.apply(model[0](batch[0]), float(batch[0].abs().max()))), batch[1],
                           reduction="none")  # fmt: skip


def by_detaching(model, batch):
    losses = runs.losses_of(model, batch)
    return losses.detach() + float(batch[0].abs().max()) * (losses - losses.detach())


@pytest.mark.parametrize("loss_fn", [by_hook, by_function, by_detaching])
def test_gradients_that_depend_on_others_where_losses_do_not_are_refused(loss_fn):
    with pytest.raises(UnsupportedModelError):
        train(around(), runs.data(64), loss_fn)


class Pooled(nn.Module):
    def __init__(self, zero):
        super().__init__()
        self.words, self.head = nn.Embedding(30, 16, padding_idx=0), nn.Linear(16, 3)
        with torch.no_grad():
            if zero:
                self.head.weight.zero_()
                self.head.bias.zero_()

    def forward(self, ids):
        return self.head(self.words(ids).mean(1))


def padded(rows):
    return pad_sequence([text for text, _ in rows], batch_first=True), torch.tensor([y for _, y in rows])


def texts():
    return [(torch.randint(1, 30, (4 + row % 30,)), row % 3) for row in range(64)]


def test_padding_is_found_behind_a_head_of_zeros():
    """Of which no loss depends on the text, as at the start of fine-tuning."""
    torch.manual_seed(0)
    with pytest.raises(UnsupportedModelError):
        train(Pooled(zero=True), DataLoader(texts(), 16, collate_fn=padded), runs.losses_of, lr=0.0)


@dataclasses.dataclass
class Row:
    x: torch.Tensor
    y: int


def test_rows_that_are_views_are_copied_by_themselves():
    class Views(torch.utils.data.Dataset):
        table = torch.randn(1000, 8)

        def __len__(self):
            return 1000

        def __getitem__(self, row):
            return Row(self.table[row], 0)

    from ghostclip.self_check.loading import LoadedRows

    kept = []
    LoadedRows(Views(), kept.extend, [3, 4], lambda batch: batch).load([0, 1])
    assert all(row.x.untyped_storage().nbytes() < 1000 for row in kept)


class Slots:
    __slots__ = ("x", "y")

    def __init__(self, x, y):
        self.x, self.y = x, y


@pytest.mark.parametrize("kind", ["arrays", "slots", "keys"])
def test_check_does_not_call_a_batch_fine_that_it_can_not_take_apart(kind):
    x, y = torch.randn(8, 5), torch.arange(8) % 3
    batch, read = {
        "arrays": ([x.numpy(), y.numpy()], lambda b: [torch.from_numpy(part) for part in b]),
        "slots": (Slots(x, y), lambda b: [b.x, b.y]),
        "keys": (
            {"x": {f"row {n}": x[n] for n in range(8)}, "y": y}, lambda b: [torch.stack([*b["x"].values()]), b["y"]],
        ),
    }[kind]  # fmt: skip

    def loss_fn(model, batch):
        x, y = read(batch)
        return F.cross_entropy(model(x - x.mean(0)), y, reduction="none")

    assert ghostclip.check(nn.Linear(5, 3), loss_fn, batch)


def test_a_statistic_that_both_halves_share_with_the_whole_is_refused():
    """Weights by the counts of two classes, of which the short texts and the long ones have as many."""
    torch.manual_seed(0)
    data = [(torch.randint(1, 30, (length,)), length % 2) for length in range(4, 12)]

    def collate(rows):
        ids = pad_sequence([F.pad(text, (0, 12 - len(text))) for text, _ in rows], batch_first=True)
        labels = torch.tensor([y for _, y in rows])
        return ids, labels, len(labels) / torch.bincount(labels, minlength=2)

    def loss_fn(model, batch):
        return runs.losses_of(model, batch[:2]) * batch[2][batch[1]]

    with pytest.raises(UnsupportedModelError, match="examples that mix"):
        train(Pooled(zero=False), DataLoader(data, 8, collate_fn=collate), loss_fn, batch_size=8)


def test_differences_of_sums_are_honest_rounding():
    """Two scores of 1e4 and more that are subtracted, as log-probabilities of long texts are."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def collate(rows):
        x = pad_sequence([row for (row,) in rows], batch_first=True)
        return x, (x != 0).any(2)

    def loss_fn(model, batch):
        x, mask = batch
        one, two = ((100 + model(part)[..., 0]) * mask for part in (x, x * 1.01))
        return F.softplus(one.sum(1) - two.sum(1))

    data = [(torch.randn(int(length), 8),) for length in torch.randint(50, 400, (64,))]
    engine = train(model, DataLoader(data, 16, collate_fn=collate), loss_fn, 6)
    assert engine.steps_taken == 6
