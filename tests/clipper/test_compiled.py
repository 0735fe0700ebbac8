"""Compiled steps: every case as a graph, one graph for all batch sizes, the same training, refusals that say why."""

import collections
import ctypes
import itertools

import numpy as np
import pytest
import recurrent_readers as readers
import torch
from case_models import Wired
from cases import CASES
from comparing import TOLERANCE, assert_close, every_pass, truth, typical_norm
from graphs import Interpreted, assert_as_eager, interpret
from private_runs import losses_of
from scipy.stats import binom
from torch.utils._pytree import tree_leaves

import ghostclip
from ghostclip.clipping import Custom, PerLayer
from ghostclip.compiled import clip as compiling
from ghostclip.compiled import region, trial
from ghostclip.compiled.signature import capacity_for


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Undone where a graph of inductor's is to run."""
    interpret(monkeypatch)


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


def clipped(loss_fn, seeds, model=None, clipping=1.0, size=8, **options):
    """A clipper that compiles, after a batch of each seed."""
    clipper = ghostclip.GhostClipper(model or classifier(), clipping, **{"compile": True} | options)
    for seed in seeds:
        clipper.model.zero_grad()
        clipper.clip(loss_fn, batch_of(size, seed))
    return clipper


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


@pytest.mark.parametrize("policy", ["cached", "reweight", "per layer"])
@pytest.mark.parametrize("row", [row for row in CASES if in_dimension_0(row)], ids=str)
@pytest.mark.one_in(400)
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


@pytest.mark.parametrize("policy", [0.5, PerLayer(0.5)], ids=str)
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


def picked(picks):
    """Later batches' sums would depend on how many entries the batch has picked that the graph was made with."""
    return lambda model, batch: losses_of(model, batch) * (1 if picks(batch[1]) else 2)


def drawn_by(generator):
    return lambda model, batch: losses_of(model, batch) * (0.1 + (generator.uniform() < 0.999))


def drifting():
    calls = []

    def loss_fn(model, batch):
        calls.append(1)
        return losses_of(model, batch) * len(calls)

    return loss_fn


LOOKS, UNSEEN, ELSE = "looks at values", "dispatcher doesn't see", "depends on something besides the batch"
NOT_WRITTEN_DOWN = {
    "a branch": (lambda m, b: losses_of(m, b) * (2 if b[0].sum() > 0 else 1), LOOKS),
    "numpy": (lambda m, b: losses_of(m, b) * torch.from_numpy(b[0].detach().numpy().copy()).sum(1), LOOKS),
    "a list": (lambda m, b: losses_of(m, b) * max(b[1].tolist()), LOOKS),
    "an array": (lambda m, b: losses_of(m, b) * np.asarray(b[1]).max(), LOOKS),
    "a text": (lambda m, b: losses_of(m, b) * len(str(b[0])), LOOKS),
    "memory": (lambda m, b: losses_of(m, b) * (1 + second_label(b[1])), UNSEEN),
    "memory in a tensor": (lambda m, b: losses_of(m, b) * torch.tensor(1.0 + second_label(b[1])), UNSEEN),
    "a mask": (picked(lambda labels: labels[labels < 4].numel() == 0), LOOKS),
    "masked_select": (picked(lambda labels: labels.masked_select(labels < 4).numel() == 0), LOOKS),
    "nonzero": (picked(lambda labels: len((labels < 4).nonzero()) == 0), LOOKS),
    "where": (picked(lambda labels: len(torch.where(labels < 4)[0]) == 0), LOOKS),
    "argwhere": (picked(lambda labels: len(torch.argwhere(labels < 4)) == 0), LOOKS),
    "unique": (picked(lambda labels: len(labels.unique()) == 1), LOOKS),
    "unique_consecutive": (picked(lambda labels: len(labels.unique_consecutive()) == 1), LOOKS),
    "bincount": (picked(lambda labels: len(labels.bincount()) == 1), LOOKS),
    "repeat_interleave": (picked(lambda labels: len(labels.repeat_interleave(4 - labels)) == 0), LOOKS),
    "a generator": (drawn_by(np.random.default_rng(0)), ELSE),
    "an older generator": (drawn_by(np.random.RandomState(0)), ELSE),
    "a counter": (drifting(), ELSE),
}


@pytest.mark.parametrize(("loss_fn", "reason"), NOT_WRITTEN_DOWN.values(), ids=NOT_WRITTEN_DOWN)
@pytest.mark.one_in(2)
def test_what_can_not_be_written_down_is_refused(loss_fn, reason):
    compiled = clipped(loss_fn, [0] * 6).compiled
    assert compiled.graphs == 0
    assert reason in compiled.refusals[0]


