"""Models that branch on values unless they are compiled, as those of transformers do with masks."""

import pytest
import torch
from comparing import assert_close
from graphs import assert_as_eager, interpret
from torch import nn
from torch.nn import functional as F

import ghostclip
from ghostclip.compiled import trial

LENGTH, WIDTH = 6, 8


class Masked(nn.Module):
    """Mean of the words that a mask leaves; a mask of ones is dropped, unless the model is compiled.

    Args:
        compiled: (words [B, T, d], mask [B, T, 1]) -> words, of the compiled model alone.
    """

    def __init__(self, compiled=lambda words, mask: words * mask):
        super().__init__()
        self.words, self.head, self.compiled = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 2), compiled

    def forward(self, ids, mask):
        words, mask = self.words(ids), mask[..., None].float()
        if torch.compiler.is_compiling():
            words = self.compiled(words, mask)
        elif not mask.all():
            words = words * mask
        return self.head(words.sum(1) / mask.sum(1))


def loss_fn(model, batch):
    return F.cross_entropy(model(*batch[:2]), batch[2], reduction="none")


def batch_of(seed, padded=True, size=5):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 11, (size, LENGTH), generator=generator)
    lengths = torch.randint(1, LENGTH, (size, 1), generator=generator)
    mask = torch.arange(LENGTH) < lengths if padded else torch.ones(size, LENGTH, dtype=torch.bool)
    return ids, mask.long(), torch.randint(0, 2, (size,), generator=generator)


def compiled_on(model, *batches, clip=loss_fn):
    """A clipper that compiles, after those batches."""
    clipper = ghostclip.GhostClipper(ghostclip.wrap(model), 0.1, compile=True)
    for batch in batches:
        clipper.clip(clip, batch)
        model.zero_grad()
    return clipper


@pytest.fixture
def interpreted(monkeypatch):
    interpret(monkeypatch)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("padded", [True, False])
def test_a_graph_is_made_for_every_mask(padded):
    torch.manual_seed(0)
    clipper = compiled_on(Masked(), *[batch_of(seed, padded) for seed in range(8)])
    assert clipper.compiled.graphs == 1
    assert not clipper.compiled.refusals
    (plan,) = clipper.compiled._plans.values()
    for padded_now in (True, False):
        runs = plan.region.runs
        found, expected = assert_as_eager(clipper, loss_fn, batch_of(20, padded_now))
        assert plan.region.runs == runs + 1
        assert_close(found.norms, expected.norms, 1e-5)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("padded", [True, False])
def test_a_mask_that_compiled_code_leaves_out_is_found_whatever_the_batches(padded):
    clipper = compiled_on(Masked(lambda words, mask: words), *[batch_of(seed, padded) for seed in range(5)])
    assert "differ from eager's" in clipper.compiled.refusals[0]


@pytest.mark.usefixtures("interpreted")
def test_mixing_in_compiled_code_alone_is_refused():
    centred = Masked(lambda words, mask: (words - words.mean(0)) * mask)
    clipper = compiled_on(centred, *[batch_of(seed) for seed in range(6)])
    assert clipper.compiled.graphs == 0
    assert "examples mix" in clipper.compiled.refusals[0]


@pytest.mark.usefixtures("interpreted")
def test_a_mask_that_the_model_cannot_take_stops_nothing():
    class Short(Masked):
        def forward(self, ids, mask):
            if not torch.compiler.is_compiling() and mask.all():
                raise ValueError("a text without padding")
            return super().forward(ids, mask)

    clipper = compiled_on(Short(), *[batch_of(seed) for seed in range(8)])
    assert clipper.compiled.graphs == 1
    assert not clipper.compiled.refusals


@pytest.mark.usefixtures("interpreted")
def test_positions_that_the_loss_gives_do_not_keep_a_graph_from_being_made():
    """Whether they depend on examples is shown by forwards of other examples, which the loss function runs."""

    class Placed(Masked):
        def __init__(self):
            super().__init__()
            self.places = nn.Embedding(LENGTH, WIDTH)

        def forward(self, ids, mask, places):
            words, mask = self.words(ids) + self.places(places), mask[..., None].float()
            return self.head((words * mask).sum(1) / mask.sum(1))

    def placed(model, batch):
        return loss_fn(lambda *each: model(*each, torch.arange(LENGTH)[None]), batch)

    clipper = compiled_on(Placed(), *[batch_of(seed) for seed in range(8)], clip=placed)
    assert clipper.compiled.graphs == 1


class Picks(Masked):
    """Some positions of each example, by indices.

    Args:
        rows: (ids [B, T]) -> number of the example, [B].
    """

    def __init__(self, rows):
        super().__init__()
        self.rows = rows

    def forward(self, ids, mask):
        return self.head(self.words(ids)[self.rows(ids), mask.sum(1) - 1])


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("rows", "why"),
    [
        (lambda ids: torch.arange(len(ids)), None),
        (lambda ids: ids[:, 0].argsort().argsort().sort().values, "measured in every batch"),
        (lambda ids: torch.randperm(len(ids)) * 0 + torch.arange(len(ids)), "measured in every batch"),
    ],
    ids=["constant", "of the batch", "random"],
)
def test_an_index_over_examples_is_compiled_where_it_is_a_constant(rows, why):
    compiled = compiled_on(Picks(rows), *[batch_of(seed) for seed in range(8)]).compiled
    assert compiled.graphs == (why is None)
    assert why is None or why in compiled.refusals[0]


