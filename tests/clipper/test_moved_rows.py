"""What sees mixing in batches that aren't measured, where the rules of moves.py would let it pass.

Nothing in these graphs is said to move examples, so layouts are stored. Batches 1, 2 and 4 are measured, and all others
are watched by marks.
"""

import pytest
import torch
from case_fallback import with_parameters
from case_models import Wired
from comparing import assert_exact_by_losses, every_pass, gradients
from torch import nn

import ghostclip
from ghostclip.errors import LossShapeError, RowsMovedError, UnsupportedModelError
from ghostclip.graph import layouts, marks, measuring
from ghostclip.graph.moves import Movements

EXAMPLES, WIDTH, FAINT = 64, 5, 1e-30


@pytest.fixture(autouse=True)
def nothing_is_said_to_move(monkeypatch):
    monkeypatch.setattr(measuring, "movements", lambda *_: Movements())
    monkeypatch.setattr(layouts, "WATCHED", 1)
    monkeypatch.setattr(marks, "_dice", torch.Generator("cpu").manual_seed(1))


def with_the_mean(h, gate):
    return h + gate * (h - 2 * h.mean(0, keepdim=True))


def two_exchanged(h, gate):
    return h + gate * torch.cat([h[1:2], h[:1], h[2:]])


def reversed_order(h, gate):
    return h * (1 - gate) + gate * h.flip(0)


def layers(meeting):
    """Two layers, and the examples meet between them."""
    wiring = lambda m, x, gate: m.second(meeting(torch.tanh(m.first(x)), gate)).square().sum(1)  # noqa: E731
    return Wired(wiring, first=nn.Linear(WIDTH, 6), second=nn.Linear(6, 3))


def bare(meeting):
    """Parameters outside of layers alone, and the examples meet above them."""
    wiring = lambda m, x, gate: meeting(x @ m.first * m.scale, gate).square().sum(1)  # noqa: E731
    return with_parameters(wiring, {"first": (WIDTH, 6), "scale": (6,)})


def clipped(build, meeting, second_pass, gates):
    """A clipper, and its model, after one batch for each gate; and a batch."""
    torch.manual_seed(3)
    model = ghostclip.wrap(build(meeting))
    clipper = ghostclip.GhostClipper(model, 1.0, second_pass=second_pass)
    x = torch.randn(EXAMPLES, WIDTH)
    for gate in gates:
        clipper.backward(model(x, gate))
    model.zero_grad()
    return clipper, model, x


def assert_measured_and_refused(clipper, model, x):
    """In a batch with the gate open, whose graph shows that examples mix; nothing is added."""
    with pytest.raises(UnsupportedModelError, match="examples mix") as caught:
        clipper.backward(model(x, 1.0))
    assert not isinstance(caught.value, RowsMovedError)
    assert all(p.grad is None for p in model.parameters())


BUILDS = pytest.mark.parametrize("build", [layers, bare])


@BUILDS
@every_pass
def test_norms_that_follow_marks_are_refused(build, second_pass):
    """At once where the graph is still there to be measured: "reweight" keeps it for its second backward."""
    clipper, model, x = clipped(build, with_the_mean, second_pass, (FAINT, FAINT))
    with pytest.raises(UnsupportedModelError) as caught:
        clipper.backward(model(x, 1.0))
    assert isinstance(caught.value, RowsMovedError) == (second_pass == "cached")
    assert all(p.grad is None for p in model.parameters())
    clipper.backward(model(x, FAINT))
    with pytest.raises(UnsupportedModelError, match="examples mix"):
        clipper.backward(model(x, 1.0))


@BUILDS
def test_two_examples_that_meet_are_seen_by_the_second_backward(build, monkeypatch):
    """Also where no norm rings the alarm. The graph is still there, and is measured."""
    monkeypatch.setattr(layouts, "rings", lambda *_: False)
    clipper, model, x = clipped(build, two_exchanged, "reweight", (FAINT, FAINT))
    assert_measured_and_refused(clipper, model, x)


@every_pass
@BUILDS
def test_what_was_noticed_is_measured_in_the_same_step(build, second_pass):
    """By a second forward, which says where examples mix."""
    clipper, _, x = clipped(build, with_the_mean, second_pass, (FAINT, FAINT))
    with pytest.raises(UnsupportedModelError, match="so examples mix") as caught:
        clipper.clip(lambda model, batch: model(*batch), (x, 1.0))
    assert not isinstance(caught.value, RowsMovedError)


