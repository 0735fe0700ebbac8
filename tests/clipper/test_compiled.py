"""Compiled steps: every case as a graph, one graph for all batch sizes, the same training, refusals that say why."""

import ctypes
import itertools

import numpy as np
import pytest
import torch
from cases import CASES
from comparing import TOLERANCE, assert_close, truth, typical_norm
from graphs import Interpreted, assert_as_eager, interpret
from scipy.stats import binom
from torch.utils._pytree import tree_leaves

import ghostclip
from ghostclip.clipping import Automatic, Custom, Grouped, PerLayer
from ghostclip.compiled import clip as compiling
from ghostclip.compiled import trial
from ghostclip.compiled.signature import capacity_for


@pytest.fixture
def interpreted(monkeypatch):
    interpret(monkeypatch)


def losses_of(model, batch):
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def second_label(labels):
    """Read behind torch's back."""
    return ctypes.c_int64.from_address(labels.data_ptr() + 8).value


def classifier(dropout=0.0):
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Dropout(dropout), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3)
    )


def batch_of(size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 6, generator=generator), torch.randint(0, 3, (size,), generator=generator)


# Why any row may run eagerly, and why those with such names may.
REFUSED = ("time steps would be compiled", "may order examples differently")
LOOKS, IN_PLACE = "the forward or the loss looks at values", "whose rows are whose must be measured in every batch"
MAY_BE_REFUSED = {
    "offsets": LOOKS,
    "own recurrent layer": LOOKS,
    "own gate": LOOKS,
    "bare checkpointed": "or checkpointing forbids ",
    "in place": IN_PLACE,
    "assignment": IN_PLACE,
}
# Rows that are measured in every batch, and so never have a graph.
MEASURED = ("bare bilinear", "bare by selection", "mask token put in place")


def smooth(out):
    """A loss [B] for any output [B, ...], made of nothing but the output."""
    flat = torch.cat([part.flatten(1) for part in tree_leaves(out) if part is not None], 1)
    return (flat * torch.arange(1, flat.shape[1] + 1, dtype=flat.dtype).cos()).sum(1) + flat.square().mean(1)


def in_dimension_0(row):
    apart = row.wrap or "time first" in row.name or row.name.startswith(("rnn", "lstm", "gru"))
    return not apart and all(dim == 0 for dim in row.batch_dims or ())


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("policy", ["cached", "reweight", "per layer"])
@pytest.mark.parametrize("row", [row for row in CASES if in_dimension_0(row)], ids=str)
@pytest.mark.one_in(200)
def test_every_case_as_a_graph(row, policy):
    max_norm = typical_norm(truth(row))
    clipping = PerLayer(max_norm) if policy == "per layer" else max_norm
    options = {} if policy == "per layer" else {"second_pass": policy}
    clipper = ghostclip.GhostClipper(ghostclip.wrap(row.model()), clipping, compile=True, **options)
    for _ in range(5):  # ownership is measured in the first, second and fourth
        found, expected = assert_as_eager(clipper, lambda m, b: smooth(m(*b)), row.inputs(), TOLERANCE[torch.float64])
    torch.testing.assert_close(found.norms, expected.norms, rtol=TOLERANCE[torch.float64], atol=1e-13)
    compiled = clipper.compiled
    reasons = [*REFUSED, *(reason for name, reason in MAY_BE_REFUSED.items() if name in row.name)]
    if row.name in MEASURED:
        assert (compiled.graphs, compiled.refusals) == (0, [])
    elif any(reason in str(compiled.refusals) for reason in reasons):
        assert compiled.graphs == 0
    else:
        assert compiled.refusals == []
        (plan,) = compiled._plans.values()
        assert plan.region.runs > 1


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("policy", [0.5, Automatic(0.5), PerLayer(0.5), Grouped({"all": ["*"]}, max_norm=0.5)], ids=str)
@pytest.mark.one_in(2)
def test_padded_batches_share_one_graph(policy):
    clipper = ghostclip.GhostClipper(classifier().double(), policy)
    clipper.compile(expected=32)
    for size in (32, 35, 37, 1, 0, 33, 36):
        x, y = batch_of(size, seed=size)
        found, expected = assert_as_eager(clipper, losses_of, (x.double(), y), 1e-10)
        assert found.losses.shape == (size,)
        assert_close(found.losses, expected.losses, 1e-12)
        flat = found.weights if isinstance(found.weights, dict) else {"": found.weights}
        assert all(weights.shape == (size,) for weights in flat.values())
    assert clipper.compiled.graphs == 1
    assert clipper.compiled.refusals == []


