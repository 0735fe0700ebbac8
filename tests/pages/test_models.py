"""The paper's networks, and two more: sizes, what they take, and that no output depends on another example."""

import pytest
import torch
from torch.nn import functional as F

from ghostclip import GhostClipper, models

IMAGE = (1, 28, 28)
CASES = {
    "mlp": ((105,), None, 105 * 128 + 128 + 128 * 256 + 256 + 256 * 2 + 2),
    "cnn": (IMAGE, None, 20 * 26 + 50 * 501 + 800 * 128 + 128 + 128 * 2 + 2),
    "rnn": (IMAGE, None, 128 * 28 + 128 * 128 + 2 * 128 + 128 * 2 + 2),
    "lstm": (IMAGE, None, 4 * (128 * 28 + 128 * 128 + 2 * 128) + 128 * 2 + 2),
    "oriented": (IMAGE, None, 12 * 9 + 12 * 28 * 28 * 2),
    "oriented-linear": (IMAGE, None, 16 * 8 * 8 * 2),
    "transformer": ((12,), 50, 50 * 200 + 4 * 200 * 201 + 2 * 400 + 512 * 201 + 200 * 513 + 2 * 201),
}


def inputs_for(name: str, batch: int) -> torch.Tensor:
    """Random inputs of the case's shape; texts of several lengths."""
    shape, vocabulary, _ = CASES[name]
    if vocabulary is None:
        return torch.rand(batch, *shape)
    tokens = torch.randint(1, vocabulary, (batch, *shape))
    for example in range(batch):
        tokens[example, 3 + 2 * example :] = 0
    return tokens


@pytest.mark.parametrize("name", models.NAMES)
def test_size_and_output_shape(name):
    shape, vocabulary, parameters = CASES[name]
    model = models.build(name, shape, 2, vocabulary)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert model(inputs_for(name, 3)).shape == (3, 2)


def test_transformer_ignores_padding():
    model = models.build("transformer", (12,), 2, vocabulary=50)
    tokens = inputs_for("transformer", 1)
    assert (tokens[0, 3:] == 0).all()
    torch.testing.assert_close(model(tokens), model(tokens[:, :3]))


@pytest.mark.parametrize(
    ("name", "shape", "vocabulary", "expected"),
    [
        ("transformer", (1, 8, 8), None, r"transformer takes token ids of texts; here each input is numbers of shape"),
        ("mlp", (256,), 1000, r"mlp does not take token ids.*token ids of shape \[256\]"),
        ("cnn", (105,), None, r"cnn takes images .*numbers of shape \[105\]"),
        ("cnn", (1, 3, 8), None, r"at least 4 pixels a side.*\[1, 3, 8\]"),
        ("gpt", (8,), None, r"model must be one of 'mlp'.*got 'gpt'"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(name, shape, vocabulary, expected):
    with pytest.raises(ValueError, match=expected):
        models.build(name, shape, 2, vocabulary)


@pytest.mark.parametrize("second_pass", ["reweight", "cached"])
@pytest.mark.parametrize("name", models.NAMES)
def test_ghost_norms_and_sums_equal_the_loop(name, second_pass):
    shape, vocabulary, _ = CASES[name]
    model = models.build(name, shape, 2, vocabulary).double()
    if name.startswith("oriented"):
        model.output.weight.data.normal_()  # which starts at zero, and passes no gradient on
    inputs = inputs_for(name, 3)
    batch = (inputs if vocabulary else inputs.double(), torch.tensor([0, 1, 1]))
    clipper = GhostClipper(model, clipping=0.1, second_pass=second_pass)

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    assert clipper.verify(loss_fn, batch) <= 1e-10


def test_features_of_an_image_depend_on_no_other_and_have_norm_one():
    model, images = models.build("oriented-linear", IMAGE, 2), torch.rand(3, *IMAGE)
    features = model.features(images)
    torch.testing.assert_close(features.norm(dim=1), torch.ones(3))
    torch.testing.assert_close(model.features(images[1:2]), features[1:2])
    assert model.features(torch.zeros(1, *IMAGE)).isfinite().all()
