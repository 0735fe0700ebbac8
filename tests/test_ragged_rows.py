"""Whose rows are whose by the graph alone: what is said is true of the Jacobian, or nothing is said."""

import itertools

import pytest
import torch
from ragged_models import CASES, GCN, SIZES, gathered, graphs, losses, shuffled
from ragged_refusals import CONNECTED, plain
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.nn import functional as F

from ghostclip import GhostClipper, UnsupportedModelError
from ghostclip.graph import mixing_test, ragged_layout
from ghostclip.graph.nodes import shape_of
from ghostclip.graph.ragged_rows import RaggedRows
from ghostclip.graph.row_operations import NOBODY
from ghostclip.norms.ragged import RowIndex

# Rows, features, examples: as many of one as of another where that may be confused.
SHAPES = [(6, 4, 3), (4, 4, 4), (4, 4, 2), (3, 2, 3), (6, 3, 2), (8, 2, 4), (2, 6, 2), (4, 1, 2), (1, 4, 2)]


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def index_of(n, below):
    return torch.randint(0, below, (n,))


def within(owners):
    """[rows], for each row one of its example, by chance."""
    return torch.stack([(owners == each).nonzero()[:, 0][torch.randint(0, int((owners == each).sum()), ())]
                        for each in owners])  # fmt: skip


def repeated(index, like):
    return index.view(-1, *[1] * (like.dim() - 1)).expand_as(like)


def masked(h, r, mask):
    q, k, v = (h.reshape(1, len(h), 1, -1).transpose(1, 2) * scale for scale in (1.0, 0.5, 2.0))
    return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).reshape(h.shape)