@pytest.mark.usefixtures("interpreted")
def test_a_loss_that_depends_on_something_else_is_found_out():
    calls = []

    def drifting(model, batch):
        calls.append(1)
        return losses_of(model, batch) * len(calls)

    clipper = ghostclip.GhostClipper(classifier(), 1e9, compile=True)
    for _ in range(3):
        clipper.clip(drifting, batch_of(8))
    assert "depends on something besides" in clipper.compiled.refusals[0]
    before = [p.grad.clone() for p in clipper.model.parameters()]
    clipper.clip(drifting, batch_of(8))
    assert all(not torch.equal(p.grad, old) for p, old in zip(clipper.model.parameters(), before, strict=True))


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("loss_fn", "reason"),
    [
        (lambda m, b: losses_of(m, b) * (2 if b[0].sum() > 0 else 1), "looks at values"),
        (lambda m, b: losses_of(m, b) * torch.from_numpy(b[0].detach().numpy().copy()).sum(1), "looks at values"),
        (lambda m, b: losses_of(m, b) * max(b[1].tolist()), "looks at values"),
        (lambda m, b: losses_of(m, b) * np.asarray(b[1]).max(), "looks at values"),
        (lambda m, b: losses_of(m, b) * len(str(b[0])), "looks at values"),
        (lambda m, b: losses_of(m, b) * (1 + second_label(b[1])), "dispatcher doesn't see"),
        (lambda m, b: losses_of(m, b) * torch.tensor(1.0 + second_label(b[1])), "dispatcher doesn't see"),
    ],
)
def test_what_can_not_be_written_down_is_refused(loss_fn, reason):
    clipper = ghostclip.GhostClipper(classifier(), 0.5, compile=True)
    for _ in range(2):
        assert_as_eager(clipper, loss_fn, batch_of(8))
    assert reason in clipper.compiled.refusals[0]


@pytest.mark.usefixtures("interpreted")
def test_tables_of_the_loss_are_read_anew_each_time():
    weights = torch.tensor([1.0, 2.0, 3.0])

    def weighted(model, batch):
        return losses_of(model, batch) * weights[batch[1]] + torch.tensor([0.1, 0.2]).sum()

    clipper = ghostclip.GhostClipper(classifier(), 0.5, compile=True)
    for _ in range(7):
        weights.mul_(1.3)
        assert_as_eager(clipper, weighted, batch_of(8))
    assert clipper.compiled.refusals == []


def test_what_runs_eagerly_says_why():
    lstm = torch.nn.Sequential()
    lstm.add_module("lstm", torch.nn.LSTM(6, 4, batch_first=True, proj_size=3))
    clipper = ghostclip.GhostClipper(lstm, 1.0, compile=True)
    x = torch.randn(3, 5, 6)
    for _ in range(3):
        clipper.clip(lambda m, b: m(b)[0].sum((1, 2)), x)
    assert clipper.compiled.refusals == [
        "lstm is an LSTM with projections, whose time steps would be compiled one by one"
    ]
    custom = ghostclip.GhostClipper(classifier(), Custom(lambda n: 1 / (n + n.mean()), 1.0))
    custom.compile(expected=8)
    for _ in range(3):
        custom.clip(losses_of, batch_of(8))
    assert "Custom may look at all norms at once" in custom.compiled.refusals[0]


@pytest.mark.usefixtures("interpreted")
def test_a_step_that_eager_does_faster_is_left_to_it(monkeypatch):
    # No time is taken: a clock of our own says that each graph took 2 seconds and each eager step 1.
    readings = itertools.cycle([0.0, 2.0, 2.0, 3.0])
    monkeypatch.setattr(trial, "clock", lambda: next(readings))
    clipper = ghostclip.GhostClipper(classifier(), 1.0, compile=True)
    for _ in range(7):
        clipper.clip(losses_of, batch_of(8))
    assert "eager is faster (1e+03 ms, compiled 2e+03)" in clipper.compiled.refusals[0]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("narrow", ["autocast", "parameters"])