def test_numbers_of_a_tensor_that_the_forward_makes_of_sizes_are_constants():
    sizes = lambda m, b: losses_of(m, b) / torch.tensor(b[0].shape[1]).sqrt().item()  # noqa: E731
    compiled = clipped(sizes, range(6)).compiled
    assert (compiled.graphs, compiled.refusals) == (1, [])


@pytest.mark.parametrize("copies", [False, True], ids=["read", "copied into a tensor of the forward's"])
def test_numbers_of_any_other_tensor_are_not(copies):
    temperature = torch.tensor(1.0)

    def loss_fn(model, batch):
        read = torch.tensor(0.0).copy_(temperature) if copies else temperature
        return losses_of(model, batch) * read.item()

    clipper = clipped(loss_fn, range(6))
    assert LOOKS in clipper.compiled.refusals[0]
    temperature.fill_(0.1)
    assert_as_eager(clipper, loss_fn, batch_of(8))


def test_rows_moved_by_a_tensor_that_a_graph_would_read_anew_have_no_graph():
    """There and back: whose rows are whose in between would be known from the order of earlier batches."""
    order = torch.arange(8)
    moving = Wired(
        lambda m, x: m.last(m.first(x)[order].tanh())[order.argsort()],
        first=torch.nn.Linear(6, 8), last=torch.nn.Linear(8, 3),
    )  # fmt: skip
    clipper = clipped(losses_of, range(6), moving)
    assert clipper.compiled.graphs == 0
    order.copy_(torch.tensor([3, 2, 1, 0, 7, 6, 5, 4]))
    assert_as_eager(clipper, losses_of, batch_of(8, 1))


def test_tables_of_the_loss_are_read_anew_each_time():
    weights = torch.tensor([1.0, 2.0, 3.0])

    def weighted(model, batch):
        return losses_of(model, batch) * weights[batch[1]] + torch.tensor([0.1, 0.2]).sum()

    clipper = ghostclip.GhostClipper(classifier(), 0.5, compile=True)
    for _ in range(7):
        weights.mul_(1.3)
        assert_as_eager(clipper, weighted, batch_of(8))
    assert clipper.compiled.refusals == []


LSTM = torch.nn.Sequential(collections.OrderedDict(lstm=torch.nn.LSTM(6, 4, batch_first=True, proj_size=3)))
EAGER = {
    "time steps": (LSTM, {}, "lstm is an LSTM with projections, whose time steps would be compiled one by one"),
    "policy": (None, {"clipping": Custom(lambda n: 1 / (n + n.mean()), 1.0)}, "Custom may look at all norms at once"),
    "two passes": (torch.nn.Linear(64, 64), {"memory_budget": 1, "second_pass": "cached"}, "keeps all gradients"),
}


@pytest.mark.parametrize(("model", "options", "reason"), EAGER.values(), ids=EAGER)
def test_what_runs_eagerly_says_why(model, options, reason):
    clipper = ghostclip.GhostClipper(model or classifier(), **{"clipping": 1.0} | options)
    clipper.compile(expected=8)
    width = next(clipper.model.parameters()).shape[1]
    for _ in range(3):
        clipper.model.zero_grad()
        clipper.clip(lambda model, x: tree_leaves(model(x))[0].sum((1, 2)), torch.randn(3, 5, width))
    assert (clipper.compiled.graphs, len(clipper.compiled.refusals)) == (0, 1)
    assert reason in clipper.compiled.refusals[0]


def test_a_custom_function_of_groups_has_a_graph():
    groups = {"weight": ["*weight"], "bias": ["*bias"]}
    policy = Custom(lambda norms: {group: 0.3 / (n + 1) for group, n in norms.items()}, 0.5, groups)
    clipper = ghostclip.GhostClipper(classifier(), policy, compile=True)
    for _ in range(3):
        assert_as_eager(clipper, losses_of, batch_of(8))
    assert (clipper.compiled.graphs, clipper.compiled.refusals) == (1, [])


def test_a_step_that_eager_does_faster_is_left_to_it(monkeypatch):
    # No time is taken: a clock of our own says that each graph took 2 seconds and each eager step 1.
    readings = itertools.cycle([0.0, 2.0, 2.0, 3.0])
    monkeypatch.setattr(trial, "clock", lambda: next(readings))
    refusals = clipped(losses_of, [0] * 7).compiled.refusals
    assert "eager is faster (1e+03 ms, compiled 2e+03)" in refusals[0]


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


