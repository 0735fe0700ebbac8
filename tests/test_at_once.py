"""Networks of small linear layers, from the time on that their graph is known: the same results by fewer operations."""

import oracle
import pytest
import torch
from comparing import assert_dicts_close, gradients
from test_memory import Ops
from torch import nn

import ghostclip
from ghostclip.clipping import Adaptive, Automatic, Grouped, PerLayer
from ghostclip.native import library
from ghostclip.norms import affine, whole

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
PAIRS = Grouped({"outer": ["0", "4"], "inner": ["2.*"]}, max_norm=0.2)
WAYS = {
    "reweight": {"clipping": 0.2},
    "cached": {"clipping": 0.2, "second_pass": "cached"},
    "adaptive": {"clipping": Adaptive(0.2)},
    "per layer": {"clipping": PerLayer(0.2)},
    "groups": {"clipping": PAIRS},
}


@pytest.fixture(params=["C", "tensor operations"])
def way(request, monkeypatch):
    if request.param == "tensor operations":
        for module in (affine, whole):
            monkeypatch.setattr(module, "function", lambda *arguments: None)
    elif library("affine") is None:
        pytest.skip("no C compiler here")


def network(dtype=torch.float64):
    torch.manual_seed(0)
    layers = (nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 5, bias=False), nn.Tanh(), nn.Linear(5, 3))
    return nn.Sequential(*layers).to(dtype)


def batch(size=37, dtype=torch.float64):
    return torch.randn(size, 6, generator=torch.Generator().manual_seed(size), dtype=dtype)


def losses_of(outputs):
    return outputs.logsumexp(1) - outputs[:, 0]


def clip(clipper, inputs):
    """Norms, weights and clipped sums of one batch."""
    clipper.model.zero_grad()
    result = clipper.backward(losses_of(clipper.model(inputs)))
    return result, {name: gradient.clone() for name, gradient in gradients(clipper.model).items()}


def known(options, dtype=torch.float64, model=None):
    """A clipper that knows the graph of `batch`."""
    found = ghostclip.GhostClipper(network(dtype) if model is None else model, **options)
    for _ in range(2):
        clip(found, batch(dtype=dtype))
    return found


def is_known(clipper):
    return len(clipper._passes._at_once._known) > 0


def by_the_loop(clipper, inputs):
    """{group: norms} and the clipped sums of the loop, in the clipper's groups."""
    grads = oracle.per_example_grads(network(), losses_of, [inputs])
    partition = clipper._passes.partition() or dict.fromkeys(grads, "")
    groups = {group: {n: g for n, g in grads.items() if partition[n] == group} for group in partition.values()}
    bounds = clipper.clipping.thresholds_of(groups) if len(groups) > 1 else {"": 0.2}
    sums = {n: s for group, own in groups.items() for n, s in oracle.clipped_sum(own, bounds[group]).items()}
    return {group: oracle.norms(own) for group, own in groups.items()}, {n: sums[n] for n in grads}


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_norms_and_sums_equal_the_loops(options, dtype):
    clipper = known(options, dtype)
    assert is_known(clipper)
    inputs = batch(dtype=dtype)
    result, sums = clip(clipper, inputs)
    norms, expected = by_the_loop(clipper, inputs.double())
    found = result.norms if isinstance(result.norms, dict) else {"": result.norms}
    assert_dicts_close({g: n.double() for g, n in found.items()}, norms, TOLERANCE[dtype])
    assert_dicts_close({n: s.double() for n, s in sums.items()}, expected, TOLERANCE[dtype])


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("spoil", [torch.nan, torch.inf, "the loss"])
@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_an_example_that_is_not_finite_adds_nothing(options, spoil):
    clipper, inputs = known(options), batch()
    factor = torch.ones(37, dtype=torch.float64)
    if spoil == "the loss":
        factor[4] = torch.inf
    else:
        inputs[4] = spoil
    clipper.model.zero_grad()
    result = clipper.backward(factor * losses_of(clipper.model(inputs)))
    sums = gradients(clipper.model)
    fine = torch.arange(37) != 4
    expected, others = clip(known(options), inputs[fine])
    assert_dicts_close(sums, others, 1e-10)
    for of in ("norms", "weights"):
        found, right = getattr(result, of), getattr(expected, of)
        if not isinstance(found, dict):
            found, right = {"": found}, {"": right}
        assert of == "norms" or not any(bool(weights[4]) for weights in found.values())
        assert_dicts_close({g: each[fine] for g, each in found.items()}, right, 1e-10)


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_a_known_batch_takes_few_operations(options):
    if library("affine") is None:
        pytest.skip("no C compiler here")
    clipper, inputs = known(options), batch()
    losses = losses_of(clipper.model(inputs))
    with Ops() as ops:
        clipper.backward(losses)
    names = [name for name, _, _ in ops.seen]
    # Two products with gradients of pre-activations on the way down; sums are formed by C, like the norms.
    assert names.count("mm") == 2
    assert not {"mul", "sum", "sqrt", "stack", "where", "isfinite"}.intersection(names)


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_batches_of_several_sizes_in_turn(options):
    clipper = ghostclip.GhostClipper(network(), **options)
    for size in (37, 5, 5, 37, 5, 37, 37, 64, 37):
        _, sums = clip(clipper, batch(size))
        _, expected = clip(ghostclip.GhostClipper(network(), **options), batch(size))
        assert_dicts_close(sums, expected, 1e-10)
    assert len(clipper._passes._at_once._known) >= 2