def test_narrow_types_are_compiled(narrow):
    def loss_fn(model, batch):
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow == "autocast"):
            outputs = model(batch[0].to(model[0].weight.dtype))
        return torch.nn.functional.cross_entropy(outputs.float(), batch[1], reduction="none")

    dtype = torch.bfloat16 if narrow == "parameters" else torch.float32
    clipper = ghostclip.GhostClipper(classifier().to(dtype), 0.1, compile=True)
    for _ in range(compiling.TRIALS + 3):
        assert_as_eager(clipper, loss_fn, batch_of(8), 1e-6)
    assert (clipper.compiled.graphs, clipper.compiled.refusals) == (1, [])


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("times", [1, 3])
def test_a_loss_that_is_another_one_every_time_is_not_compiled_for_ever(times, monkeypatch):
    monkeypatch.setattr(compiling, "MOST_GRAPHS", 3)
    monkeypatch.setattr(compiling, "MOST_KEYS", 6)
    clipper = ghostclip.GhostClipper(classifier(), 1.0, compile=True)
    for step in range(8 * times):
        clipper.clip(lambda m, b, scale=1.0 / (step // times + 1): losses_of(m, b) * scale, batch_of(8))
    graphs, reason = (1, "most of them less than 3 times") if times == 1 else (3, "so no more will be")
    assert clipper.compiled.graphs == graphs
    assert reason in clipper.compiled.refusals[0]


@pytest.mark.parametrize("expected", [4, 8, 16, 32, 64, 128, 256, 1024])
def test_a_tenth_of_the_rows_is_padding_in_the_mean(expected):
    sample = binom(20 * expected, 0.05)
    sizes = range(1, 3 * expected)
    rows = [capacity_for(size, expected) for size in sizes]
    assert all(more >= size for more, size in zip(rows, sizes, strict=True))
    chances = sample.pmf(sizes)
    assert chances @ rows <= 1.1 * expected
    assert len({more for more, chance in zip(rows, chances, strict=True) if chance > 1e-3}) <= 11
    assert capacity_for(expected, expected, largest=expected) == expected


@pytest.mark.usefixtures("interpreted")
def test_a_trial_draws_no_random_numbers_that_eager_training_would_not():
    states = []
    for compiled in (False, True):
        torch.manual_seed(3)
        clipper = ghostclip.GhostClipper(classifier(dropout=0.5), 1.0, compile=compiled)
        torch.manual_seed(4)
        for _ in range(compiling.TRIALS + 3):
            clipper.clip(losses_of, batch_of(8))
        states.append(torch.random.get_rng_state())
        assert clipper.compiled is None or clipper.compiled.refusals == []
    assert torch.equal(*states)


def graphs_are_wrong(monkeypatch):
    monkeypatch.setattr(Interpreted, "__call__", lambda self, *inputs: [2 * each for each in self.graph(*inputs)])


@pytest.mark.usefixtures("interpreted")
def test_a_graph_of_a_model_with_dropout_is_compared_though_its_batches_are_padded(monkeypatch):
    graphs_are_wrong(monkeypatch)
    clipper = ghostclip.GhostClipper(classifier(dropout=0.5), 1.0)
    clipper.compile(expected=32)
    for seed in range(3):
        clipper.clip(losses_of, batch_of(30, seed=seed))
    assert "differ from eager's" in clipper.compiled.refusals[0]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("dropout", "expected", "size"), [(0.0, None, 8), (0.5, 32, 30)], ids=["whole", "padded"])
def test_a_graph_is_compared_again_as_long_as_it_is_used(dropout, expected, size, monkeypatch):
    monkeypatch.setattr(compiling, "MEASURED", 16)
    clipper = ghostclip.GhostClipper(classifier(dropout=dropout), 1.0)
    clipper.compile(expected=expected)
    for seed in range(12):
        clipper.clip(losses_of, batch_of(size, seed=seed))
    assert clipper.compiled.refusals == []
    graphs_are_wrong(monkeypatch)
    for seed in range(16):
        clipper.clip(losses_of, batch_of(size, seed=seed))
    assert "differ from eager's" in clipper.compiled.refusals[0]


def scaled_in_place(model, batch):
    batch[0].div_(2.0)
    return losses_of(model, batch)


def drawn_by_numpy(model, batch):
    return losses_of(model, batch) * (1.0 if np.random.uniform() < 0.9 else 0.5)


def of_sparse(model, batch):
    return losses_of(model, (batch[0].to_dense(), batch[1]))


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("loss_fn", "change", "reason"),
    [
        (scaled_in_place, lambda x: x, "changes the batch in place"),
        (drawn_by_numpy, lambda x: x, "draws from NumPy's"),
        (of_sparse, torch.Tensor.to_sparse, "something besides dense tensors"),
        (lambda m, b: losses_of(m, b[0]), lambda x: x, None),
    ],
    ids=["in place", "numpy", "sparse", "texts"],
)
def test_batches_that_no_graph_takes_are_clipped_as_ever_and_said_once(loss_fn, change, reason):
    plain = ghostclip.GhostClipper(classifier(), 0.5)
    clipper = ghostclip.GhostClipper(classifier(), 0.5, compile=True)
    for seed in range(5):
        norms = []
        for each in (plain, clipper):
            x, y = batch_of(8, seed=seed)
            batch = ((change(x), y), ["a text"]) if reason is None else (change(x), y)
            np.random.seed(seed)
            norms.append(each.clip(loss_fn, batch).norms)
        assert torch.equal(*norms)
    assert (reason or "something besides dense tensors") in clipper.compiled.refusals[0]
    assert len(clipper.compiled.refusals) <= 2
    assert clipper.compiled.graphs == 0


