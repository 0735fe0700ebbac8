"""A branch that no gradient reaches at first, and one reaches later: exact or refused from its first batch on."""

from typing import Any

import oracle
import pytest
import torch
from case_fallback import with_parameters
from case_models import Wired
from comparing import assert_close, assert_dicts_close, gradients
from einops import rearrange
from graphs import interpret
from torch import Tensor, nn

import ghostclip
from ghostclip import GhostClipper, UnsupportedModelError, clipping

EXAMPLES, MAX_NORM = 4, 0.3
EACH = clipping.PerLayer(max_norm=MAX_NORM)
GROUPS = {layer: [layer] for layer in ("trunk", "head", "aux")}


def each_group(norms: dict[str, Tensor]) -> dict[str, Tensor]:
    """What `PerLayer` does, as a policy that needs all norms first."""
    return {group: (MAX_NORM / 3**0.5 / norm).clamp(max=1.0) for group, norm in norms.items()}


WAYS: dict[str, dict[str, Any]] = {
    "reweight": {"clipping": MAX_NORM},
    "cached": {"clipping": MAX_NORM, "second_pass": "cached"},
    "per layer": {"clipping": EACH},
    "by groups": {"clipping": clipping.Custom(each_group, MAX_NORM, groups=GROUPS)},
}
ways = pytest.mark.parametrize("way", WAYS)


def window_first(aux: nn.Module, hidden: Tensor) -> Tensor:
    """Two rows an example in the batch dimension, which only a gradient tells how they are grouped."""
    rows = aux(rearrange(hidden, "b (w t) d -> (w b) t d", w=2))
    return rearrange(rows, "(w b) t d -> b w t d", w=2).flatten(1)


def centred(aux: nn.Module, hidden: Tensor) -> Tensor:
    """Examples mix below the layer, in one that a gradient has reached all along."""
    hidden = hidden[:, 0]
    return aux(hidden - hidden.mean(0))


EXACT = ("window_first",)
BRANCHES = {branch.__name__: branch for branch in (window_first, centred)}


class Branched(nn.Module):
    """A trunk with a head, and a branch whose share of the losses is nothing at first."""

    def __init__(self, branch: str) -> None:
        super().__init__()
        self.trunk, self.head, self.aux = nn.Linear(3, 5), nn.Linear(5, 2), nn.Linear(5, 3)
        self.branch = BRANCHES[branch]
        self.register_buffer("share", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.trunk(x))
        losses = self.head(hidden).square().flatten(1).mean(1)
        return losses + self.share * self.branch(self.aux, hidden).square().flatten(1).sum(1)


