"""Mistakes in ragged batches that only the gradients show are refused in every batch, not in the first alone."""

from contextlib import nullcontext, suppress

import pytest
import torch
from ragged_models import CASES, FEATURES, gathered, graphs, losses
from ragged_refusals import CONNECTED, SIZES, plain
from torch import nn

from ghostclip import GhostClipper, UnsupportedModelError


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("mistake", "build"),
    [
        (mistake, build)
        for mistake in CONNECTED.values()
        for build in (plain, *(CASES[name].build for name in ("gcn", "gat", "packed text")))
        if not (mistake is CONNECTED["an edge between graphs"] and build is CASES["packed text"].build)
    ],
)
@pytest.mark.parametrize("sizes", [SIZES, (5, 2, 3) * 30], ids=["6 examples", "90 examples"])
@pytest.mark.one_in(3)
def test_a_mistake_in_any_batch_is_refused(mistake, build, sizes):
    """Of up to 32 examples always; of more, one row that two examples share is overlooked once in 32 times."""
    model, passed = build(), 0
    clipper = GhostClipper(model)
    for turn in range(12):
        batch = graphs(sizes, torch.float32)
        index = mistake(batch) if turn >= 3 else batch["rows"]
        with nullcontext() if turn < 3 else suppress(UnsupportedModelError):
            clipper.backward(losses(model, batch), batch_index=index)
            passed += turn >= 3
        assert turn < 3 or passed or all(p.grad is None for p in model.parameters())
        model.zero_grad()
    assert passed <= (0 if len(sizes) <= 32 else 3)


def test_attention_without_a_mask_is_refused():
    class Unmasked(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.head = nn.Linear(FEATURES, 6), nn.Linear(6, 3)

        def forward(self, batch):
            h = self.first(batch["x"])
            return self.head(gathered((h @ h.T).softmax(1) @ h, batch["rows"], len(batch["y"])))

    model, batch = Unmasked().double(), graphs(SIZES)
    with pytest.raises(UnsupportedModelError, match="mix"):
        GhostClipper(model).norms(losses(model, batch), batch_index=batch["rows"])


def test_faint_attention_over_a_border_is_refused():
    """A share of one in a million of another text's rows, in float64."""
    model, batch = CASES["gcn"].build().double(), graphs(SIZES)
    model.spread = lambda h, batch: h + 1e-6 * h.mean(0)
    with pytest.raises(UnsupportedModelError):
        GhostClipper(model).norms(losses(model, batch), batch_index=batch["rows"])


def test_batches_with_and_without_an_index_take_turns():
    model = nn.Linear(FEATURES, 3)
    clipper, x = GhostClipper(model), torch.randn(6, FEATURES)
    for _ in range(3):
        alone = clipper.norms(model(x).square().sum(1))
        index = torch.tensor([0, 0, 1, 2, 2, 2])
        summed = clipper.norms(gathered(model(x).square().sum(1), index, 3), batch_index=index)
        assert alone.shape == (6,)
        torch.testing.assert_close(summed[1], alone[2])
