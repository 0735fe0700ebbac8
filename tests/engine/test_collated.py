"""What a collate function brings into a batch: losses that see other examples by it are refused, others train on."""

import logging
import random

import collated
import numpy as np
import private_runs as runs
import pytest
import torch
from collated import HONEST, MIXING, Training, loader
from torch import nn
from torch.utils.data import default_collate

import ghostclip
from ghostclip import PrivacyEngine, UnsupportedModelError
from ghostclip.compat import opacus
from ghostclip.self_check import first_steps

pytestmark = [
    pytest.mark.filterwarnings("ignore:the DataLoader's SequentialSampler is replaced"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage"),
]

STEPS = 6
SEEDS = [0, pytest.param(1, marks=pytest.mark.slow)]


def engine_of(training: Training, **options) -> PrivacyEngine:
    model, data, _, own = training
    options = {"batch_size": 16, "noise_multiplier": 1.0, **own, **options}
    return PrivacyEngine(model, torch.optim.SGD(model.parameters(), lr=0.1), data, **options)


def train(engine: PrivacyEngine, loss_fn, steps: int = STEPS) -> None:
    runs.train(engine, steps - engine.steps_taken, loss_fn)


@pytest.mark.parametrize("name", MIXING)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.one_in(5)
def test_losses_that_see_other_examples_are_refused(name, seed):
    torch.manual_seed(seed)
    training = MIXING[name]()
    engine = engine_of(training)
    before = runs.weights(engine.model)
    with pytest.raises(UnsupportedModelError, match="examples that mix"):
        train(engine, training[2])
    if not engine.steps_taken:  # nothing is left of a batch that was refused
        assert torch.equal(runs.weights(engine.model), before)


@pytest.mark.parametrize("name", HONEST)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.one_in(5)
def test_losses_of_own_examples_train_on(name, seed, monkeypatch):
    monkeypatch.setattr(first_steps, "SELDOM", 1)
    torch.manual_seed(seed)
    training = HONEST[name]()
    train(engine := engine_of(training), training[2], 10)
    assert engine.steps_taken == 10


@pytest.mark.parametrize("name", ["mean_pooling_without_a_mask", "token_losses_averaged_over_the_padded_length"])
@pytest.mark.parametrize(("size", "physical"), [(16, None), (16, 8), (150, None)])
@pytest.mark.one_in(3)
def test_one_long_text_is_found_in_the_first_batch_that_has_it(name, size, physical):
    """Of 160 texts of 12 tokens and one of 240, which is hardly among 32 that are drawn of them."""
    model, data, loss_fn, _ = MIXING[name]()
    data = loader([*collated.texts(160, (12, 13)), *collated.texts(1, (240, 241))], data.collate_fn)
    engine = engine_of((model, data, loss_fn, {}), max_physical_batch_size=physical, batch_size=size)
    long = []

    def until_refused() -> None:
        for batch in (batch for _ in range(30) for batch in engine.batches()):
            long.extend(rows for rows in batch.rows if 160 in rows and len(rows) > 1)
            engine.step(batch, loss_fn)

    with pytest.raises(UnsupportedModelError, match="examples that mix"):
        until_refused()
    assert len(long) == 1


def alike(rows, *lengths):
    return [text for _ in range(rows) for length in lengths for text in collated.texts(1, (length, length + 1))]


PADDING = "mean_pooling_without_a_mask"
ORDER = "keep each user's rows in the collate function's order"
IN_PAIRS = {"unit_ids": [row // 2 for row in range(16)], "batch_size": 4}


@pytest.mark.parametrize(
    ("name", "said", "data", "options"),
    [
        (PADDING, "padding: mask it.*own count.*collate function", None, {}),
        # Where the longest text is exchanged for another, an embedding has other sizes, and would be blamed.
        (PADDING, "most often they see padding", lambda: alike(1, 20) + collated.texts(15), {}),
        ("users_rows_sorted_by_length", ORDER, None, {}),
        # Halves have the sizes of the whole, as texts cut to one length have: the sort alone shows.
        ("users_rows_sorted_by_length", ORDER, lambda: alike(8, 6, 12), IN_PAIRS),
    ],
    ids=["padding", "padding and not the layer", "sort", "sort is named though halves are alike"],
)
def test_the_remedies_are_named_the_likely_ones_first(name, said, data, options):
    model, own, loss_fn, given = MIXING[name]()
    data = own if data is None else loader(data(), own.collate_fn)
    with pytest.raises(UnsupportedModelError, match=said):
        train(engine_of((model, data, loss_fn, given), **options), loss_fn)


def test_padding_is_found_behind_a_head_of_zeros():
    """Of which no loss depends on the text, as at the start of fine-tuning: gradients do."""
    training = MIXING[PADDING]()
    nn.init.zeros_(training[0].head.weight)
    with pytest.raises(UnsupportedModelError, match="examples that mix"):
        train(engine_of(training), training[2], 1)


def test_of_a_collate_function_that_draws_it_is_said_once_what_is_not_tested(caplog):
    training = HONEST["tokens_masked_at_random"]()
    with caplog.at_level(logging.WARNING, "ghostclip"):
        train(engine_of(training), training[2])
    assert sum("for several rows at once, draws random numbers" in said for said in caplog.messages) == 1
    caplog.clear()
    training = HONEST["mean_pooling_with_a_mask"]()
    train(engine_of(training), training[2])
    assert not caplog.messages


def findings(training, rows):
    """Of check with a training's loader, or with a batch of so many of its rows."""
    torch.manual_seed(0)
    model, data, loss_fn, _ = training()
    return ghostclip.check(model, loss_fn, data.collate_fn(data.dataset[:rows]) if rows else data)


OF_STRUCTURES = [name for name in MIXING if name.startswith("centred,")] + ["divided_by_the_number_of_boxes"]


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        *((name, None) for name in MIXING if "users" not in name),
        *((name, rows) for name in OF_STRUCTURES for rows in (5, 16)),
    ],
)
@pytest.mark.one_in(4)
def test_check_finds_it_in_loaders_and_in_batches_of_any_structure(name, rows):
    # Which examples are loaded is random: a row that takes another's place shows in three of four calls.
    found = next(filter(None, (findings(MIXING[name], rows) for _ in range(8))))
    assert all(finding.problem and finding.remedy for finding in found)


@pytest.mark.parametrize(
    ("name", "rows"), [*((name, None) for name in HONEST), *((name, 6) for name in collated.STRUCTURES)]
)
def test_check_has_no_finding_in_honest_loaders_and_batches(name, rows):
    assert findings(HONEST[name], rows) == []


def test_what_check_found_prints_as_lines_and_what_it_did_not_test_where_it_found_nothing():
    mixing = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    lines = str(ghostclip.check(mixing)).splitlines()
    assert lines[0] == "2 obstacles:"
    assert lines[1].startswith("  1. module 1, 3: BatchNorm1d: normalizes by the mean and variance of the batch")
    model, data, loss_fn, _ = HONEST[next(iter(HONEST))]()
    assert str(ghostclip.check(model)).startswith("[]: nothing found in its layers; no batch was run")
    assert str(ghostclip.check(model, loss_fn, next(iter(data)))).endswith("give check the DataLoader in its place")
    assert str(ghostclip.check(model, loss_fn, data)) == "[]"


@pytest.mark.parametrize("name", ["averaged_over_own_tokens", "divided_by_the_batch_s_number_of_tokens"])
@pytest.mark.parametrize("of_opacus", [False, True])
def test_check_takes_the_loaders_that_engines_made(name, of_opacus):
    model, data, loss_fn, _ = training = {**MIXING, **HONEST}[name]()
    if of_opacus:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        _, _, batches = opacus.PrivacyEngine().make_private(
            module=model, optimizer=optimizer, data_loader=data, noise_multiplier=1.0, max_grad_norm=1.0
        )
    else:
        batches = engine_of(training).batches()
    assert bool(ghostclip.check(model, loss_fn, batches)) == (name in MIXING)


def test_each_example_is_read_once_more(monkeypatch):
    """Reading may take long, as decoding an image does. No later step is drawn by chance here."""
    monkeypatch.setattr(first_steps, "SELDOM", float("inf"))
    read: list[int] = []

    class Counted(collated.Features):
        def __getitem__(self, row):
            read.append(row)
            return super().__getitem__(row)

    training = (collated.network(), loader(Counted(collated.noisy), default_collate), collated.plain, {})
    engine = engine_of(training, batch_size=48, sampling="without_replacement")
    for step in range(8):
        read.clear()
        train(engine, collated.plain, step + 1)
        assert len(read) == 48 + (first_steps.MOST if step < 6 else 0)
        assert len(set(read)) == 48


def test_loading_again_leaves_no_trace():
    """Neither in random states, nor in what a seeded run draws."""
    finished = []
    for self_check in (True, False):
        torch.manual_seed(1)
        np.random.seed(2)
        random.seed(3)
        training = HONEST["augmented_at_random"]()
        engine = engine_of(training, self_check=self_check, noise="test", seed=3)
        train(engine, training[2], 4)
        drawn = torch.tensor([random.random(), float(np.random.rand())])
        finished.append(torch.cat([runs.weights(engine.model), torch.rand(2), drawn]))
    assert torch.equal(*finished)


def test_batches_go_through_what_they_go_through_when_handed_out():
    model = nn.Sequential(nn.Linear(5, 3))
    engine = engine_of((model, loader(collated.features(), default_collate), None, {}))
    seen = []

    def loss_fn(model, batch):
        seen.append(len(batch["x"]))
        return collated.plain(model, [batch["x"], batch["y"]])

    batch = next(iter(engine.batches()))
    batch.pass_through(lambda pair: {"x": pair[0], "y": pair[1]})
    engine.step(batch, loss_fn)
    tried, *halves, copies, few, whole = seen
    assert tried == sum(halves) == copies == whole
    assert len(halves) == 2
    assert few == min(first_steps.FEW, whole)