# h [rows, features], r [rows] -> [rows, features]. All keep the rows' examples apart ...
APART = {
    "elementwise": lambda h, r: (h * 2 + 1).tanh() * torch.randn_like(h),
    "a column": lambda h, r: h * h[:, :1],
    "picked": lambda h, r: h[within(r)],
    "picked by a mask": lambda h, r: h.masked_fill(torch.rand_like(h) < 0.5, 0.0),
    "index_select": lambda h, r: h.index_select(0, within(r)),
    "negative indices": lambda h, r: h[within(r) - len(h)],
    "two indices": lambda h, r: h[within(r), torch.zeros_like(r)].unsqueeze(1) * h,
    "a list of pairs": lambda h, r: h[torch.stack([within(r), within(r)], 1)].sum(1),
    "gathered": lambda h, r: h.gather(0, repeated(within(r), h)),
    "gathered one by one": lambda h, r: h.gather(0, torch.stack([within(r) for _ in h[0]], 1)),
    "gathered along columns": lambda h, r: h.gather(1, torch.zeros_like(h, dtype=torch.int64)),
    "index_add": lambda h, r: torch.zeros_like(h).index_add(0, within(r), h) + h,
    "index_put": lambda h, r: h.index_put((within(r),), h, accumulate=True),
    "scatter_add": lambda h, r: torch.zeros_like(h).scatter_add(0, repeated(within(r), h), h),
    "scatter_reduce": lambda h, r: torch.zeros_like(h).scatter_reduce(0, repeated(within(r), h), h, "amax"),
    "scatter along columns": lambda h, r: h.scatter_add(1, torch.zeros_like(h, dtype=torch.int64), h),
    "softmax": lambda h, r: h.softmax(1),
    "cumsum": lambda h, r: h.cumsum(1),
    "sum": lambda h, r: h + h.sum(1, keepdim=True) + h.amax(1)[:, None] + h.logsumexp(1).unsqueeze(1),
    "norm": lambda h, r: h / h.norm(dim=1, keepdim=True),
    "matrix": lambda h, r: h @ torch.randn(h.shape[1], h.shape[1], dtype=h.dtype),
    "layer norm": lambda h, r: F.layer_norm(h, h.shape[1:]) + h,
    "views": lambda h, r: h.reshape(1, len(h), -1, 1).squeeze(3).unsqueeze(0).reshape(len(h), -1),
    "parts of rows": lambda h, r: h.reshape(-1).tanh().view(h.shape),
    "transposed": lambda h, r: h.t().tanh().t(),
    "permuted": lambda h, r: h.unsqueeze(2).permute(2, 1, 0).exp().permute(2, 1, 0).squeeze(2),
    "split": lambda h, r: torch.cat(h.split(1, 0)),
    "split columns": lambda h, r: torch.cat(h.split(1, 1), 1),
    "slices": lambda h, r: torch.cat([h[:1], h[1:].sigmoid()]),
    "columns one by one": lambda h, r: h * h.unbind(1)[0][:, None],
    "batched products": lambda h, r: torch.bmm(h.unsqueeze(2), h.unsqueeze(1)).sum(2),
    "convolution": lambda h, r: F.conv1d(h.unsqueeze(1), torch.randn(1, 1, 1, dtype=h.dtype)).squeeze(1),
    "pooling": lambda h, r: h + F.avg_pool2d(h.reshape(len(h), 1, 1, -1), 1).view(h.shape),
    "attention in blocks": lambda h, r: masked(h, r, r.unsqueeze(1) == r),
}  # fmt: skip
# ... and these don't, or may not where sizes are the same.
MIXING = {
    "picked": lambda h, r: h[index_of(len(h), len(h))],
    "rolled": lambda h, r: torch.cat([h[1:], h[:1]]),
    "index_add": lambda h, r: torch.zeros_like(h).index_add(0, index_of(len(h), len(h)), h),
    "index_put": lambda h, r: h.index_put((index_of(len(h), len(h)),), h, accumulate=True),
    "index_put of one row": lambda h, r: h.index_put((within(r),), h[0], accumulate=True),
    "index_put of a column": lambda h, r: h.index_put((within(r),), h[:, :1], accumulate=True),
    "scatter": lambda h, r: torch.zeros_like(h).scatter_add(0, torch.randint_like(h, len(h)).long(), h),
    "gathered": lambda h, r: h.gather(0, torch.randint_like(h, len(h)).long()),
    "softmax": lambda h, r: h.softmax(0),
    "cumsum": lambda h, r: h.cumsum(0),
    "centred": lambda h, r: h - h.mean(0),
    "centred by all": lambda h, r: h - h.mean(),
    "by the first": lambda h, r: h * h[:1],
    "by a row": lambda h, r: h * h[0],
    "by a column as a row": lambda h, r: h * h[:, 0] if h.shape[0] == h.shape[1] else h - h.sum(0),
    "transposed": lambda h, r: h + h.t() if h.shape[0] == h.shape[1] else h - h.sum(0),
    "transposed sum": lambda h, r: h.t().softmax(1).t(),
    "another view": lambda h, r: h.t().reshape(h.shape),
    "all pairs": lambda h, r: (h @ h.t()).softmax(1) @ h,
    "a product from the left": lambda h, r: torch.randn(len(h), len(h), dtype=h.dtype) @ h,
    "one batch of products": lambda h, r: torch.bmm(
        torch.rand(1, len(h), len(h), dtype=h.dtype) * h[:, :1], h.unsqueeze(0)
    )[0],
    "as many batches of products": lambda h, r: torch.bmm(
        torch.rand(len(h), len(h), 2, dtype=h.dtype), h.unsqueeze(1) * torch.rand(len(h), 2, 1, dtype=h.dtype)
    ).sum(0),
    "a row as a batch": lambda h, r: (h.reshape(1, -1) @ torch.rand(h.numel(), h.numel()).double()).view(h.shape),
    "layer norm of all": lambda h, r: F.layer_norm(h, h.shape),
    "group norm": lambda h, r: F.group_norm(h.unsqueeze(0), 1)[0],
    "pooling": lambda h, r: F.avg_pool1d(h.t().unsqueeze(0), 3, 1, 1)[0].t(),
    "convolution": lambda h, r: F.conv1d(h.unsqueeze(0), torch.randn(len(h), len(h), 1, dtype=h.dtype))[0],
    "attention": lambda h, r: masked(h, r, torch.ones(len(h), len(h), dtype=torch.bool)),
    "attention over a border": lambda h, r: masked(h, r, (r.unsqueeze(1) == r) | (torch.rand(len(h), len(h)) < 0.3)),
    "attention without a mask": lambda h, r: masked(h, r, None),
    "attention among heads": lambda h, r: F.scaled_dot_product_attention(*[h.reshape(1, 1, -1, 1)] * 3).view(h.shape),
    "a Function": lambda h, r: MulBackward0.apply(h),
    "a norm of all": lambda h, r: h / h.norm(),
    "sums of all": lambda h, r: h - h.sum(dim=None, keepdim=True) + h.mean(dim=None, keepdim=True),
    "in place": lambda h, r: _in_place(h),
}  # fmt: skip


class MulBackward0(torch.autograd.Function):
    """Named as an operation that keeps rows apart, which it does forwards."""

    @staticmethod
    def forward(ctx, h):
        return h.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad - grad.mean(0)


MulBackward0._backward_cls.__name__ = "MulBackward0"


def _in_place(h):
    whole = h.clone()
    whole[0] = whole[-1] * 2
    return whole


