"""Models that branch on values unless they are compiled, as those of transformers do with masks."""

import pytest
import torch
from comparing import assert_close, assert_dicts_close, gradients
from graphs import assert_as_eager, interpret
from torch import nn
from torch.nn import functional as F

import ghostclip
from ghostclip.compiled import clip as compiling
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


def compiled_on(model, batches=8, padded=True, clip=loss_fn):
    """A clipper that compiles, after so many batches."""
    clipper = ghostclip.GhostClipper(ghostclip.wrap(model), 0.1, compile=True)
    for seed in range(batches):
        clipper.clip(clip, batch_of(seed, padded))
        model.zero_grad()
    return clipper


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Undone where a graph of inductor's is to run."""
    interpret(monkeypatch)


@pytest.mark.parametrize("padded", [True, False])
def test_a_graph_is_made_for_every_mask(padded):
    clipper = compiled_on(Masked(), padded=padded)
    assert (clipper.compiled.graphs, clipper.compiled.refusals) == (1, [])
    (plan,) = clipper.compiled._plans.values()
    for padded_now in (True, False):
        runs = plan.region.runs
        found, expected = assert_as_eager(clipper, loss_fn, batch_of(20, padded_now))
        assert plan.region.runs == runs + 1
        assert_close(found.norms, expected.norms, 1e-5)


@pytest.mark.parametrize("padded", [True, False])
def test_a_mask_that_compiled_code_leaves_out_is_found_whatever_the_batches(padded):
    clipper = compiled_on(Masked(lambda words, mask: words), 5, padded)
    assert "differ from eager's" in clipper.compiled.refusals[0]


def test_mixing_in_compiled_code_alone_is_refused():
    centred = Masked(lambda words, mask: (words - words.mean(0)) * mask)
    clipper = compiled_on(centred, 6)
    assert clipper.compiled.graphs == 0
    assert "examples mix" in clipper.compiled.refusals[0]


def test_a_mask_that_the_model_cannot_take_stops_nothing():
    class Short(Masked):
        def forward(self, ids, mask):
            if not torch.compiler.is_compiling() and mask.all():
                raise ValueError("a text without padding")
            return super().forward(ids, mask)

    clipper = compiled_on(Short())
    assert (clipper.compiled.graphs, clipper.compiled.refusals) == (1, [])


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

    clipper = compiled_on(Placed(), clip=placed)
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
    compiled = compiled_on(Picks(rows)).compiled
    assert compiled.graphs == (why is None)
    assert why is None or why in compiled.refusals[0]


def test_hidden_states_that_transformers_collects_keep_no_model_from_being_compiled():
    capturing = pytest.importorskip("transformers.utils.output_capturing")
    model = Masked()
    capturing.install_output_capuring_hook(model.head, "hidden_states", 0)
    assert compiled_on(model).compiled.graphs == 1


def test_a_hook_added_to_a_compiled_model_is_called_at_each_step():
    clipper, seen = compiled_on(Masked()), []
    handle = clipper.model.head.register_forward_hook(lambda module, inputs, output: seen.append(1) or 2 * output)
    for _ in range(8):
        clipper.clip(loss_fn, batch_of(0))
    assert_as_eager(clipper, loss_fn, batch_of(0))
    assert len(seen) == 10
    assert "hooks of head want to be called" in clipper.compiled.refusals[0]
    handle.remove()
    assert_as_eager(clipper, loss_fn, batch_of(0))
    assert len(seen) == 10


def test_hooks_of_parameters_run_on_the_sum_though_compiling_was_asked_for():
    model = Masked()
    ghostclip.GhostClipper(model, 1e-2).clip(loss_fn, batch_of(0))
    expected = gradients(model)
    model.head.weight.register_hook(lambda grad: 3 * grad)
    clipper = ghostclip.GhostClipper(model, 1e-2, compile=True)
    for _ in range(7):
        model.zero_grad()
        clipper.clip(loss_fn, batch_of(0))
    assert_dicts_close(gradients(model), {**expected, "head.weight": 3 * expected["head.weight"]}, 1e-5)


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
    clipper = compiled_on(model)
    assert clipper.compiled.graphs == 1
    model.gate.data.fill_(0.5)
    return clipper


def test_a_graph_gives_no_result_where_a_gradient_comes_that_was_zero():
    clipper = opened(Gated())
    found, expected = assert_as_eager(clipper, loss_fn, batch_of(30))
    assert_close(found.norms, expected.norms, 1e-5)
    for seed in range(12):
        clipper.model.zero_grad()
        clipper.clip(loss_fn, batch_of(seed))
    assert clipper.compiled.graphs == 2  # the second one knows of the gradient
    assert not clipper.compiled.refusals


def test_mixing_behind_a_gate_that_opens_after_a_graph_was_made_is_refused():
    clipper = opened(Gated(lambda words: words - words.mean(0)))
    with pytest.raises(ghostclip.UnsupportedModelError, match="examples mix"):
        clipper.clip(loss_fn, batch_of(30))


def test_a_graph_without_results_is_made_anew_once(monkeypatch):
    monkeypatch.setattr(compiling, "MOST_WITHOUT_RESULT", 2)
    clipper = ghostclip.GhostClipper(Masked(), 0.1, compile=True)

    def spoilt(model, batch):
        return loss_fn(model, batch) + batch[3]

    for seed in range(24):
        nan = torch.full((5,), 0.0 if seed < 8 else torch.nan)
        clipper.clip(spoilt, (*batch_of(seed), nan))
        clipper.model.zero_grad()
    assert clipper.compiled.graphs == 2
    assert "2 batches in a row" in clipper.compiled.refusals[0]


@pytest.mark.slow
def test_a_batch_may_lie_in_memory_in_any_way(monkeypatch):
    """The graph of the first batches reads rows one after another."""
    monkeypatch.undo()
    monkeypatch.setattr(trial, "clock", lambda: 0.0)  # it is used, whatever is faster
    model = nn.Sequential(nn.Linear(LENGTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2))

    def losses(model, batch):
        return F.cross_entropy(model(batch[0].float()), batch[2], reduction="none")

    clipper = compiled_on(model, clip=losses)
    ids, *others = batch_of(0)
    expected = clipper.clip(losses, (ids, *others)).norms
    for graph_alone in (False, True):
        model.zero_grad()
        if graph_alone:
            clipper.compiled.eager = None
        assert_close(clipper.clip(losses, (ids.T.contiguous().T, *others)).norms, expected, 1e-6)


SIZES = {"vocab_size": 11, "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16}
FAMILIES = {
    "gpt2": ("GPT2", {"n_positions": LENGTH, **dict.fromkeys(["pad_token_id", "bos_token_id", "eos_token_id"], 0)},
             ["attn_pdrop", "embd_pdrop", "resid_pdrop"]),
    "bert": ("Bert", {"intermediate_size": 16}, ["hidden_dropout_prob", "attention_probs_dropout_prob"]),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("family", "options", "dropouts"), FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_models_of_transformers_compile(family, options, dropouts, dropout, monkeypatch):
    monkeypatch.undo()
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{family}Config")(**SIZES, **options, **dict.fromkeys(dropouts, dropout))
    model = getattr(transformers, f"{family}ForSequenceClassification")(config).train()

    def losses(model, batch):
        return F.cross_entropy(model(batch[0], attention_mask=batch[1]).logits, batch[2], reduction="none")

    clipper = compiled_on(model, 4, clip=losses)
    assert (clipper.compiled.graphs, clipper.compiled.refusals) == (1, [])