def test_a_model_that_is_measured_in_every_batch_says_so(monkeypatch):
    monkeypatch.setattr(compiling, "MOST_OPEN", 4)
    clipper = ghostclip.GhostClipper(classifier(), 0.5, compile=True)

    def permuted(model, batch):
        order = torch.randperm(len(batch[0]))
        return losses_of(lambda x: model(x[order])[order.argsort()], batch)

    for seed in range(6):
        clipper.clip(permuted, batch_of(8, seed=seed))
    assert clipper.compiled.refusals == [clipper.compiled.refusals[0]]
    assert "is measured in every batch of this model" in clipper.compiled.refusals[0]


@pytest.mark.slow
def test_inductor_trains_as_eager_does_with_one_graph_of_the_passes():
    weights = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = classifier()
        x, y = batch_of(200)
        engine = ghostclip.PrivacyEngine(
            model, torch.optim.Adam(model.parameters(), 0.01), torch.utils.data.TensorDataset(x, y), batch_size=20,
            sampling="without_replacement", noise_multiplier=1.0, noise="test", seed=1,
        )  # fmt: skip
        if compiled:
            engine.compile()
        for _ in range(2):
            for batch in engine.batches():
                engine.step(batch, losses_of)
        weights.append([p.detach().clone() for p in model.parameters()])
        if compiled:
            found = engine._steps._clipper.compiled
            assert found.graphs == 1
            assert found.seconds > 0
            assert all("eager is faster" in reason for reason in found.refusals)
    for left, right in zip(*weights, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-4)


def test_a_wrong_loss_shape_is_refused_where_steps_are_compiled():
    clipper = ghostclip.GhostClipper(classifier(), compile=True)
    with pytest.raises(ghostclip.LossShapeError):
        clipper.clip(lambda m, b: losses_of(m, b).mean(), batch_of(20))


@pytest.mark.usefixtures("interpreted")
def test_a_loss_function_that_fills_gradients_is_refused_compiled_too():
    model = ghostclip.wrap(torch.nn.Sequential(torch.nn.Linear(6, 3)))
    clipper = ghostclip.GhostClipper(model, 1.0, compile=True)
    inputs = torch.randn(20, 6)

    def losses(model, inputs):
        if not torch._C._are_functorch_transforms_active():
            (1000 * model(inputs).square()).sum().backward()
        return model(inputs).square().sum(1)

    with pytest.raises(ghostclip.GradientLeakError):
        clipper.clip(losses, inputs)


@pytest.mark.usefixtures("interpreted")
def test_rounding_to_narrow_gradients_counts_as_without_compiling():
    """A graph's sums are rounded to p.grad as those of `backward` are, and the sensitivity has room for it."""
    bounds = []
    for compile in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3)).bfloat16()
        clipper = ghostclip.GhostClipper(ghostclip.wrap(model), 0.5, compile=compile)
        for _ in range(6):
            x = torch.randn(8, 5, dtype=torch.bfloat16)
            result = clipper.clip(lambda model, x: model(x).float().square().sum(1), x)
        bounds.append((result.sensitivity, clipper.sensitivity))
    assert clipper.compiled.graphs == 1
    assert bounds[0] == bounds[1]
    assert bounds[0][0] > 0.5
