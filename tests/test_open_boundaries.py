"""Uses of bare Parameters that gradients don't settle: nothing reached them, or only what fits several dimensions."""

from typing import Any

import oracle
import pytest
import torch
from case_fallback import with_parameters
from comparing import assert_dicts_close, gradients
from graphs import interpret
from torch import Tensor, nn

import ghostclip
from ghostclip import GhostClipper, UnsupportedModelError
from ghostclip.graph.shared import search

EXAMPLES, MAX_NORM = 4, 0.3
every_pass = pytest.mark.parametrize("second_pass", ["reweight", "cached"])
Batch = tuple[Tensor, Tensor]

DIAGONAL = torch.eye(EXAMPLES, dtype=torch.float64)
BELOW = torch.diag(torch.ones(EXAMPLES - 1, dtype=torch.float64), -1)


def rows(m: Any, x: Tensor, mask: Tensor) -> Tensor:
    """Scores [B, B] times a number; example i's are in row i, if its mask takes others."""
    return ((m.layer(x) * m.p) * mask).sum(1)


def columns(m: Any, x: Tensor, mask: Tensor) -> Tensor:
    return ((m.layer(x).mT * m.p) * mask).sum(0)


def both(m: Any, x: Tensor, mask: Tensor) -> Tensor:
    """Of an example's row and of its column: examples mix but on the diagonal."""
    scores = (m.layer(x) * m.p) * mask
    return scores.sum(1) + scores.sum(0)


def folded(m: Any, x: Tensor, mask: Tensor) -> Tensor:
    """[B * B], of which row-major or column-major may be one example's."""
    return ((m.layer(x).flatten() * m.p) * mask.flatten()).unflatten(0, (len(x), -1)).sum(1)


def scores(wiring: Any) -> nn.Module:
    torch.manual_seed(3)
    return ghostclip.wrap(with_parameters(wiring, {"p": ()}, layer=nn.Linear(3, EXAMPLES)).double())


def batch(mask: Tensor, seed: int = 0) -> Batch:
    return torch.randn(EXAMPLES, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)), mask


def proofs(monkeypatch: Any) -> list[int]:
    """How many outputs each proof outside of layers was of, as they come."""
    found: list[int] = []
    original = search.verdicts
    monkeypatch.setattr(search, "verdicts", lambda *a, **k: (found.append(len(a[2])), original(*a, **k))[1])
    return found


def check(model: nn.Module, clipper: GhostClipper, given: Batch, mixes: bool = False) -> None:
    """The clipped sum of a batch is exact, or it is refused and nothing added."""
    model.zero_grad()
    if mixes:
        with pytest.raises(UnsupportedModelError, match="p is used outside of a layer"):
            clipper.backward(model(*given))
        assert all(parameter.grad is None for parameter in model.parameters())
        return
    each = oracle.per_example_grads(model, lambda losses: losses, given)
    clipper.backward(model(*given))
    assert_dicts_close(gradients(model), oracle.clipped_sum(each, MAX_NORM), 1e-10)


def whole(model: nn.Module, given: Batch) -> dict[str, Tensor]:
    """Per-example gradients from one backward for each loss of the whole batch, whose rows others' losses may read."""
    losses, named = model(*given), dict(model.named_parameters())
    each = [torch.autograd.grad(loss, list(named.values()), retain_graph=True) for loss in losses]
    return {name: torch.stack(parts) for name, parts in zip(named, zip(*each, strict=True), strict=True)}


@every_pass
@pytest.mark.parametrize("wiring", [rows, columns, both, folded])
@pytest.mark.parametrize("later", [BELOW, torch.ones_like(DIAGONAL)], ids=["below", "all"])
def test_a_diagonal_settles_nothing_beside_it(wiring: Any, later: Tensor, second_pass: str, monkeypatch: Any) -> None:
    """The first batches use the diagonal of pairs only, and the last ones entries beside it."""
    model, found = scores(wiring), proofs(monkeypatch)
    clipper = GhostClipper(model, MAX_NORM, second_pass=second_pass)
    for mask in [DIAGONAL] * 5 + [later] * 2 + [DIAGONAL]:
        model.zero_grad()
        given = batch(mask, seed=len(found))
        if wiring is both and mask is later:
            with pytest.raises(UnsupportedModelError):
                clipper.backward(model(*given))
            assert all(parameter.grad is None for parameter in model.parameters())
            continue
        wanted = oracle.clipped_sum(whole(model, given), MAX_NORM)
        clipper.backward(model(*given))
        assert_dicts_close(gradients(model), wanted, 1e-10)