@pytest.mark.parametrize(
    ("times", "graphs", "reason"), [(1, 1, "most of them less than 3 times"), (3, 2, "so no more will be")]
)
def test_a_loss_that_is_another_one_every_time_is_not_compiled_for_ever(times, graphs, reason, monkeypatch):
    monkeypatch.setattr(compiling, "MOST_GRAPHS", 2)
    monkeypatch.setattr(compiling, "MOST_KEYS", 5)
    clipper = ghostclip.GhostClipper(classifier(), 1.0, compile=True)
    for step in range(7 * times):
        clipper.clip(lambda m, b, scale=1.0 / (step // times + 1): losses_of(m, b) * scale, batch_of(8))
    assert clipper.compiled.graphs == graphs
    assert reason in clipper.compiled.refusals[0]


@pytest.mark.parametrize("expected", [4, 16, 128, 1024])
def test_a_tenth_of_the_rows_is_padding_in_the_mean(expected):
    sample = binom(20 * expected, 0.05)
    sizes = range(1, 3 * expected)
    rows = [capacity_for(size, expected) for size in sizes]
    assert all(more >= size for more, size in zip(rows, sizes, strict=True))
    chances = sample.pmf(sizes)
    assert chances @ rows <= 1.1 * expected
    assert len({more for more, chance in zip(rows, chances, strict=True) if chance > 1e-3}) <= 11
    assert capacity_for(expected, expected, largest=expected) == expected


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


@pytest.mark.parametrize(
    ("dropout", "expected", "size", "before", "after"),
    [(0.0, None, 8, 12, 16), (0.5, 32, 30, 12, 16), (0.5, 32, 30, 0, 3)],
    ids=["whole, in use", "padded, in use", "padded, from the first"],
)
def test_a_graph_is_compared_as_long_as_it_is_used(dropout, expected, size, before, after, monkeypatch):
    monkeypatch.setattr(compiling, "MEASURED", 16)
    clipper = ghostclip.GhostClipper(classifier(dropout=dropout), 1.0)
    clipper.compile(expected=expected)
    for seed in range(before):
        clipper.clip(losses_of, batch_of(size, seed=seed))
    assert clipper.compiled.refusals == []
    monkeypatch.setattr(Interpreted, "__call__", lambda self, *inputs: [2 * each for each in self.graph(*inputs)])
    for seed in range(after):
        clipper.clip(losses_of, batch_of(size, seed=seed))
    assert "differ from eager's" in clipper.compiled.refusals[0]


def scaled_in_place(model, batch):
    batch[0].div_(2.0)
    return losses_of(model, batch)


def drawn_by_numpy(model, batch):
    return losses_of(model, batch) * (1.0 if np.random.uniform() < 0.9 else 0.5)


def of_sparse(model, batch):
    return losses_of(model, (batch[0].to_dense(), batch[1]))


DENSE = "something besides dense tensors"


@pytest.mark.parametrize(
    ("loss_fn", "change", "reason"),
    [
        (scaled_in_place, lambda x, y: (x, y), "changes the batch in place"),
        (drawn_by_numpy, lambda x, y: (x, y), "draws from NumPy's"),
        (of_sparse, lambda x, y: (x.to_sparse(), y), DENSE),
        (lambda m, b: losses_of(m, b[0]), lambda x, y: ((x, y), ["a text"]), DENSE),
    ],
    ids=["in place", "numpy", "sparse", "texts"],
)
def test_batches_that_no_graph_takes_are_clipped_as_ever_and_said_once(loss_fn, change, reason):
    plain = ghostclip.GhostClipper(classifier(), 0.5)
    clipper = ghostclip.GhostClipper(classifier(), 0.5, compile=True)
    for seed in range(5):
        norms = []
        for each in (plain, clipper):
            np.random.seed(seed)
            norms.append(each.clip(loss_fn, change(*batch_of(8, seed=seed))).norms)
        assert torch.equal(*norms)
    assert reason in clipper.compiled.refusals[0]
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


# What a forward may do to its model, besides.
DOES = {
    "in place": lambda m, x: m.count.add_(1),
    "anew": lambda m, x: setattr(m, "count", m.count + 1),
    "attribute": lambda m, x: setattr(m, "calls", m.calls + 1),
    "kept": lambda m, x: setattr(m, "last", x * 2),
    "value": lambda m, x: float(x.sum()),
}
FORWARDS = collections.deque()


def counted(model, batch):
    FORWARDS.append(1)
    return losses_of(model, batch)


@pytest.mark.parametrize("change", DOES)
def test_trials_leave_no_trace_and_a_refusal_is_remembered(change):
    model = Wired(lambda m, x: (DOES[change](m, x), m.inner(x))[1], inner=torch.nn.Linear(6, 3))
    model.calls = 0
    model.register_buffer("count", torch.zeros(()))
    clipper = ghostclip.GhostClipper(model, 1.0, compile=True)
    record = clipper.compiled
    sizes = (8, 5, 8, 7, 6, 9, 10, 11, 12, 4, 3, 2, 8, 8, 8, 8)
    FORWARDS.clear()
    for size in sizes:
        model.zero_grad()
        clipper.clip(counted, batch_of(size))
    assert float(model.count) == (len(sizes) if change in ("in place", "anew") else 0)
    assert model.calls == (len(sizes) if change == "attribute" else 0)
    assert record.graphs == 0
    assert len(FORWARDS) <= len(sizes) + 2 * (2 if change == "value" else 1)
    assert len(record.refusals) <= 2
    reason = "looks at values" if change == "value" else "changes the model's buffers, attributes"
    assert all(reason in refusal for refusal in record.refusals)


@pytest.mark.slow
def test_inductor_trains_as_eager_does_with_one_graph_of_the_passes(monkeypatch):
    monkeypatch.undo()
    weights = []
    for compiled in (False, True):
        model = classifier()
        engine = ghostclip.PrivacyEngine(
            model, torch.optim.Adam(model.parameters(), 0.01), torch.utils.data.TensorDataset(*batch_of(200)),
            batch_size=20, sampling="without_replacement", noise_multiplier=1.0, noise="test", seed=1,
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


def assert_recurrent_sums_are_eager_ones(name, second_pass):
    clipper = ghostclip.GhostClipper(readers.model_of(name), 0.5, second_pass=second_pass, compile=True)
    for _ in range(6):
        batch = (torch.randn(5, 7, 3, dtype=torch.float64),)
        assert_as_eager(clipper, readers.losses_of, batch, TOLERANCE[torch.float64])
    assert (clipper.compiled.graphs, clipper.compiled.refusals) == (1, [])


@every_pass
@pytest.mark.parametrize("name", readers.LAYERS)
@pytest.mark.one_in(12)
def test_a_graph_of_a_recurrent_layer_is_one_operation_for_all_time_steps(name, second_pass):
    assert_recurrent_sums_are_eager_ones(name, second_pass)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rnn", "lstm", "gru"])
def test_inductor_takes_the_operations_of_recurrent_layers_as_they_are(name, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(trial, "clock", lambda: 0.0)  # its graph is used, whatever is faster
    assert_recurrent_sums_are_eager_ones(name, "cached")


def test_a_wrong_loss_shape_is_refused_where_steps_are_compiled():
    clipper = ghostclip.GhostClipper(classifier(), compile=True)
    with pytest.raises(ghostclip.LossShapeError):
        clipper.clip(lambda m, b: losses_of(m, b).mean(), batch_of(20))


def test_a_loss_function_that_fills_gradients_is_refused_compiled_too():
    model = ghostclip.wrap(torch.nn.Sequential(torch.nn.Linear(6, 3)))
    clipper = ghostclip.GhostClipper(model, 1.0, compile=True)

    def losses(model, inputs):
        if not torch._C._are_functorch_transforms_active():
            (1000 * model(inputs).square()).sum().backward()
        return model(inputs).square().sum(1)

    with pytest.raises(ghostclip.GradientLeakError):
        clipper.clip(losses, torch.randn(20, 6))


def test_a_graph_is_made_for_the_sizes_that_it_has(monkeypatch):
    """Sizes as symbols, as inductor takes them by itself, made a graph's kernels divide by them for every number."""
    monkeypatch.undo()
    inputs, kernels = [torch.randn(8, 1, 6, 6), torch.randn(3, 1, 3, 3)], []
    written = lambda self, types, source: kernels.append(source) or (lambda *arguments: None)  # noqa: E731
    # A C++ compiler would take half a minute, for these and to find out what the processor has.
    monkeypatch.setattr("torch._inductor.async_compile.AsyncCompile.cpp_pybinding", written)
    monkeypatch.setattr("torch._inductor.cpu_vec_isa.valid_vec_isa_list", list)

    def step(images, weight):
        return (torch.ops.aten.max_pool2d_with_indices(torch.conv2d(images, weight), [2, 2])[0],)

    graph = region.trace(step, inputs, [each + 1 for each in inputs])
    with torch._inductor.config.patch(force_disable_caches=True):
        region.Region(graph, inputs)
    assert kernels
    assert not any("ks0" in source for source in kernels)
