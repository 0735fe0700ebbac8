"""What moves rows by values, when ownership is measured, the alarm, forwards again: each part by itself."""

import copy
import pickle

import pytest
import torch
from case_models import Wired
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ghostclip
from ghostclip.clipper.forwards import ModelCalls
from ghostclip.clipper.trial import without_trace
from ghostclip.errors import RowsMovedError, UnsupportedModelError
from ghostclip.graph import alarm, layouts
from ghostclip.graph.operations import ROW_BY_ROW
from ghostclip.graph.overwritten import overwriting
from ghostclip.graph.parameter_names import ParameterNames
from ghostclip.graph.reader import read_graph
from ghostclip.norms.ragged import RowIndex

WIDTH = 5


# What moves rows by values -------------------------------------------------------------------------------------------


class Model(nn.Module):
    """Layers with something between them, which may read a parameter."""

    def __init__(self, between):
        super().__init__()
        self.first, self.second, self.between = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3), between
        self.bare = nn.Parameter(torch.eye(WIDTH))

    def forward(self, x):
        return self.second(self.between(self, self.first(x).tanh())).square().flatten(1).sum(1)


def measured(sizes, between=lambda m, h: h, dtype=torch.float32, factors=1.0, **options):
    """Which of some batches are measured, by number from 1."""
    found, known = [], layouts.Layouts(lambda _: None)
    model = ghostclip.wrap(Model(between).to(dtype))
    names = ParameterNames(model)
    for number, examples in enumerate(sizes, 1):
        losses = model(torch.randn(examples, WIDTH, dtype=dtype)) * factors
        if known.lay_out(losses, read_graph(losses, names), names, forward=lambda: None, **options).measured:
            found.append(number)
    return found


class Own(torch.autograd.Function):
    """A function whose backward is given."""

    @staticmethod
    def forward(ctx, h, back):
        ctx.back = back
        ctx.save_for_backward(h)
        return h.sigmoid()

    @staticmethod
    def backward(ctx, grad):
        return ctx.back(grad, *ctx.saved_tensors), None


def of_sigmoid(grad, h):
    return grad * h.sigmoid() * (1 - h.sigmoid())


class Copies(torch.autograd.Function):
    forward = staticmethod(lambda ctx, h: (h.clone(), h.clone()))
    backward = staticmethod(lambda ctx, *grads: sum(grads))


def in_part(h, change, factor=1.0):
    """Changes half of a tensor's entries in place, which are a factor times ``h`` before."""
    whole = torch.stack([h * factor, h * factor], -1)
    change(whole[..., 0])
    return whole.sum(-1) if h.dim() == 2 else whole.sum((1, -1))


EYE, IMAGES = torch.eye(6), torch.randn(6, 2, WIDTH)
ALWAYS = {
    "a product with data from the left": lambda m, h: EYE @ h,
    "a product with data from the right": lambda m, h: (h.T @ EYE).T,
    "a sparse product": lambda m, h: torch.sparse.mm(EYE.to_sparse(), h),
    "attention over examples": lambda m, h: F.scaled_dot_product_attention(
        *[h[None, None]] * 3, torch.where(EYE > 0, 0.0, -torch.inf)
    )[0, 0],
    "a mask and a sum": lambda m, h: (EYE[:, :, None] * h[None]).sum(1),
    "an operation that is not known": lambda m, h: h.renorm(2, 0, 1.0),
    "a whole turn along a dimension counted from the last": lambda m, h: h.roll(6, -2),
}
NEVER = {
    "a product with a parameter": lambda m, h: h @ m.bare,
    "attention within examples": lambda m, h: F.scaled_dot_product_attention(h[:, None], h[:, None], h[:, None])[:, 0],
    "rows of a parameter": lambda m, h: h * m.bare[torch.tensor([2, 0, 1, 3, 3, 1])],
    "an order within examples": lambda m, h: h[:, torch.tensor([2, 0, 1, 3, 4])],
    "data added in place": lambda m, h: in_part(h, lambda part: part.add_(IMAGES[:, 0])),
    "a function of one's own": lambda m, h: Own.apply(h, of_sigmoid),
    "a function of one's own that goes along rows": lambda m, h: Own.apply(h, lambda g, y: g - g.mean(1, keepdim=True)),
    "several rows of each example in place": lambda m, h: in_part(m.first(IMAGES).mul(h[:, None]), torch.sin_),
}
BY_INDEX = {
    "an index": lambda m, h, order: h[order],
    "index_select": lambda m, h, order: h.index_select(0, order),
    "gather": lambda m, h, order: h.gather(0, order[:, None].expand_as(h)),
    "index_add": lambda m, h, order: torch.zeros_like(h).index_add(0, order, h),
    "index_put": lambda m, h, order: torch.zeros_like(h).index_put((order,), h),
    "an index along another dimension": lambda m, h, order: h[None][:, order][0],
    "an index of what counts nothing": lambda m, h, order: h + 0.0 * h[None][:, order][0],
    "scatter": lambda m, h, order: torch.zeros_like(h).scatter(0, order[:, None].expand_as(h), h),
    "a product with data in place": lambda m, h, order: in_part(h, lambda part: part.addmm_(EYE[order], h), 0.0),
    "index_put in place": lambda m, h, order: in_part(h, lambda part: part.index_put_((order,), h), 0.0),
}
ORDER_UNSEEN = ("gather", "index_add", "scatter")
IN_ORDER, PERMUTED = torch.arange(6), torch.tensor([3, 1, 5, 0, 2, 4])