def followed(own, r, checked):
    """What is said of the rows of losses [B]; each statement is compared with the Jacobian."""
    rows = RaggedRows(own, None, [RowIndex(r, len(own))])
    if rows.meeting() is not None or not own.isfinite().all():  # 0 * NaN is NaN
        return rows
    for node, (dim, owners) in rows._rows.items():
        if dim < len(shape_of((node, 0))) and shape_of((node, 0))[dim] == len(owners):
            for example in range(len(own)):
                edge = GradientEdge(node, 0)
                (grad,) = torch.autograd.grad(own[example], [edge], retain_graph=True, allow_unused=True)
                if grad is not None:
                    reached = (grad != 0).movedim(dim, 0).unsqueeze(-1).flatten(1).any(1)
                    assert not (reached & (owners != example)).any(), (checked, node.name(), owners)
    return rows


def network(operations, n, features, examples):
    """(losses [B], index [rows], the node of h) of operations one after another, between two sums by an index."""
    r = torch.cat([torch.arange(min(n, examples)), index_of(max(0, n - examples), examples)])[torch.randperm(n)]
    h = first = torch.randn(n, features, dtype=torch.float64, requires_grad=True) * 1.0
    for operation in operations:
        h = operation(h, r)
    return gathered(h.square().sum(1), r, examples), r, first.grad_fn


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("operation", APART.values(), ids=APART)
@pytest.mark.one_in(3)
def test_operations_that_keep_examples_apart_are_followed(operation, shape):
    own, r, first = network([operation], *shape)
    rows = followed(own, r, shape)
    if shape[0] > 1:  # of one row alone, dimensions of one may be mistaken for it, and nothing is said
        assert rows.problem == ""
        dim, owners = rows._rows[first]
        assert dim == 0
        assert bool(((owners == r) | (owners == NOBODY)).all())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("operation", MIXING.values(), ids=MIXING)
@pytest.mark.one_in(3)
def test_nothing_wrong_is_said_of_others(operation, shape):
    for _ in range(5):
        own, r, first = network([operation], *shape)
        rows = followed(own, r, shape)
        said = rows.problem == "" and rows.meeting() is None
        assert not said or first in rows._rows


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.one_in(4)
def test_nothing_wrong_is_said_of_chains(seed):
    torch.manual_seed(seed)
    counts = {True: 0, False: 0}
    for turn, shape in enumerate(itertools.islice(itertools.cycle(SHAPES), 36)):
        among = list((APART if turn % 3 else APART | MIXING).items())
        chain = [among[int(torch.randint(0, len(among), ()))] for _ in range(3)]
        own, r, _ = network([operation for _, operation in chain], *shape)
        if own.requires_grad:
            rows = followed(own, r, [name for name, _ in chain])
            counts[rows.problem == "" and rows.meeting() is None] += 1
    assert counts[True] > 0
    assert counts[False] > 0


# Attention without a kernel of its own keeps no mask; PReLU's weight is a view of a parameter.
NOT_FOLLOWED = ("packed text", "windows")


@pytest.fixture
def counts(monkeypatch):
    """A list that grows by one number for each backward that a test of rows takes."""
    found = []
    for place in (ragged_layout, mixing_test):
        run = place.first_pass
        monkeypatch.setattr(place, "first_pass", lambda *a, run=run, **named: found.append(1) or run(*a, **named))
    return found


@pytest.mark.parametrize("name", CASES)
def test_later_batches_take_no_backward_where_they_are_followed(name, counts):
    """After the first, whose layers are tested in full."""
    case = CASES[name]
    clipper = GhostClipper(case.build().double())
    for sizes, backwards in ((SIZES, None), (SIZES, 0), ((4, 9), 0), ((1,), 0)):
        counts.clear()
        batch = shuffled(graphs(sizes))
        clipper.norms(losses(clipper.model, batch), batch_index=case.index(batch))
        if backwards is None:
            assert len(counts) > 1
        else:
            assert len(counts) == int(name in NOT_FOLLOWED and len(sizes) > 1)


@pytest.mark.parametrize("mistake", CONNECTED.values(), ids=CONNECTED)
@pytest.mark.parametrize("build", [plain, *(CASES[name].build for name in ("gcn", "gat"))])
@pytest.mark.one_in(3)
def test_a_mistake_in_a_large_batch_is_refused_and_says_whose_rows_meet(build, mistake):
    model = build()
    clipper = GhostClipper(model)
    for turn in range(12):
        batch = graphs((5, 2, 3) * 30, torch.float32)
        clipper.backward(losses(model, batch), batch_index=batch["rows"])
        model.zero_grad()
        if turn:
            index = mistake(batch)
            with pytest.raises(UnsupportedModelError, match=r"By the graph, rows of the examples \d+ and \d+ meet at"):
                clipper.backward(losses(model, batch), batch_index=index)
            assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_an_edge_that_carries_nothing_passes(dtype):
    """Its weight is zero: the graph doesn't show that, the gradients do."""
    model = GCN().to(dtype)
    model.spread = lambda h, batch: gathered(h[batch["edges"][0]] * batch["weights"], batch["edges"][1], len(h)) + h
    clipper = GhostClipper(model)
    for turn in range(3):
        batch = graphs(dtype=dtype)
        if turn:
            batch["edges"] = torch.cat([batch["edges"], torch.tensor([[0], [len(batch["rows"]) - 1]])], 1)
        batch["weights"] = torch.ones(batch["edges"].shape[1], 1, dtype=dtype)
        batch["weights"][-1] = float(not turn)
        each = losses(model, batch)
        grads = [torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for loss in each]
        expected = torch.stack([torch.cat([grad.flatten() for grad in own]).norm() for own in grads])
        found = clipper.norms(each, batch_index=batch["rows"])
        torch.testing.assert_close(found, expected, rtol=1e-10 if dtype == torch.float64 else 1e-4, atol=0)


