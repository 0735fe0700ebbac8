"""Padding to the longest text: classifiers of transformers with a mask train on."""

import math

import private_runs as runs
import pytest
import torch
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from experiments.zoo.language import ENCODERS, POSITIONS_FIRST, from_config
from experiments.zoo.subject import CLASSES, TOKENS
from ghostclip import PrivacyEngine, UnsupportedModelError, wrap

transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.filterwarnings("ignore:the DataLoader's SequentialSampler is replaced"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]

# They see the padding though they are given a mask: by a Fourier transform, and by positions counted from the end.
SEE_PADDING = {"FNet", "XLNet"}


def texts(count=64):
    """Token ids of 4 to 9 tokens, with a class."""
    lengths = torch.randint(4, 10, (count,)).tolist()
    return [(torch.randint(4, TOKENS, (length,)), row % CLASSES) for row, length in enumerate(lengths)]


def padded(rows):
    ids = pad_sequence([text for text, _ in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": torch.tensor([y for _, y in rows])}


def class_losses(model, batch):
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return F.cross_entropy(logits, batch["labels"], reduction="none")


def engine_of(model):
    data = DataLoader(texts(), batch_size=16, collate_fn=padded)
    return PrivacyEngine(model, torch.optim.SGD(model.parameters(), lr=0.1), data, batch_size=16, noise_multiplier=1.0)


def build(name):
    torch.manual_seed(0)
    _, model, config, options = ENCODERS[name]
    built = from_config(model, config, **{**options, "pad_token_id": 0})().train()
    return wrap(built, batch_dim=POSITIONS_FIRST.get(name, 0))


@pytest.mark.parametrize("name", [name for name in ENCODERS if name not in SEE_PADDING])
@pytest.mark.one_in(math.inf)
def test_a_classifier_with_a_mask_trains_on(name):
    runs.train(engine := engine_of(build(name)), 8, class_losses)
    assert engine.steps_taken == 8


@pytest.mark.parametrize("name", sorted(SEE_PADDING))
@pytest.mark.one_in(math.inf)
def test_a_classifier_that_sees_the_padding_is_refused(name):
    with pytest.raises(UnsupportedModelError, match="padding: mask it"):
        runs.train(engine_of(build(name)), 8, class_losses)