@pytest.mark.parametrize("name", ALWAYS)
def test_what_moves_rows_by_values_is_measured_in_every_batch(name):
    assert measured([6] * 3, ALWAYS[name]) == [1, 2, 3]


@pytest.mark.parametrize("name", NEVER)
def test_what_leaves_the_examples_in_place_moves_nothing(name):
    assert measured([6] * 3, NEVER[name]) == [1, 2]


@pytest.mark.parametrize("name", BY_INDEX)
def test_an_index_is_looked_at(name):
    def measured_by(*orders):
        left = iter(orders)
        return measured([6] * 3, lambda m, h: BY_INDEX[name](m, h, next(left)))

    assert measured_by(IN_ORDER, IN_ORDER, PERMUTED) == [1, 2, 3]
    assert measured_by(IN_ORDER, IN_ORDER, IN_ORDER) == ([1, 2, 3] if name in ORDER_UNSEEN else [1, 2])


# When ownership is measured ------------------------------------------------------------------------------------------


def by_orders():
    """An order that is the identity but in the second batch."""
    left = iter([IN_ORDER, PERMUTED, *[IN_ORDER] * 8])
    return lambda m, h: h[next(left)]


def product(kind, bias=lambda m: torch.zeros(WIDTH), turned=False):
    """A product with a frozen weight, by a function that says it is some library's, with examples first or last."""

    def forward(ctx, h, weight, bias):
        ctx.weight = weight
        return h @ weight.t() + bias

    def backward(ctx, grad):
        return grad @ ctx.weight, None, grad.sum(0)

    module, _, name = kind.rpartition(".")
    content = {"forward": staticmethod(forward), "backward": staticmethod(backward), "__module__": module}
    own = type(name, (torch.autograd.Function,), content)
    if turned:
        return lambda m, h: own.apply(h.t(), torch.eye(len(h)) * 2, torch.zeros(len(h))).t()
    return lambda m, h: own.apply(h, torch.eye(WIDTH) * 2, bias(m))


def recomputed(between):
    return lambda m, h: checkpoint(lambda h: between(m, m.first(h)), h, use_reentrant=False)


def in_passes_alone(grad, h):
    """What can't be called by itself."""
    if torch._C._current_graph_task_id() < 0:
        raise ArithmeticError
    return grad