@every_pass
def test_a_diagonal_is_proved_once(second_pass: str, monkeypatch: Any) -> None:
    model, found = scores(rows), proofs(monkeypatch)
    clipper = GhostClipper(model, MAX_NORM, second_pass=second_pass)
    for seed in range(4):
        clipper.backward(model(*batch(DIAGONAL, seed)))
    assert found == [1]
    for seed in range(3):
        clipper.backward(model(*batch(BELOW, seed)))
    assert found == [1, 1]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", [(0, 0), (0, 1), (2, 1)])
def test_an_example_that_is_not_finite_after_a_diagonal(where: tuple[int, int], value: float) -> None:
    model = scores(rows)
    clipper = GhostClipper(model, MAX_NORM)
    clipper.backward(model(*batch(DIAGONAL)))
    x, mask = batch(DIAGONAL.clone(), 1)
    others = [number for number in range(EXAMPLES) if number != where[0]]
    wanted = {name: each[others] for name, each in whole(model, (x, mask)).items()}
    mask[where] = value
    for _ in range(2):
        model.zero_grad()
        clipper.backward(model(x, mask))
        assert_dicts_close(gradients(model), oracle.clipped_sum(wanted, MAX_NORM), 1e-10)


def of_its_own(m: Any, hidden: Tensor) -> Tensor:
    return hidden * m.p


def centred(m: Any, hidden: Tensor) -> Tensor:
    found = hidden * m.p
    return found - found.mean(0)


def switched(branch: Any) -> nn.Module:
    def wiring(m: Any, x: Tensor, share: Tensor) -> Tensor:
        hidden = torch.tanh(m.layer(x))
        return hidden.square().mean(1) + share * branch(m, hidden).square().sum(1)

    torch.manual_seed(3)
    return ghostclip.wrap(with_parameters(wiring, {"p": (5,)}, layer=nn.Linear(3, 5)).double())


@every_pass
@pytest.mark.parametrize("branch", [of_its_own, centred])
def test_a_use_that_no_gradient_reaches_at_first(branch: Any, second_pass: str, monkeypatch: Any) -> None:
    model, found = switched(branch), proofs(monkeypatch)
    clipper = GhostClipper(model, MAX_NORM, second_pass=second_pass)
    off, on = torch.zeros(EXAMPLES, dtype=torch.float64), torch.ones(EXAMPLES, dtype=torch.float64)
    for seed in range(4):
        check(model, clipper, batch(off, seed))
    assert found == [1]
    for seed in range(3):
        check(model, clipper, batch(on, seed), mixes=branch is centred)
    if branch is of_its_own:
        assert found == [1, 1]


def test_a_compiled_step_waits_for_what_is_open(monkeypatch: Any) -> None:
    interpret(monkeypatch)
    model = switched(of_its_own)
    clipper = GhostClipper(model, MAX_NORM, compile=True)
    off, on = torch.zeros(EXAMPLES, dtype=torch.float64), torch.ones(EXAMPLES, dtype=torch.float64)
    assert clipper.compiled is not None
    for share, graphs in ((off, 0), (on, 1)):
        for seed in range(4):
            given = batch(share, seed)
            wanted = oracle.clipped_sum(oracle.per_example_grads(model, lambda losses: losses, given), MAX_NORM)
            model.zero_grad()
            clipper.clip(lambda m, given: m(*given), given)
            assert_dicts_close(gradients(model), wanted, 1e-10)
        assert clipper.compiled.graphs == graphs


@every_pass
@pytest.mark.parametrize("shares", [(1, 0, 1), (0, 1, 0), (1, 1, 0), (0, 1, 1)])
def test_several_steps_of_which_no_gradient_reaches_some(
    shares: tuple[int, ...], second_pass: str, monkeypatch: Any
) -> None:
    """A parameter is used alike at each step; what is proved of one use holds for all, and no batch is tested again."""

    def wiring(m: Any, x: Tensor) -> Tensor:
        hidden = [torch.tanh(m.layer(x)) * share for share in shares]
        return sum((each * m.p).square().sum(1) for each in hidden)  # type: ignore[return-value]

    torch.manual_seed(3)
    model = ghostclip.wrap(with_parameters(wiring, {"p": (5,)}, layer=nn.Linear(3, 5)).double())
    found = proofs(monkeypatch)
    clipper = GhostClipper(model, MAX_NORM, second_pass=second_pass)
    for seed in range(4):
        given = batch(DIAGONAL, seed)[:1]
        wanted = oracle.clipped_sum(oracle.per_example_grads(model, lambda losses: losses, given), MAX_NORM)
        model.zero_grad()
        clipper.backward(model(*given))
        assert_dicts_close(gradients(model), wanted, 1e-10)
    assert found == [3]
