"""Rows of which a batch doesn't show whose they are: zero, tiny, not finite. None may be taken for another example's.

Each program here has such rows once example 1 is another one. The clipped sum moves by twice the clipping norm at most,
or the batch is refused.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from case_models import Wired
from torch import Tensor, nn

from ghostclip import GhostClipper, UnsupportedModelError

MAX_NORM, EXAMPLES = 0.1, 4
INFINITE = torch.tensor([math.inf, 0.0, 0.0])


class Program(NamedTuple):
    """What is added to the losses of ``own(x) * target``, where every example has a gradient above the clipping norm.

    Attributes:
        wiring: (model, data, owners of rows) -> numbers [rows], one for each row.
        modules: of the model; tensors become parameters.
        shape: of the data.
        spoil: changes example 1's data, in place.
        owners: of the rows of data, to whose losses the numbers are added.
    """

    wiring: Callable[[Any, Tensor], Tensor]
    modules: Callable[[], dict[str, Any]]
    shape: tuple[int, ...]
    spoil: Callable[[Tensor], Any]
    owners: tuple[int, ...] = (1, 1, 2, 3)


def squares(found: Tensor) -> Tensor:
    """[rows], small beside what every example has itself."""
    return 0.01 * found.square().flatten(1).sum(1)


def at_one_time(m: Any, tokens: Tensor) -> Tensor:
    """Of [T, B, 3] row i is read at time i alone."""
    return squares(m.expert(tokens).tanh().diagonal().mT)


def two_views(m: Any, tokens: Tensor) -> Tensor:
    """Both views of each example, [2 B, 3], behind a gate that is closed."""
    return 0.0 * m.expert(tokens).tanh().view(2, EXAMPLES, -1).sum((0, 2))


def unless_constant(m: Any, tokens: Tensor) -> Tensor:
    varied = (tokens != tokens[:, :1]).any(1, keepdim=True)
    return 0.01 * torch.where(varied, m.norm(tokens), 0.0).sum(1)


PROGRAMS = {
    "saturated, a layer": Program(
        lambda m, tokens: squares(m.expert(tokens).tanh()),
        lambda: {"expert": nn.Linear(3, 4)}, (4, 3), lambda tokens: tokens[0].copy_(INFINITE),
    ),
    "saturated, a bare parameter": Program(
        lambda m, tokens: squares((tokens @ m.p).tanh()),
        lambda: {"p": torch.randn(3, 4)}, (4, 3), lambda tokens: tokens[0].copy_(INFINITE),
    ),
    "saturated, a matrix for each group": Program(
        lambda m, tokens: squares(torch.einsum("ngd,gdp->ngp", tokens, m.p).tanh()),
        lambda: {"p": torch.randn(2, 3, 4)}, (5, 2, 3), lambda tokens: tokens[2].copy_(INFINITE), (3, 0, 1, 2, 2),
    ),
    "saturated, sequence first": Program(
        lambda m, tokens: squares(m.expert(tokens).tanh().mean(0)),
        lambda: {"expert": nn.Linear(3, 4)}, (5, 4, 3), lambda tokens: tokens[:, 0].copy_(INFINITE),
    ),
    "tiny": Program(
        lambda m, tokens: 0.01 * (m.expert(tokens[:, :3]) * tokens[:, 3:]).sum(1),
        lambda: {"expert": nn.Linear(3, 4)}, (4, 4),
        lambda tokens: tokens[0].copy_(torch.tensor([1e200, 0.0, 0.0, 1e-300])),
    ),
    "a root of zero": Program(
        lambda m, tokens: 0.01 * m.expert(tokens).square().sum(1).sqrt(),
        lambda: {"expert": nn.Linear(3, 4, bias=False)}, (4, 3), lambda tokens: tokens[0].zero_(),
    ),
    "roots of zero alone": Program(
        lambda m, tokens: 0.01 * m.expert(tokens).square().sum(1).sqrt(),
        lambda: {"expert": nn.Linear(3, 4, bias=False)}, (4, 3), lambda tokens: tokens.zero_(), (1, 1, 1, 1),
    ),
    "a closed gate": Program(
        two_views, lambda: {"expert": nn.Linear(3, 2)}, (8, 3), lambda tokens: tokens[1].copy_(INFINITE), (0, 1, 2, 3),
    ),
    "a constant row without eps": Program(
        unless_constant, lambda: {"norm": nn.LayerNorm(3, eps=0.0)}, (4, 3), lambda tokens: tokens[0].fill_(1.0),
    ),
    "a time that nobody reads": Program(
        at_one_time, lambda: {"expert": nn.Linear(3, 4)}, (4, 4, 3), lambda tokens: tokens[0, 1].copy_(INFINITE),
        (0, 1, 2, 3),
    ),
}  # fmt: skip


PROGRAMS["a time that nobody reads, a bare parameter"] = PROGRAMS["a time that nobody reads"]._replace(
    wiring=lambda m, tokens: squares((tokens * m.p).tanh().diagonal().mT), modules=lambda: {"p": torch.randn(3)}
)
REFUSED = {
    "a time that nobody reads, a bare parameter": "which of several dimensions has the examples",
    "roots of zero alone": "spoils the gradients of others",
    "a time that nobody reads": "which of several dimensions has the examples",
}
IN_ORDER = (0, 1, 2, 3)


def of_program(program: Program) -> nn.Module:
    def wiring(m: Any, x: Tensor, target: Tensor, tokens: Tensor) -> Tensor:
        losses, added = (m.own(x) * target).sum(1), program.wiring(m, tokens)
        return losses + added if program.owners == IN_ORDER else losses.index_add(0, owners, added)

    owners = torch.tensor(program.owners)
    torch.manual_seed(0)
    given = program.modules()
    model = Wired(
        wiring, own=nn.Linear(3, 2, bias=False), **{k: v for k, v in given.items() if isinstance(v, nn.Module)}
    )
    for name, value in given.items():
        if isinstance(value, Tensor):
            model.register_parameter(name, nn.Parameter(value))
    return model.double()


def batch_of(program: Program, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(program.shape, generator=generator, dtype=torch.float64)
    return [torch.full((EXAMPLES, 3), 9.0).double(), torch.ones(EXAMPLES, 2).double(), tokens]


def summed(program: Program, second_pass: str, before: int, spoilt: bool) -> Tensor:
    """The clipped sum of a batch, with example 1 another one where it is ``spoilt``, after so many clean ones."""
    model = of_program(program)
    clipper = GhostClipper(model, MAX_NORM, second_pass=second_pass)
    for seed in range(before):
        clipper.backward(model(*batch_of(program, seed)))
    model.zero_grad()
    batch = batch_of(program, before)
    if spoilt:
        batch[1][1] *= -1
        program.spoil(batch[2])
    clipper.backward(model(*batch))
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


every_batch = pytest.mark.parametrize(
    ("second_pass", "before"), [*itertools.product(["cached", "reweight"], [0, 1, 2])]
)


@every_batch
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in REFUSED])
def test_one_example_moves_the_sum_by_what_it_may(name, second_pass, before):
    sums = [summed(PROGRAMS[name], second_pass, before, spoilt) for spoilt in (False, True)]
    assert float((sums[1] - sums[0]).norm()) <= 2 * MAX_NORM * (1 + 1e-6)


@every_batch
@pytest.mark.parametrize(("name", "said"), [*REFUSED.items()])
def test_what_may_be_anybodys_is_refused(name, said, second_pass, before):
    with pytest.raises(UnsupportedModelError, match=said):
        summed(PROGRAMS[name], second_pass, before, spoilt=True)


SCALES = torch.tensor([0.005, 500.0, 400.0, 0.005])


def in_float16(model: nn.Module) -> Tensor:
    """[4], of examples of which two have gradients below 2 ** -16 of the largest one's, times SCALES."""
    with torch.autocast("cpu", torch.float16):
        return model(torch.ones(4, 3)).float().sum(1)