@pytest.mark.parametrize(("second_pass", "alarm"), [("cached", layouts.rings), ("reweight", lambda *_: False)])
def test_rows_in_another_order_are_measured_and_clipped_once(second_pass, alarm, monkeypatch):
    """Nothing stays of the sums that were formed before it was seen: for "reweight", in its second backward."""
    monkeypatch.setattr(layouts, "rings", alarm)
    clipper, model, x = clipped(layers, reversed_order, second_pass, (FAINT, FAINT))
    found = []
    for each in (clipper, ghostclip.GhostClipper(model, 1.0)):
        model.zero_grad()
        if second_pass == "reweight":
            each.backward(model(x, 1.0))
        else:
            each.clip(lambda model, batch: model(*batch), (x, 1.0))
        found.append(gradients(model))
    torch.testing.assert_close(*found)


@BUILDS
@every_pass
def test_a_gradient_where_there_were_zeros_is_measured(build, second_pass):
    clipper, model, x = clipped(build, with_the_mean, second_pass, (0.0, 0.0))
    assert_measured_and_refused(clipper, model, x)


@every_pass
def test_a_structure_of_which_a_batch_was_refused_is_measured_from_then_on(second_pass):
    """The fourth is refused when it is measured, and so is the fifth."""
    clipper, model, x = clipped(layers, with_the_mean, second_pass, (FAINT, FAINT, FAINT))
    for _ in range(2):
        assert_measured_and_refused(clipper, model, x)


@every_pass
def test_gradients_too_small_for_marks_are_not_watched(second_pass):
    """Their squares would leave float32 beside marks, and with them the digits of norms."""
    model = ghostclip.wrap(layers(lambda h, gate: h))
    clipper = ghostclip.GhostClipper(model, 1.0, second_pass=second_pass)
    x = torch.randn(EXAMPLES, WIDTH)
    found = [clipper.backward(model(x, 1.0) * 1e-16).norms for _ in range(3)]
    torch.testing.assert_close(found[2], found[0], rtol=1e-6, atol=0)


@every_pass
def test_float16_has_too_few_powers_of_two_for_marks(second_pass):
    """Also under autocast, where a batch under bfloat16 has the same graph, and two of them were measured."""
    model = ghostclip.wrap(nn.Sequential(nn.Linear(WIDTH, 6), nn.Linear(6, 3)))
    clipper = ghostclip.GhostClipper(model, 1.0, second_pass=second_pass)
    x, scales = torch.randn(EXAMPLES, WIDTH), torch.logspace(-2, 2, EXAMPLES)
    for dtype in (torch.bfloat16, torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            losses = (model(x).float() * scales[:, None]).square().sum(1)
        found = clipper.backward(losses).norms
    anew = ghostclip.GhostClipper(model)  # before the forward: a hook of its own would count as somebody's
    with torch.autocast("cpu", torch.float16):
        losses = (model(x).float() * scales[:, None]).square().sum(1)
    torch.testing.assert_close(found, anew.norms(losses))


def test_a_structure_whose_second_measurement_fails_is_measured_from_then_on(monkeypatch):
    clipper, model, x = clipped(layers, with_the_mean, "cached", (FAINT,) * 3)  # the fourth is measured
    failing = LossShapeError("losses of another shape")
    monkeypatch.setattr(measuring, "owners", lambda *_, **__: (_ for _ in ()).throw(failing))
    with pytest.raises(LossShapeError):
        clipper.backward(model(x, FAINT))
    monkeypatch.undo()
    assert_measured_and_refused(clipper, model, x)


@every_pass
def test_sums_of_watched_passes_are_exact(second_pass):
    """Their gradients are those of marked losses, and are divided by the marks."""
    model = ghostclip.wrap(layers(lambda h, gate: h)).double()
    clipper = ghostclip.GhostClipper(model, 0.3, second_pass=second_pass)
    for _ in range(5):
        assert_exact_by_losses(clipper, model(torch.randn(EXAMPLES, WIDTH).double(), 1.0), 1e-9)