def exchange(model):
    model[2].weight = nn.Parameter(torch.ones(5, 40, dtype=torch.float64))


def freeze(model):
    model[4].bias.requires_grad_(False)


def replace(model):
    model[2] = ghostclip.nn.Linear(40, 5).double()


@pytest.mark.parametrize("change", [exchange, freeze, replace])
@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_what_changes_later_is_seen(options, change):
    clipper, model = known(options), network()
    for each in (clipper.model, model):
        torch.manual_seed(2)
        change(each)
    for _ in range(3):
        _, sums = clip(clipper, batch())
        _, expected = clip(ghostclip.GhostClipper(model, **options), batch())
        assert_dicts_close(sums, expected, 1e-10)


class Square(nn.Module):
    """Two layers that can be tied, and one that isn't always used."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.odd, self.skip = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6), False

    def forward(self, x):
        x = self.two(self.one(x).tanh())
        return x if self.skip else self.odd(x.relu())


@pytest.mark.parametrize("options", [WAYS["reweight"], WAYS["cached"], WAYS["per layer"]])
def test_layers_tied_or_left_out_later_are_seen(options):
    clipper = known(options, model=Square().double())
    assert is_known(clipper)
    for change in ("skip", "tie"):
        model = Square().double()
        for each in (clipper.model, model):
            each.skip = change == "skip"
            if change == "tie":
                each.two.weight = each.one.weight
        _, sums = clip(clipper, batch())
        _, expected = clip(ghostclip.GhostClipper(model, **options), batch())
        assert_dicts_close(sums, expected, 1e-10)


def test_other_policies_and_larger_networks_go_on_as_they_were(monkeypatch):
    assert not is_known(known({"clipping": Automatic(0.2)}))
    assert not is_known(known({"clipping": 0.2, "second_pass": "cached", "memory_budget": 1}))
    assert not is_known(known({"clipping": 0.2, "loss_scale": 2.0}))
    monkeypatch.setattr("ghostclip.at_once.POSTPONED_BYTES", 1)
    assert not is_known(known({"clipping": 0.2}))


def test_a_clip_in_the_midst_of_another_changes_nothing(monkeypatch):
    """As by another thread, while C works or torch multiplies what it wrote."""
    clipper, inputs = known({"clipping": 0.2}), batch()
    _, expected = clip(clipper, inputs)
    formed = affine._formed

    def interrupted(affines, places):
        monkeypatch.setattr(affine, "_formed", formed)
        losses = losses_of(clipper.model(3 * inputs))
        clipper._passes._at_once.clip(losses, retain_graph=False)
        clipper.model.zero_grad()
        return formed(affines, places)

    monkeypatch.setattr(affine, "_formed", interrupted)
    _, found = clip(clipper, inputs)
    assert_dicts_close(found, expected, 1e-10)


def test_a_clippers_policy_can_not_be_exchanged():
    clipper = known({"clipping": 0.2})
    with pytest.raises(AttributeError):
        clipper.clipping = ghostclip.clipping.Flat(0.05)
