"""What single layers refuse and in which words, and what they do with narrow numbers."""

import oracle
import pytest
import torch
from case_models import Wired
from comparing import assert_close

import ghostclip
from ghostclip import UnsupportedModelError, nn

TABLES = [nn.Embedding, nn.EmbeddingBag]


# option: (value, words of the problem, and of the remedy)
REFUSED = {
    "max_norm": (1.0, "max_norm rescales rows by what the batch looked up", "set max_norm=None"),
    "scale_grad_by_freq": (True, "counts over the whole batch, which mixes examples", "scale_grad_by_freq=False"),
    "sparse": (True, "sparse gradients, which can't hold noise", "set sparse=False"),
}


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("option", REFUSED)
def test_tables_are_refused_with_a_remedy_that_helps(table, option):
    value, problem, remedy = REFUSED[option]
    model = nn.Sequential(table(6, 3, **{option: value}), nn.Linear(3, 2))
    (finding,) = ghostclip.check(model)
    assert (finding.path, problem in finding.problem, remedy in finding.remedy) == ("0", True, True)
    with pytest.raises(UnsupportedModelError, match="0: .*" + problem):
        ghostclip.wrap(model)
    setattr(model[0], option, None if option == "max_norm" else False)
    assert ghostclip.check(model) == []


@pytest.mark.parametrize("table", TABLES)
def test_a_frozen_table_may_do_what_it_likes_but_change(table):
    model = nn.Sequential(table(6, 3, sparse=True, scale_grad_by_freq=True), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    assert ghostclip.check(model) == []
    model[0].max_norm = 1.0
    assert "set max_norm=None" in ghostclip.check(model)[0].remedy


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("affine", [True, False])
def test_instance_norms_that_track_statistics_are_refused_in_train_mode_only(dims, affine):
    norm = getattr(nn, f"InstanceNorm{dims}d")(3, affine=affine, track_running_stats=True)
    model = nn.Sequential(norm, nn.Flatten(), nn.Linear(3 * 2**dims, 2))
    (finding,) = ghostclip.check(model)
    words = "updates its running statistics"
    assert (finding.path, words in finding.problem, "=False" in finding.remedy) == ("0", True, True)
    x = torch.randn(4, 3, *[2] * dims)
    before = norm.running_mean.clone()
    assert ghostclip.check(model.eval()) == []
    model(x)
    for training, tracking in ((True, True), (True, False), (False, False)):
        model.train(training)
        norm.track_running_stats = tracking  # which without statistics is what was asked for, and with them isn't
        with pytest.raises(UnsupportedModelError, match=f"InstanceNorm{dims}d {words}"):
            model(x)
    assert torch.equal(norm.running_mean, before)


UNBATCHED = {
    nn.ConvTranspose1d(3, 2, 2): (3, 5),
    nn.ConvTranspose2d(3, 2, 2): (3, 5, 5),
    nn.ConvTranspose3d(3, 2, 2): (3, 4, 4, 4),
    nn.InstanceNorm1d(3, affine=True): (3, 5),
    nn.InstanceNorm2d(3, affine=True): (3, 5, 5),
    nn.InstanceNorm3d(3, affine=True): (3, 4, 4, 4),
    nn.PReLU(): (3,),
}


@pytest.mark.parametrize("layer", UNBATCHED, ids=lambda layer: type(layer).__name__)
def test_inputs_without_a_batch_dimension_are_refused(layer):
    with pytest.raises(UnsupportedModelError, match=f"{type(layer).__name__} got an input.*without a batch dimension"):
        layer(torch.randn(UNBATCHED[layer]))


def test_nested_indices_are_refused_with_what_to_give_instead():
    ragged = torch.nested.nested_tensor([torch.tensor([1, 2]), torch.tensor([3])], layout=torch.jagged)
    with pytest.raises(UnsupportedModelError, match="include_last_offset=True"):
        nn.EmbeddingBag(5, 3, mode="sum")(ragged)
    bag = nn.EmbeddingBag(5, 3, mode="sum", include_last_offset=True)
    assert bag(ragged.values(), ragged.offsets()).shape == (2, 3)


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize(
    "layer", [torch.nn.PReLU(4), torch.nn.GroupNorm(4, 4), torch.nn.ConvTranspose1d(4, 4, 1)], ids=str
)
def test_examples_where_a_layer_of_channels_has_channels_or_positions_are_refused(layer, dim):
    # With as many of each, nothing about the shapes is wrong.
    model = Wired(lambda m, x: m.layer(x.movedim(0, dim)).movedim(dim, 0), layer=layer)
    ghostclip.wrap(model, batch_dim=dim)
    clipper = ghostclip.GhostClipper(model)
    with pytest.raises(UnsupportedModelError, match="mix"):
        clipper.norms(model(torch.randn(4, 4, 4)).flatten(1).cos().sum(1))


NARROW = {
    "conv_transpose": (lambda: torch.nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1), (3, 5, 4)),
    "bilinear": (lambda: torch.nn.Bilinear(3, 3, 4), (6, 3)),
    "bilinear one out": (lambda: torch.nn.Bilinear(3, 3, 1), (6, 3)),
    "rmsnorm": (lambda: torch.nn.RMSNorm(16), (6, 16)),
    "instancenorm": (lambda: torch.nn.InstanceNorm2d(3, affine=True), (3, 5, 4)),
    "groupnorm": (lambda: torch.nn.GroupNorm(2, 4), (4, 5, 4)),
    "prelu": (lambda: torch.nn.PReLU(), (3, 5)),
    "prelu of channels": (lambda: torch.nn.PReLU(3), (3, 5)),
    "bag sum": (lambda: torch.nn.EmbeddingBag(5, 3, mode="sum"), (6,)),
    "bag mean": (lambda: torch.nn.EmbeddingBag(5, 3, mode="mean"), (6,)),
    "bag max": (lambda: torch.nn.EmbeddingBag(5, 3, mode="max"), (6,)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", NARROW)
def test_norms_of_narrow_numbers_are_taken_in_float32(name, dtype):
    # What the losses add up is linear in the output, so that narrow gradients are the same numbers as wide ones.
    build, shape = NARROW[name]
    model = build().to(dtype)
    x = torch.randint(5, (4, *shape)) if "bag" in name else torch.randn(4, *shape).to(dtype)
    inputs = (x, x) if "bilinear" in name else (x,)
    wide = build().double()
    wide.load_state_dict(model.state_dict())
    factors = 300 * torch.randn(model(*inputs).shape).to(dtype)  # whose squares float16 can't hold
    outputs = wide(*(each.double() if each.is_floating_point() else each for each in inputs))
    expected = oracle.norms(oracle.grads_of_single_losses(wide, (outputs * factors.double()).flatten(1).sum(1)))
    clipper = ghostclip.GhostClipper(model)
    norms = clipper.norms((model(*inputs).float() * factors.float()).flatten(1).sum(1))
    assert norms.dtype == torch.float32
    assert_close(norms, expected, 1e-5)