@pytest.mark.usefixtures("interpreted")
def test_hidden_states_that_transformers_collects_keep_no_model_from_being_compiled():
    capturing = pytest.importorskip("transformers.utils.output_capturing")
    model = Masked()
    capturing.install_output_capuring_hook(model.head, "hidden_states", 0)
    assert compiled_on(model, *[batch_of(seed) for seed in range(8)]).compiled.graphs == 1
    model = Masked()
    model.head.register_forward_hook(lambda *each: None)
    assert "hooks of head" in compiled_on(model, *[batch_of(seed) for seed in range(8)]).compiled.refusals[0]


class Gated(Masked):
    """What is behind a gate has no gradient until it opens."""

    def __init__(self, behind=lambda words: words):
        super().__init__()
        self.inner, self.behind, self.gate = nn.Linear(WIDTH, WIDTH), behind, nn.Parameter(torch.zeros(()))
        self.gate.requires_grad = False

    def forward(self, ids, mask):
        words = self.words(ids).mean(1)
        return self.head(words + self.gate * self.behind(self.inner(words)))


def opened(model):
    """A clipper whose graph was made before the gate opened."""
    clipper = compiled_on(model, *[batch_of(seed) for seed in range(8)])
    assert clipper.compiled.graphs == 1
    model.gate.data.fill_(0.5)
    return clipper


@pytest.mark.usefixtures("interpreted")
def test_a_graph_gives_no_result_where_a_gradient_comes_that_was_zero():
    clipper = opened(Gated())
    found, expected = assert_as_eager(clipper, loss_fn, batch_of(30))
    assert_close(found.norms, expected.norms, 1e-5)
    for seed in range(12):
        clipper.model.zero_grad()
        clipper.clip(loss_fn, batch_of(seed))
    assert clipper.compiled.graphs == 2  # the second one knows of the gradient
    assert not clipper.compiled.refusals


@pytest.mark.usefixtures("interpreted")
def test_mixing_behind_a_gate_that_opens_after_a_graph_was_made_is_refused():
    clipper = opened(Gated(lambda words: words - words.mean(0)))
    with pytest.raises(ghostclip.UnsupportedModelError, match="examples mix"):
        clipper.clip(loss_fn, batch_of(30))


@pytest.mark.usefixtures("interpreted")
def test_a_graph_without_results_is_made_anew_once():
    clipper = compiled_on(Masked(), *[batch_of(seed) for seed in range(8)])

    def spoilt(model, batch):
        return loss_fn(model, batch) + batch[3]

    for seed in range(40):
        nan = torch.full((5,), 0.0 if seed < 8 else torch.nan)
        clipper.clip(spoilt, (*batch_of(seed), nan))
        clipper.model.zero_grad()
    assert clipper.compiled.graphs == 3  # one of each loss function, and the new one
    assert "4 batches in a row" in clipper.compiled.refusals[0]


@pytest.mark.slow
def test_a_batch_may_lie_in_memory_in_any_way(monkeypatch):
    """The graph of the first batches reads rows one after another."""
    monkeypatch.setattr(trial, "clock", lambda: 0.0)  # it is used, whatever is faster
    torch.manual_seed(0)
    model = ghostclip.wrap(nn.Sequential(nn.Linear(LENGTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2)))
    batches = [(torch.randn(5, LENGTH), torch.arange(5) % 2) for _ in range(8)]

    def losses(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    clipper = compiled_on(model, *batches, clip=losses)
    expected = clipper.clip(losses, batches[0]).norms
    model.zero_grad()
    across = batches[0][0].T.contiguous().T, batches[0][1]
    assert_close(clipper.clip(losses, across).norms, expected, 1e-6)
    model.zero_grad()
    clipper.compiled.eager = None  # the graph gave both
    assert_close(clipper.clip(losses, across).norms, expected, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "bert"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_models_of_transformers_compile(name, dropout):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 11, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    if name == "bert":
        config = transformers.BertConfig(
            hidden_size=16, intermediate_size=16, hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout, **sizes,
        )  # fmt: skip
        model = transformers.BertForSequenceClassification(config)
    else:
        config = transformers.GPT2Config(
            n_embd=16, n_positions=LENGTH, attn_pdrop=dropout, embd_pdrop=dropout, resid_pdrop=dropout,
            pad_token_id=0, bos_token_id=0, eos_token_id=0, **sizes,
        )  # fmt: skip
        model = transformers.GPT2ForSequenceClassification(config)

    def losses(model, batch):
        return F.cross_entropy(model(batch[0], attention_mask=batch[1]).logits, batch[2], reduction="none")

    clipper = compiled_on(model.train(), *[batch_of(seed) for seed in range(4)], clip=losses)
    assert clipper.compiled.graphs == 1
    assert not clipper.compiled.refusals