def test_small_float16_gradients_in_order_are_their_examples():
    model = nn.Linear(3, 4, bias=False)
    clipper = GhostClipper(model, 0.01)
    torch.testing.assert_close(clipper.norms(in_float16(model) * SCALES), SCALES * 12**0.5, rtol=1e-2, atol=0)


@pytest.mark.parametrize("owners", [[1, 0, 3, 2], [1, 1, 2, 3]])
def test_small_float16_gradients_that_may_be_anybodys_are_refused(owners):
    """A large example would have dropped those of others."""
    model = nn.Linear(3, 4, bias=False)
    clipper = GhostClipper(model, 0.01)
    losses = torch.zeros(4).index_add(0, torch.tensor(owners), in_float16(model)) * SCALES
    with pytest.raises(UnsupportedModelError, match="float16 gradients are too small beside the batch's largest"):
        clipper.norms(losses)


@pytest.mark.parametrize("far", [0, 3])
@pytest.mark.parametrize("times", [3, 5, 8])
def test_a_far_larger_example_makes_no_dimension_its_own(times, far):
    """Along the dimension of time, too, all rows look like its own then; those of the others stay theirs."""
    model, texts, factors = nn.Linear(3, 4), torch.randn(8, times, 3), torch.ones(8)
    clipper = GhostClipper(model)
    whole = clipper.norms(model(texts).flip(0).square().flatten(1).sum(1))
    factors[far] = 1e8
    for _ in range(3):
        losses = model(texts).flip(0).square().flatten(1).sum(1) * factors
        torch.testing.assert_close(clipper.norms(losses), whole * factors, rtol=1e-4, atol=0)


def test_a_layout_that_was_proven_holds_where_a_batch_shows_one_float16_example():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    clipper, factors = GhostClipper(model), torch.ones(8)
    for others in (1.0, 1.0, 1.0, 1e-5, 1.0, 1.0, 1.0, 1e-5):  # the 4th and 8th batch are measured
        factors[1:] = others
        x = torch.randn(8, 3)
        with torch.autocast("cpu", torch.float16):
            losses = model(x).float().square().sum(1) * factors
        found = clipper.backward(losses).norms
        expected = GhostClipper(model).norms(model(x).square().sum(1) * factors)
        torch.testing.assert_close(found, expected, rtol=0.05, atol=1e-7)
        model.zero_grad()


def test_an_lstm_with_a_projection_is_refused_where_gates_are_saturated_and_rows_in_no_order():
    """What its projection adds doesn't pass through the gates: by rows that these show it would be lost."""
    model, owners, tokens = nn.LSTM(3, 5, proj_size=2), torch.tensor([1, 0, 3, 2, 2]), torch.randn(3, 5, 3)
    for parameter in model.parameters():
        parameter.data.abs_()
    clipper = GhostClipper(model)
    tokens[:, 0] = 1e4
    with pytest.raises(UnsupportedModelError, match="LSTM with proj_size have gradients of zero"):
        clipper.norms(torch.zeros(4).index_add(0, owners, model(tokens)[0].sum((0, 2))))