ONLY_FIRST = torch.tensor([1.0, 0.0, 0.0, 0.0])
FOUR_BIT = "bitsandbytes.autograd._functions.MatMul4Bit"
EVERY, AS_ANY = [1, 2, 3, 4, 5, 6], [1, 2, 4]
# name: (sizes of batches, which are measured, what is between the layers, options)
SCHEDULES = {
    "less and less often": ([4] * 400, [1, 2, 4, 8, 16, 32, 64, 128, 256, 384], None, {}),
    "twice as large": ([4, 4, 8, 8, 15, 15, 16, 15, 31, 32], [1, 2, 3, 4, 7, 8, 10], None, {}),
    "irregular in one batch": ([6] * 6, EVERY, by_orders(), {}),
    "irregular in all": ([6] * 6, EVERY, lambda m, h: torch.cat([h[::2], h[1::2]]), {}),
    "asked for": ([4] * 6, EVERY, None, {"anew": True}),
    "asked for with an index": ([4] * 6, EVERY, None, {"indices": [RowIndex(torch.arange(4), 4)]}),
    # The others' gradients are zero: nothing was shown about them.
    "gradients of a single example": (
        [4] * 6, EVERY, lambda m, h: h * ONLY_FIRST[:, None], {"factors": ONLY_FIRST}),
    "a function that cannot be called alone": ([6] * 6, EVERY, lambda m, h: Own.apply(h, in_passes_alone), {}),
    "a function of two outputs": ([6] * 6, EVERY, lambda m, h: sum(Copies.apply(h)), {}),
    "a function that is recomputed": ([6] * 6, EVERY, recomputed(lambda m, h: Own.apply(h, of_sigmoid)), {}),
    # Adapters on quantized weights: what is done by a library's function is known by its name.
    **{f"quantized by {name}": ([6] * 6, AS_ANY, product(name), {}) for name in sorted(ROW_BY_ROW)},
    **{f"quantized by {name}, recomputed": ([6] * 6, AS_ANY, recomputed(product(name)), {})
       for name in sorted(ROW_BY_ROW)},
    "of that name elsewhere": ([6] * 6, AS_ANY, product("elsewhere.MatMul4Bit"), {}),
    "of that name elsewhere, recomputed": ([6] * 6, EVERY, recomputed(product("elsewhere.MatMul4Bit")), {}),
    "quantized, examples in the last dimension": (
        [6] * 6, EVERY, product("hqq.core.quantize.HQQMatmulCachedDeq", turned=True), {}),
    "quantized, a trained bias": ([6] * 6, EVERY, recomputed(product(FOUR_BIT, lambda m: m.bare[0])), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEDULES)
def test_when_batches_are_measured(name):
    sizes, batches, between, options = SCHEDULES[name]
    assert measured(sizes, between or (lambda m, h: h), **options) == batches


def test_batches_of_float16_are_measured_more_often():
    found = measured([4] * 50, dtype=torch.float16)
    assert {1, 2, 4, 8, 16, 32, 48} <= set(found)
    assert len(found) < 10


def test_another_operation_in_place_is_seen_in_its_batch():
    """The graph doesn't say which operation it is."""
    left = iter([torch.sin_] * 4 + [lambda part: part.cumsum_(0)])
    with pytest.raises(UnsupportedModelError, match="examples mix"):
        measured([6] * 5, lambda m, h: in_part(h, next(left)))
    assert next(left, None) is None


# Code of one's own ---------------------------------------------------------------------------------------------------


# What no batch shows whose gradients are finite, and of ordinary size.
FOR_THE_SAKE_OF_ONE = {
    "all dropped beside one that is not finite": lambda grad: grad if grad.isfinite().all() else grad * 0,
    "all zero beside one that is NaN": lambda grad: torch.zeros_like(grad) if grad.isnan().any() else grad,
    "all zero beside one that is infinite": lambda grad: torch.zeros_like(grad) if grad.isinf().any() else grad,
    "all rescaled beside a large one": lambda grad: grad * (1e6 / grad.norm()).clamp(max=1).nan_to_num(1),
    "all zero beside a large one": lambda grad: torch.zeros_like(grad) if grad.abs().max() > 1e6 else grad,
}
CHANGES_ALL, SHARED = "of your own changes every example's gradient", "all examples share"


def hooked(h, hook):
    h.register_hook(hook)
    return h


CODE_OF_ONES_OWN = {
    "hook": lambda change: lambda m, h: hooked(h, change),
    "function": lambda change: lambda m, h: Own.apply(h, lambda grad, h: change(grad)),
    "checkpointed function": lambda change: (
        lambda m, h: checkpoint(lambda x: Own.apply(x, lambda grad, h: change(grad)), h, use_reentrant=False)
    ),
}


@pytest.mark.parametrize("name", FOR_THE_SAKE_OF_ONE)
@pytest.mark.parametrize("examples", [2, 6])
@pytest.mark.parametrize("kind", CODE_OF_ONES_OWN)
@pytest.mark.one_in(2)
def test_what_would_change_all_gradients_for_the_sake_of_one_is_refused_in_the_first_batch(name, examples, kind):
    with pytest.raises(UnsupportedModelError, match=CHANGES_ALL):
        measured([examples], CODE_OF_ONES_OWN[kind](FOR_THE_SAKE_OF_ONE[name]))


def added(source, target):
    """One example's gradient is added to another's."""
    return lambda grad: grad.index_add(0, torch.tensor([target]), grad[source, None])


# name: (what changes gradients, what is said, examples)
BEGINNING = {
    **{name: (change, CHANGES_ALL, 6) for name, change in FOR_THE_SAKE_OF_ONE.items()},
    "mixes a little of their mean": (lambda grad: grad + 1e-3 * grad.mean(0), SHARED, 6),
    "mixes a little of the next example": (lambda grad: grad + 1e-3 * grad.roll(1, 0), SHARED, 6),
    "mixes by a factor that all share": (lambda grad: grad / grad.norm(), SHARED, 6),
    **{f"mixes {pair} of many": (added(*pair), SHARED, 24) for pair in ((0, 1), (9, 5), (20, 3))},
}


@pytest.mark.parametrize("name", BEGINNING)
def test_a_function_of_ones_own_that_begins_to_change_others_is_refused_in_its_batch(name):
    """The fifth, which isn't measured otherwise; until then the function has the backward of a sigmoid."""
    change, said, examples = BEGINNING[name]
    left = iter([of_sigmoid] * 4 + [lambda grad, h: change(grad)])
    with pytest.raises(UnsupportedModelError, match=said):
        measured([examples] * 5, lambda m, h: Own.apply(h, next(left)))
    assert next(left, None) is None


def once():
    """A backward that drops what it needs when it has run."""
    left = [2.0]
    return lambda grad, h: grad * left.pop()


def finite(grad):
    assert grad.isfinite().all()


@pytest.mark.parametrize(
    ("between", "what"),
    [(lambda m, h: Own.apply(h, once()), "IndexError"), (lambda m, h: hooked(h, finite), "AssertionError")],
)
def test_code_of_ones_own_that_raises_in_a_backward_that_measures_is_told_of_it(between, what):
    with pytest.raises(UnsupportedModelError, match=f"raised {what}: .*called several times in a step"):
        measured([6], between)


@pytest.mark.parametrize("kind", ["hook", "function"])
@pytest.mark.parametrize(
    "change",
    [torch.nan_to_num, lambda grad: grad.where(grad.isfinite().all(1, keepdim=True), 0), lambda grad: grad * -0.5],
    ids=["no NaN", "finite rows", "a factor"],
)
def test_code_of_ones_own_that_handles_each_row_by_itself_is_taken(change, kind):
    assert measured([6] * 3, CODE_OF_ONES_OWN[kind](change))


# The alarm -----------------------------------------------------------------------------------------------------------


def rings(norms, marks, largest=0.0, again=True):
    return alarm.rings(alarm.figures(norms, marks).tolist(), len(norms), largest, again)


def test_norms_that_follow_marks_ring():
    marks = alarm.ALARM.drawn(torch.ones(64))
    assert rings(1 / marks, marks)
    assert rings(1 / marks, marks, again=False)
    assert not rings(marks, marks)


def test_a_norm_far_above_all_that_were_measured_rings_where_it_costs_a_forward_only():
    norms, marks = torch.tensor([1.0, 17.0]), torch.tensor([0.5, 2.0**-15])
    assert rings(norms, marks, largest=1.0)
    assert not rings(norms, marks, largest=1.1)
    assert not rings(norms, marks, largest=0.0)
    assert not rings(norms, marks, largest=1.0, again=False)


def test_the_largest_norm_that_was_measured_is_remembered():
    known = layouts.Layouts(lambda _: None)
    for top in (3.0, 1.0, float("inf")):
        known.check_norms(7, [top, 0.0, 0.0], 4, measured=True, again=True)
    known.check_norms(7, [47.0, 0.0, 1.0], 4, measured=False, again=True)
    with pytest.raises(RowsMovedError, match="nothing was clipped"):
        known.check_norms(7, [49.0, 0.0, 1.0], 4, measured=False, again=True)


# Forwards again ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [2, 3, 6, 7])
def test_each_half_is_overwritten_once_by_a_row_of_the_other(rows):
    first, second = overwriting(0, rows), overwriting(1, rows)
    half = rows // 2
    assert first == [*range(half), *[half - 1] * (rows - half)]
    assert second == [*[half] * half, *range(half, rows)]
    assert not set(first) & set(second)


def copied(model):
    model.between = None  # a lambda isn't stored
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other.between = lambda m, h: h
        for _ in range(ModelCalls.MOST):
            other(torch.randn(4, WIDTH))


def tried(model):
    for _ in range(ModelCalls.MOST):
        with without_trace(model):
            model(torch.randn(4, WIDTH))


@pytest.mark.parametrize("others", [copied, tried])
def test_calls_of_a_copy_and_forwards_that_are_tried_are_no_calls_of_the_model(others):
    model = Model(lambda m, h: h)
    calls = ModelCalls(model)
    own = model(torch.randn(4, WIDTH))
    assert calls.behind(own) is not None
    others(model)
    assert calls.behind(own) is not None


@pytest.mark.parametrize("constant", ["a buffer", "data"])
def test_a_part_that_is_called_alone_may_take_buffers(constant):
    """Nothing can run it again, so that only the model's own constants are known."""
    model = Model(lambda m, h: h)
    model.part = Model(lambda m, h: h * (m.bare * (m.mask if constant == "a buffer" else h.detach().mean(0))))
    model.part.bare = nn.Parameter(torch.ones(WIDTH))
    model.part.register_buffer("mask", torch.linspace(0, 1, WIDTH))
    clipper = ghostclip.GhostClipper(ghostclip.wrap(model))
    losses = model.part(torch.randn(4, WIDTH))
    if constant == "a buffer":
        clipper.backward(losses)
    else:
        with pytest.raises(UnsupportedModelError, match="could not be tried; call engine"):
            clipper.backward(losses)


# What users say ------------------------------------------------------------------------------------------------------


def either_first(m, x, time_first):
    """Layers on [B, T, d] or [T, B, d]."""
    x = x.transpose(0, 1) if time_first else x
    return m.second(m.first(x).tanh()).square().sum((0, 2) if time_first else (1, 2))


def test_a_dimension_that_is_said_must_agree():
    model = Wired(either_first, first=nn.Linear(WIDTH, WIDTH), second=nn.Linear(WIDTH, 2))
    clipper = ghostclip.GhostClipper(ghostclip.wrap(model, batch_dim=1))
    clipper.backward(model(torch.randn(4, 3, WIDTH), True))
    with pytest.raises(UnsupportedModelError, match=r"batch_dim=\.\.\.\) says .* in dimension 0"):
        clipper.backward(model(torch.randn(4, 3, WIDTH), False))


@pytest.mark.parametrize("earlier", [0, 4])
def test_an_index_that_is_said_must_agree(earlier):
    model = Model(lambda m, h: h.view(4, 2, WIDTH).sum(1))
    clipper = ghostclip.GhostClipper(ghostclip.wrap(model))
    right = torch.arange(4).repeat_interleave(2)
    for _ in range(earlier):
        clipper.backward(model(torch.randn(8, WIDTH)))
    with pytest.raises(UnsupportedModelError, match="batch_index says"):
        clipper.backward(model(torch.randn(8, WIDTH)), batch_index=right.roll(1))
    clipper.backward(model(torch.randn(8, WIDTH)), batch_index=right)


class PaddedInside(nn.Module):
    """Takes the lengths of texts, and pads these to the longest or to a width, beside a table of positions."""

    def __init__(self, width: int | None) -> None:
        super().__init__()
        self.width, self.places, self.head = width, nn.Embedding(9, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, lengths: torch.Tensor) -> torch.Tensor:
        width = self.width or int(lengths.max())
        there = (torch.arange(width) < lengths[:, None]).unsqueeze(2)
        hidden = torch.tanh(lengths.view(-1, 1, 1) * self.places(torch.arange(width)))
        return self.head((there * hidden).sum(1))[:, 0]


def test_texts_that_are_padded_inside_of_the_forward():
    lengths = torch.arange(1, 9)
    fixed = ghostclip.GhostClipper(ghostclip.wrap(PaddedInside(8)))
    assert fixed.clip(lambda model, batch: model(batch), lengths).norms.shape == (8,)
    clipper = ghostclip.GhostClipper(ghostclip.wrap(PaddedInside(None)))
    with pytest.raises(UnsupportedModelError, match=r"layer places gives, and it has another size .* collate function"):
        clipper.clip(lambda model, batch: model(batch), lengths)