def batch(seed: int = 0, examples: int = EXAMPLES) -> Tensor:
    return torch.randn(examples, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def expected(model: nn.Module, x: Tensor, way: str) -> dict[str, Tensor]:
    each = oracle.per_example_grads(model, lambda losses: losses, (x,))
    if way in ("reweight", "cached"):
        return oracle.clipped_sum(each, MAX_NORM)
    found: dict[str, Tensor] = {}
    bound = MAX_NORM / 3**0.5
    for layer in GROUPS:
        found |= oracle.clipped_sum({k: v for k, v in each.items() if k.startswith(layer)}, bound)
    return {name: found[name] for name in each}


def check(model: nn.Module, clipper: GhostClipper, step: Any, x: Tensor, branch: str, way: str) -> None:
    """The clipped sums of a batch are exact, or it is refused and nothing added."""
    model.zero_grad()
    wanted = expected(model, x, way)
    if branch in EXACT or not bool(model.share):
        step(x)
        assert_dicts_close(gradients(model), wanted, 1e-10)
        return
    with pytest.raises(UnsupportedModelError, match=r"trunk|aux"):
        step(x)
    assert all(parameter.grad is None for parameter in model.parameters())


@ways
@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize("call", ["backward", "clip"])
@pytest.mark.one_in(3)
def test_a_branch_that_is_switched_on_late(branch: str, way: str, call: str) -> None:
    torch.manual_seed(2)
    model = ghostclip.wrap(Branched(branch).double())
    clipper = GhostClipper(model, **WAYS[way])
    steps = {"backward": lambda x: clipper.backward(model(x)), "clip": lambda x: clipper.clip(lambda m, x: m(x), x)}
    for number in range(11):
        check(model, clipper, steps[call], batch(number), branch, way)
    model.share.fill_(1.0)
    for number in range(2):
        check(model, clipper, steps[call], batch(number), branch, way)


@ways
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_example_that_is_not_finite_when_the_branch_is_switched_on(way: str, value: float) -> None:
    torch.manual_seed(2)
    model = ghostclip.wrap(Branched("window_first").double())
    clipper = GhostClipper(model, **WAYS[way])
    clipper.backward(model(batch()))
    model.share.fill_(1.0)
    x = batch(1)
    wanted = expected(model, x[1:], way)
    x[0, 1, 1] = value
    for _ in range(2):
        model.zero_grad()
        clipper.backward(model(x))
        assert_dicts_close(gradients(model), wanted, 1e-10)


@pytest.mark.parametrize("second_pass", ["cached", "reweight"])
def test_adapters_start_below_the_last_place_where_examples_enter(second_pass: str) -> None:
    """Of bare LoRA matrices the first has no gradient until the second moves; no layer is below either."""
    torch.manual_seed(2)
    wiring = lambda m, x: (x + x @ m.first @ m.second).square().sum(1)  # noqa: E731
    model = with_parameters(wiring, {"first": (4, 2), "second": (2, 4)}, layer=nn.Identity()).double()
    model.second.data.zero_()
    clipper = GhostClipper(model, MAX_NORM, second_pass=second_pass)
    for number in range(7):
        x = torch.randn(5, 4, dtype=torch.float64)
        model.zero_grad()
        norms = clipper.backward(model(x)).norms
        each = oracle.per_example_grads(model, lambda losses: losses, [x])
        assert_close(norms, oracle.norms(each), 1e-10)
        assert_dicts_close(gradients(model), oracle.clipped_sum(each, MAX_NORM), 1e-10)
        if number == 4:
            model.second.data.normal_()


@pytest.mark.parametrize("branch", ["window_first", "centred"])
def test_a_graph_counts_for_nothing_once_a_layer_has_its_first_gradient(branch: str, monkeypatch: Any) -> None:
    interpret(monkeypatch)
    torch.manual_seed(2)
    model = ghostclip.wrap(Branched(branch).double())
    clipper = GhostClipper(model, MAX_NORM, compile=True)
    for number in range(4):
        check(model, clipper, lambda x: clipper.clip(lambda m, x: m(x), x), batch(number), branch, "reweight")
    assert clipper.compiled is not None
    assert clipper.compiled.graphs == 1
    model.share.fill_(1.0)
    for number in range(5):
        check(model, clipper, lambda x: clipper.clip(lambda m, x: m(x), x), batch(number), branch, "reweight")


@pytest.mark.parametrize(
    "of_examples",
    [pytest.param(False, marks=pytest.mark.xfail(strict=True, reason="an index isn't looked at in a trace")), True],
)
def test_steps_are_compiled_where_examples_stay_in_place(of_examples: bool, monkeypatch: Any) -> None:
    interpret(monkeypatch)

    def wiring(m: Any, x: Tensor, order: Tensor) -> Tensor:
        h = torch.tanh(m.first(x))
        return m.last(h.gather(1 - of_examples, order[..., None].expand_as(h))).square().sum((1, 2))

    model = ghostclip.wrap(Wired(wiring, first=nn.Linear(3, 5), last=nn.Linear(5, 2)).double())
    clipper, places = GhostClipper(model, MAX_NORM, compile=True), torch.arange(EXAMPLES)
    for number in range(4):
        model.zero_grad()
        order = places[:, None].expand(-1, EXAMPLES) if of_examples else places.roll(number).expand(EXAMPLES, -1)
        given = (batch(number), order.contiguous())
        GhostClipper(model, MAX_NORM).backward(model(*given))
        wanted = gradients(model)
        model.zero_grad()
        clipper.clip(lambda m, given: m(*given), given)
        assert_dicts_close(gradients(model), wanted, 1e-10)
    assert clipper.compiled is not None
    assert clipper.compiled.graphs == (not of_examples)
