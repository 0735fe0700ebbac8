"""The loop over single examples as a way to clip: exact, chosen only where it does the same faster."""

import oracle
import private_runs as runs
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ghostclip
from ghostclip import clipping, one_by_one

EXAMPLES, CLASSES, MAX_NORM = 5, 3, 0.7


class Tied(nn.Module):
    """A weight used twice, a layer that is never used, and one that is frozen."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.words, self.mix = nn.Embedding(7, 4), nn.Linear(4, 4)
        self.idle, self.frozen = nn.Linear(2, 2), nn.Linear(4, 4).requires_grad_(False)
        self.head, self.dropout = nn.Linear(4, 7, bias=False), nn.Dropout(dropout)
        self.head.weight = self.words.weight

    def forward(self, tokens):
        return self.head(self.dropout(torch.tanh(self.frozen(self.mix(self.words(tokens)))))).mean(1)


@pytest.fixture
def always(monkeypatch):
    """The loop is taken for slow enough to try and always fast enough to keep."""
    monkeypatch.setattr(one_by_one, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(one_by_one, "GAIN", float("inf"))
    monkeypatch.setattr(one_by_one, "HOPELESS", float("inf"))


def network(dropout=0.0, dtype=torch.float64):
    torch.manual_seed(0)
    return Tied(dropout).to(dtype)


def batch(examples=EXAMPLES):
    return {"tokens": torch.arange(examples * 6).view(examples, 6) % 7, "target": torch.arange(examples) % CLASSES}


def losses(model, examples):
    return F.cross_entropy(model(examples["tokens"]), examples["target"], reduction="none")


def settled(clipper, loss_fn=losses, examples=EXAMPLES):
    """After as many batches as it takes to choose."""
    for _ in range(one_by_one.TRIALS + 1):
        clipper.clip(loss_fn, batch(examples))
        clipper.model.zero_grad()
    return clipper


def calls_of_one(clipper, loss_fn=losses):
    """How often a clip hands out a single example."""
    sizes = []

    def seen(model, examples):
        sizes.append(len(examples["tokens"]))
        return loss_fn(model, examples)

    settled(clipper, seen)
    sizes.clear()
    clipper.clip(seen, batch())
    return sizes.count(1)


def by_oracle(model):
    """Norms of whole gradients and clipped sums, by the oracle."""
    targets = iter(batch()["target"].split(1))
    grads = oracle.per_example_grads(
        model, lambda out: F.cross_entropy(out, next(targets), reduction="none"), [batch()["tokens"]]
    )
    return oracle.norms(grads), grads


@pytest.mark.parametrize(
    "policy",
    [clipping.Flat(MAX_NORM), clipping.Automatic(MAX_NORM), clipping.PerLayer(max_norm=MAX_NORM),
     clipping.Grouped({"words": ["words"], "rest": ["mix", "idle"]}, max_norm=MAX_NORM)],
    ids=lambda policy: type(policy).__name__,
)  # fmt: skip
def test_the_loop_gives_what_the_two_passes_give(always, policy):
    alone, both = settled(ghostclip.GhostClipper(network(), policy)), ghostclip.GhostClipper(network(), policy)
    for _ in range(2):
        one = alone.clip(losses, batch())
        other = both.backward(losses(both.model, batch()))
    assert "by the loop over single examples" in str(alone.explain())
    torch.testing.assert_close(one.norms, other.norms, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(one.weights, other.weights, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(one.losses, losses(both.model, batch()).detach())
    for (name, mine), theirs in zip(alone.model.named_parameters(), both.model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-12, msg=name)


def test_the_loop_clips_as_the_oracle_does(always):
    clipper = settled(ghostclip.GhostClipper(network(), MAX_NORM))
    norms, grads = by_oracle(network())
    assert (norms > MAX_NORM).any()
    torch.testing.assert_close(clipper.clip(losses, batch()).norms, norms, rtol=1e-10, atol=0)
    found = {name: p.grad for name, p in clipper.model.named_parameters() if p.grad is not None}
    for name, total in oracle.clipped_sum(grads, MAX_NORM).items():
        torch.testing.assert_close(found.get(name, torch.zeros_like(total)), total, rtol=1e-10, atol=1e-12)


def test_an_example_that_is_not_finite_is_left_out(always):
    def broken(model, examples):
        return losses(model, examples) * torch.where(examples["target"] == 1, torch.inf, 1.0)

    clipper = settled(ghostclip.GhostClipper(network(), MAX_NORM), broken)
    result = clipper.clip(broken, batch())
    assert result.weights[1] == 0
    assert (result.weights[[0, 2, 3]] > 0).all()
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in clipper.model.parameters())


def test_batches_are_tried_with_single_examples_and_then_only_they_are_used(always):
    assert calls_of_one(ghostclip.GhostClipper(network(), MAX_NORM)) == EXAMPLES


@pytest.mark.parametrize(
    "options",
    [{"norm_strategy": "gram"}, {"norm_strategy": "direct"},
     {"clipping": clipping.Custom(torch.ones_like, MAX_NORM)}],
    ids=["gram", "direct", "custom"],
)  # fmt: skip
def test_where_it_is_no_choice(always, options):
    assert calls_of_one(ghostclip.GhostClipper(network(), **{"clipping": MAX_NORM, **options})) == 0


def test_deterministic_algorithms_leave_nothing_to_a_clock(always, monkeypatch):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert calls_of_one(ghostclip.GhostClipper(network(), MAX_NORM)) == 0


def test_hooks_on_gradients_see_one_backward_a_batch(always):
    model = network()
    model.mix.weight.register_hook(lambda grad: None)
    assert calls_of_one(ghostclip.GhostClipper(model, MAX_NORM)) == 0


def test_what_is_fast_is_not_tried():
    clipper = settled(ghostclip.GhostClipper(network(), MAX_NORM))
    assert calls_of_one(clipper) == 0
    assert "one by one" not in str(clipper.explain())


def test_what_is_slower_stays_with_the_two_passes(monkeypatch):
    monkeypatch.setattr(one_by_one, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(one_by_one, "GAIN", 0.0)
    clipper = ghostclip.GhostClipper(network(), MAX_NORM)
    assert calls_of_one(clipper) == 0
    assert "the two passes are faster (one by one" in str(clipper.explain())


@pytest.mark.parametrize(
    ("loops", "used"),
    [([1.9, 0.8, 0.9], True), ([1.9, 1.2, 0.8], True), ([2.1], False), ([1.9, 1.3], False), ([1.0, 1.0, 0.96], False)],
    ids=str,
)
def test_the_first_run_of_the_loop_may_be_slow_and_the_last_must_not(monkeypatch, loops, used):
    times = iter([time for loop in loops for time in (0.0, 1.0, 0.0, loop)])
    monkeypatch.setattr(one_by_one, "clock", lambda: next(times))
    clipper = ghostclip.GhostClipper(network(), MAX_NORM)
    assert calls_of_one(clipper) == (EXAMPLES if used else 0)
    assert next(times, None) is None


def test_a_loss_that_depends_on_the_size_of_its_batch_is_noticed(always):
    def divided(model, examples):
        return losses(model, examples) / len(examples["tokens"])

    clipper = ghostclip.GhostClipper(network(), MAX_NORM)
    assert calls_of_one(clipper, divided) == 0
    assert "differs from the same example in its batch" in str(clipper.explain())


def test_what_was_found_of_a_loss_function_does_not_hold_for_other_settings_of_it(always):
    def made(share):
        return lambda model, examples: losses(model, examples) / len(examples["target"]) ** share

    clipper = ghostclip.GhostClipper(network(), MAX_NORM)
    assert calls_of_one(clipper, made(0)) == EXAMPLES
    assert calls_of_one(clipper, made(1)) == 0


def test_a_loss_function_that_takes_no_single_example_is_left_alone(always):
    def picky(model, examples):
        if len(examples["tokens"]) == 1:
            raise RuntimeError("no batch of one")
        return losses(model, examples)

    assert calls_of_one(ghostclip.GhostClipper(network(), MAX_NORM), picky) == 0


def test_dropout_is_compared_without_and_goes_on_with_random_numbers(always):
    clipper = ghostclip.GhostClipper(network(dropout=0.5), MAX_NORM)
    torch.manual_seed(3)
    first = clipper.clip(losses, batch()).losses
    clipper.model.zero_grad()
    second = clipper.clip(losses, batch()).losses
    assert not torch.equal(first, second)
    assert clipper.model.training
    torch.manual_seed(3)
    losses(clipper.model, batch())
    assert torch.equal(losses(clipper.model, batch()), second)
    assert calls_of_one(clipper) == EXAMPLES


def test_the_engine_steps_one_by_one(always):
    model = runs.network(torch.float64)
    engine = runs.engine_for(model, dataset=runs.data(dtype=torch.float64), batch_size=4, clipping=0.1)
    other = runs.network(torch.float64)
    for epoch in range(4):
        for logical in engine.batches():
            kept = []
            record = engine.step(logical, lambda m, b, kept=kept: (kept.append(b), runs.losses_of(m, b))[1])
            assert record.norms.shape == record.losses.shape == (sum(logical.sizes),), epoch
    assert engine.steps_taken == 24
    assert not torch.equal(runs.weights(model), runs.weights(other))


def test_a_model_that_is_one_layer_has_a_group_of_its_own(always):
    """Its layer's name is "", as that of no group is."""
    model = nn.Linear(4, 3)
    clipper = ghostclip.GhostClipper(model, clipping.PerLayer(max_norm=MAX_NORM))
    for _ in range(one_by_one.TRIALS + 2):
        result = clipper.clip(lambda model, rows: model(rows).square().sum(1), torch.randn(EXAMPLES, 4))
        assert list(result.norms) == list(result.weights) == [""]
    assert "by the loop" in clipper.explain().note