class Hooked(GCN):
    """Centres gradients over all rows behind the second layer, where asked."""

    centres = False

    def spread(self, h, batch):
        found = super().spread(h, batch)
        if self.centres:
            found.register_hook(lambda grad: grad - grad.mean(0))
        return found


def test_a_hook_that_mixes_examples_is_refused():
    """It isn't in the graph, so the gradients are compared."""
    model = Hooked().double()
    clipper = GhostClipper(model)
    for _ in range(2):
        clipper.norms(losses(model, batch := graphs()), batch_index=batch["rows"])
    model.centres, batch = True, graphs()
    own = losses(model, batch)
    for _ in range(2):  # what was refused once is not taken at the second time
        with pytest.raises(UnsupportedModelError, match="examples mix"):
            clipper.norms(own, batch_index=batch["rows"], retain_graph=True)


def test_hooks_of_others_cost_one_backward(counts):
    """Nobody knows whose they are, until the batch after them has been tested."""
    model = GCN().double()
    clipper = GhostClipper(model)
    for turn, number in enumerate((None, 0, 1, 0, 0)):
        counts.clear()
        if turn == 2:
            nn.ReLU().register_forward_hook(lambda *of: None)
        clipper.norms(losses(model, batch := graphs()), batch_index=batch["rows"])
        assert number is None or len(counts) == number


class Attention(nn.Module):
    """By products, which keep no mask."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, batch):
        h, r = self.first(batch["x"]), batch["rows"]
        apart = (r.unsqueeze(1) != r) & ~batch["open"]
        return self.head(gathered((h @ h.T).masked_fill(apart, -torch.inf).softmax(1) @ h, r, len(batch["y"])))


def test_what_is_not_followed_is_tested_by_the_gradients(counts):
    model = Attention().double()
    clipper = GhostClipper(model)
    for number in (None, 1, 1):
        counts.clear()
        batch = graphs() | {"open": torch.tensor(False)}
        clipper.norms(losses(model, batch), batch_index=batch["rows"])
        assert number is None or len(counts) == number
    batch["open"] = torch.tensor(True)
    with pytest.raises(UnsupportedModelError, match="attention without a mask"):
        clipper.norms(losses(model, batch), batch_index=batch["rows"])


def test_rows_are_not_read_from_what_checkpointing_saved(counts):
    class Checkpointed(GCN):
        def spread(self, h, batch):
            return torch.utils.checkpoint.checkpoint(super().spread, h, batch, use_reentrant=False)

        def forward(self, batch):
            return torch.utils.checkpoint.checkpoint(super().forward, batch, use_reentrant=False)

    model = Checkpointed().double()
    clipper = GhostClipper(model)
    for _ in range(3):
        counts.clear()
        clipper.norms(losses(model, batch := graphs()), batch_index=batch["rows"])
    assert len(counts) == 1


def test_an_input_that_requires_a_gradient_is_no_obstacle(counts):
    model = CASES["gcn"].build().double()
    clipper = GhostClipper(model)
    for _ in range(3):
        counts.clear()
        batch = graphs()
        batch["x"].requires_grad_()
        clipper.norms(losses(model, batch), batch_index=batch["rows"])
    assert not counts


def test_a_functions_backward_of_another_name_is_not_followed():
    own = MulBackward0.apply(torch.randn(3, 2, requires_grad=True) * 1.0).sum(1)
    assert own.grad_fn.next_functions[0][0].name() == "MulBackward0"
    assert RaggedRows(own, None, []).problem == "MulBackward0"


def test_a_layer_of_rows_in_another_dimension_is_not_followed():
    class Across(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(5, 4), nn.Linear(4, 4)

        def forward(self, batch):
            h = self.first(batch["x"])[:4].t()  # as many features as rows
            return gathered(self.second(h).sum(1), batch["rows"], len(batch["y"]))

    batch, model = graphs((2, 2)), Across().double()
    with pytest.raises(UnsupportedModelError):
        GhostClipper(model).norms(losses(model, batch), batch_index=batch["rows"])
