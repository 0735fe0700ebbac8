"""User-level privacy: users are sampled, their rows stay together, and a user's whole gradient is clipped, exactly."""

from collections.abc import Callable
from typing import Any

import numpy as np
import private_runs as runs
import pytest
import torch
from case_models import Wired
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ghostclip import LossShapeError, accounting, wrap
from ghostclip.errors import ExamplesMixError
from ghostclip.sampling import LogicalBatches, Users

# Users with 1 to 6 rows, in no order.
IDS = ["c", "a", "b", "a", "d", "a", "c", "e", "a", "e", "f", "g", "a", "h", "g", "a", "i", "d"]
ROWS = len(IDS)


def of_tokens(m: Any, tokens: Tensor) -> Tensor:
    seen = m.norm(m.embed(tokens))
    return m.head((seen + m.attention(seen, seen, seen, need_weights=False)[0]).mean(1))


def over_time(m: Any, sequences: Tensor) -> Tensor:
    """Layers over [time, rows, features], which are told so by ``batch_dim``."""
    seen = m.norm(m.lift(sequences.transpose(0, 1))).tanh()
    return m.head(m.gru(seen)[0]).mean(0)


def folded(m: Any, sequences: Tensor) -> Tensor:
    """Linear layers over [positions x rows, features]."""
    rows, steps, _ = sequences.shape
    return m.head(m.lift(sequences.transpose(0, 1).flatten(0, 1)).tanh()).view(steps, rows, 3).mean(0)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (runs.network, lambda: torch.randn(ROWS, 5)),
    "tokens": (
        lambda: Wired(of_tokens, embed=nn.Embedding(11, 6), norm=nn.LayerNorm(6), head=nn.Linear(6, 3),
                      attention=nn.MultiheadAttention(6, 2, batch_first=True)),
        lambda: torch.randint(0, 11, (ROWS, 4)),
    ),
    "time first": (
        lambda: wrap(Wired(over_time, lift=nn.Linear(3, 4), norm=nn.LayerNorm(4), gru=nn.GRU(4, 5),
                           head=nn.Linear(5, 3)), batch_dim=1),
        lambda: torch.randn(ROWS, 6, 3),
    ),
    "folded, positions first": (
        lambda: Wired(folded, lift=nn.Linear(3, 4), head=nn.Linear(4, 3)), lambda: torch.randn(ROWS, 6, 3),
    ),
}  # fmt: skip


def build(name: str) -> tuple[nn.Module, TensorDataset]:
    """A network in float64, and rows that end in their number."""
    make_model, make_inputs = NETWORKS[name]
    torch.manual_seed(3)
    inputs = make_inputs()
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    return make_model().double(), TensorDataset(inputs, torch.arange(ROWS) % 3, torch.arange(ROWS))


def clipped_by_loop(model: nn.Module, data: TensorDataset, rows: set[int], bound: float) -> Tensor:
    """The sum of the users' clipped gradients, one user after another."""
    total = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    for user in {IDS[row] for row in rows}:
        own = [row for row in rows if IDS[row] == user]
        loss = runs.losses_of(model, list(data[own])).sum()
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
        total += gradient * min(1.0, bound / float(gradient.norm()))
    return total


@pytest.mark.parametrize("second_pass", ["reweight", "cached"])
@pytest.mark.parametrize("limit", [None, 6])
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.one_in(3)
def test_sums_equal_the_loop_over_users(name: str, limit: int | None, second_pass: str) -> None:
    model, data = build(name)
    reference, _ = build(name)
    engine = runs.engine_for(
        model, torch.optim.SGD(model.parameters(), lr=0.0), data, unit_ids=IDS, batch_size=6, clipping=0.3,
        max_physical_batch_size=limit, second_pass=second_pass,
    )  # fmt: skip
    for batch in engine.batches():
        examples = runs.gather(engine, batch)
        assert all(limit is None or len(part[2]) <= limit for part in examples)
        rows = {row for part in examples for row in part[2].tolist()}
        engine.optimizer.step()
        expected = clipped_by_loop(reference, data, rows, 0.3) / 6
        assert torch.allclose(runs.grads(model), expected, rtol=1e-10, atol=1e-12)
        engine.optimizer.zero_grad()


ORDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "shifted": lambda x: torch.arange(len(x)).roll(1),
    "at random": lambda x: torch.randperm(len(x)),
    "sorted": lambda x: x[:, 0].argsort(),
}


@pytest.mark.parametrize("name", ORDERS)
def test_rows_that_are_permuted_between_users_are_noticed(name: str) -> None:
    """Between two layers, and not put back behind them: each loss depends on one row, which is another user's."""
    _, data = build("linear")
    permuted = Wired(lambda m, x: m.head(m.lift(x).tanh()[ORDERS[name](x)]), lift=nn.Linear(5, 4), head=nn.Linear(4, 3))
    engine = runs.engine_for(permuted.double(), None, data, unit_ids=IDS, batch_size=9)
    with pytest.raises(ExamplesMixError):
        runs.train(engine, 40)


def test_rows_of_a_user_are_sampled_together_and_users_independently() -> None:
    loader = LogicalBatches(TensorDataset(torch.arange(ROWS)), unit_ids=IDS, batch_size=3, max_physical_batch_size=6)
    users = sorted(set(IDS))
    found = []
    for _ in range(500):
        for batch in loader:
            rows = {row for part in batch.physical() for row in part[0].tolist()}
            inside = {IDS[row] for row in rows}
            assert rows == {row for row in range(ROWS) if IDS[row] in inside}
            found.append([user in inside for user in users])
    share = np.array(found).mean(0)
    assert np.abs(share - 3 / 9).max() < 5 * np.sqrt(2 / 9 / len(found))
    assert np.abs(np.corrcoef(np.array(found).T) - np.eye(9)).max() < 5 / np.sqrt(len(found))


def test_the_first_rows_of_a_user_are_the_ones_used() -> None:
    users = Users(IDS, ROWS, 2, 4)
    used = {row for rows, _ in users.divide(range(len(users))) for row in rows}
    assert used == {row for row in range(ROWS) if IDS[:row].count(IDS[row]) < 2}


@pytest.mark.usefixtures("coarse_losses")
def test_epsilon_is_that_of_users_and_says_so() -> None:
    model, data = build("linear")
    engine = runs.engine_for(model, None, data, unit_ids=IDS, batch_size=3, noise_multiplier=2.0, clipping=1.0)
    runs.train(engine)
    assert engine.epsilon() == accounting.epsilon(noise_multiplier=2.0, sample_rate=3 / 9, steps=3, delta=1e-5)
    assert "one user (all examples of theirs)" in engine.guarantee()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"unit_ids": IDS[1:]}, ValueError, "unit_ids must have one id for each of the 18 rows"),
        ({"unit_ids": IDS, "batch_size": 10}, ValueError, "batch_size must be at most users = 9; got 10"),
        ({"unit_ids": IDS, "max_physical_batch_size": 5}, ValueError, "a user has 6 rows.*max_rows_per_unit"),
        ({"unit_ids": IDS, "max_rows_per_unit": 0}, ValueError, "max_rows_per_unit must be a whole number >= 1"),
        ({"max_rows_per_unit": 2}, ValueError, "max_rows_per_unit must be left out without unit_ids"),
    ],
)
def test_wrong_ids_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        LogicalBatches(TensorDataset(torch.arange(ROWS)), **{"batch_size": 3, **options})


def test_what_users_do_not_go_with_is_refused() -> None:
    """Losses of another shape than one for each row, and compiled steps."""
    model, data = build("linear")
    engine = runs.engine_for(model, None, data, unit_ids=IDS, batch_size=9, self_check=False)
    part = next(next(iter(engine.batches())).physical())
    with pytest.raises(LossShapeError, match=r"exactly \[\d+\], one for each row"):
        engine.backward(runs.losses_of(model, part).unsqueeze(1))
    with pytest.raises(ValueError, match=r"compile\(\) and unit_ids don't go together"):
        engine.compile()
