"""Traces of an engine's steps: figures beside the slow loop, training untouched, files that can always be read."""

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import private_runs as runs
import pytest
import torch
from torch import Tensor, nn

from ghostclip import clipping as c
from ghostclip import traces
from ghostclip.traces.steps import noise_scale

POLICIES: dict[str, Any] = {
    "flat": 0.3,
    "adaptive": c.Adaptive(0.3),
    "per layer": c.PerLayer(0.4),
    "grouped": c.Grouped({"weights": ["*weight"], "biases": ["*bias"]}, thresholds={"weights": 0.3, "biases": 0.2}),
    "composed": c.Composed(c.ByParameter(), c.Fixed(0.1), c.AutoS(), c.EqualNoise()),
    "quantiles": c.Composed(c.ByLayer(), c.Quantiles(0.3), noise=c.OptimalNoise()),
}


def engine_for(**changes: Any) -> Any:
    model = runs.network(torch.float64)
    options = {"noise_multiplier": 1.3, "clipping": 0.3, "max_physical_batch_size": 3, "self_check": False, **changes}
    return runs.engine_for(model, dataset=runs.data(dtype=torch.float64), **options)


def single_gradients(model: nn.Module, batches: list[Any]) -> dict[str, Tensor]:
    """{parameter name: [B, *shape]}, one backward for each example."""
    examples = [torch.cat(parts) for parts in zip(*batches, strict=True)]
    return oracle.grads_of_single_losses(model, runs.losses_of(model, examples))


def by_loop(policy: Any, gradients: dict[str, Tensor], stds: dict[str, float]) -> tuple[dict[str, Tensor], Any]:
    """Norms, and the figures of each group, from single gradients: {group: [B]} and {group: {figure: number}}."""
    own = isinstance(policy, c.Groupwise)
    group_of = policy.partition({n: g[0].numel() for n, g in gradients.items()}) if own else {}
    inside: dict[str, list[str]] = {}
    for name in gradients:
        inside.setdefault(group_of.get(name, name.rpartition(".")[0]), []).append(name)
    norms = {group: oracle.norms({n: gradients[n] for n in members}) for group, members in inside.items()}
    whole = oracle.norms(gradients)
    given = policy.weights(norms) if own else dict.fromkeys(inside, policy.weights(whole))
    weight_of = {name: given[group] for group, members in inside.items() for name in members}
    clipped = {n: torch.einsum("b,b...->...", weight_of[n], each).flatten() for n, each in gradients.items()}
    unclipped = {n: each.sum(0).flatten() for n, each in gradients.items()}
    inside["all"], norms["all"] = list(gradients), whole
    figures = {}
    for group, members in inside.items():
        one, other = (torch.cat([sums[n] for n in members]) for sums in (clipped, unclipped))
        size, noise = float(one.norm()), sum(clipped[n].numel() * stds[n] ** 2 for n in members) ** 0.5
        figures[group] = {
            "cosine": float(one @ other) / size / float(other.norm()),
            "clipped_norm": size,
            "noise_norm": noise,
            "snr": size / noise,
            "fraction_clipped": float(torch.stack([weight_of[n] < 1 for n in members]).any(0).double().mean()),
        }
    return norms, figures


def flat(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([each.flatten(1) for each in gradients.values()], 1)


@pytest.mark.parametrize("second_pass", ["cached", "reweight"])
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.one_in(3)
def test_figures_equal_those_of_single_gradients(name: str, second_pass: str, tmp_path: Path) -> None:
    engine = engine_for(clipping=POLICIES[name], second_pass=second_pass)
    engine.trace(tmp_path / "t.npz", every=1)
    for _ in range(2):
        batch = next(runs.nonempty(engine))
        model, policy = copy.deepcopy(engine.model), copy.deepcopy(engine.clipping)
        seen = runs.gather(engine, batch)
        stds = {n: engine.noise_std(p) * engine.batch_size for n, p in engine.model.named_parameters()}
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    gradients = single_gradients(model, seen)
    norms, figures = by_loop(policy, gradients, stds)
    found = traces.read(tmp_path / "t.npz")
    assert found["groups"] == list(norms)
    assert found["step"].tolist() == [1, 2]
    assert found["norms"][1].dtype == np.float64
    np.testing.assert_allclose(found["norms"][1], torch.stack(list(norms.values())), rtol=1e-9)
    for place, group in enumerate(found["groups"]):
        for figure, expected in figures[group].items():
            assert found[figure][1, place] == pytest.approx(expected, rel=1e-9), (group, figure)
    assert found["threshold"][1, -1] == policy.sensitivity
    mean = flat(gradients)
    variance = float(mean.var(0).sum())  # with B - 1, as an unbiased variance has it
    squared = float(mean.mean(0).square().sum()) - variance / len(mean)
    assert found["gradient_variance"][1] == pytest.approx(variance, rel=1e-9)
    assert found["squared_gradient"][1] == pytest.approx(squared, rel=1e-7)
    assert found["noise_scale"][1] == pytest.approx(variance / squared, rel=1e-7)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (c.PerLayer({"0": 0.1, "2": 0.2}), {"0": 0.1, "2": 0.2}),
        (c.Composed(c.ByLayer(), c.Fixed({"0": 0.3, "2": 0.4})), {"0": 0.3, "2": 0.4}),
        (c.Custom(lambda n: n, 0.7, groups={"0": ["0.*"], "2": ["2.*"]}), {"0": math.nan, "2": math.nan}),
        (0.6, {"0": math.nan, "2": math.nan}),
    ],
)
def test_thresholds_are_the_policy_s(policy: Any, expected: dict[str, float], tmp_path: Path) -> None:
    engine = engine_for(clipping=policy)
    engine.trace(tmp_path / "t.npz")
    engine.step(next(runs.nonempty(engine)), runs.losses_of)
    found = traces.read(tmp_path / "t.npz")
    np.testing.assert_array_equal(found["threshold"][0], [*expected.values(), engine.clipping.sensitivity])


def test_both_parts_of_the_noise_scale_are_unbiased() -> None:
    generator = np.random.default_rng(0)
    mean, stds = np.array([1.0, -0.5, 0.2]), np.array([0.5, 2.0, 1.0])
    found = []
    for _ in range(20_000):
        gradients = mean + stds * generator.standard_normal((5, 3))
        found.append(noise_scale(np.linalg.norm(gradients, axis=1), float(np.square(gradients.sum(0)).sum())))
    for part, expected in (("squared_gradient", (mean**2).sum()), ("gradient_variance", (stds**2).sum())):
        values = np.array([each[part] for each in found])
        assert abs(values.mean() - expected) < 4 * values.std() / math.sqrt(len(values))


def trained(trace: Path | None, second_pass: str, loop: Any, policy: Any) -> tuple[list[Tensor], Any]:
    """Private gradients of a run with dropout and a convolution, and the random state after it."""
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 4, 3), nn.Flatten(), nn.Dropout(0.3), nn.Linear(12, 3)
    )  # fmt: skip
    engine = runs.engine_for(
        model, dataset=runs.data(), noise="test", seed=5, noise_multiplier=0.8, clipping=copy.deepcopy(policy),
        max_physical_batch_size=3, second_pass=second_pass,
    )  # fmt: skip
    found: list[Tensor] = []
    runs.on_step(engine.optimizer, lambda: found.append(runs.grads(model).clone()))
    if trace is not None:
        engine.trace(trace, every=2)
    for _ in range(2):
        loop(engine)
    return [*found, runs.weights(model)], torch.get_rng_state()


@pytest.mark.parametrize("policy", [0.3, c.Adaptive(0.3), c.PerLayer(0.3)])
@pytest.mark.parametrize("loop", [runs.train, runs.train_by_hand])
@pytest.mark.parametrize("second_pass", ["cached", "reweight"])
@pytest.mark.one_in(6)
def test_training_is_bit_for_bit_the_same(second_pass: str, loop: Any, policy: Any, tmp_path: Path) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        plain, state = trained(None, second_pass, loop, policy)
        traced, after = trained(tmp_path / "t.npz", second_pass, loop, policy)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(plain) == len(traced) == 7
    assert all(torch.equal(one, other) for one, other in zip(plain, traced, strict=True))
    assert torch.equal(state, after)
    assert len(traces.read(tmp_path / "t.npz")["step"]) == 3


def test_the_loss_function_is_called_once_and_other_steps_are_not_observed(tmp_path: Path, monkeypatch: Any) -> None:
    engine, calls, passes = engine_for(), [], []
    observed = engine._steps.release.clipper.passes.unclipped
    monkeypatch.setattr(
        engine._steps.release.clipper.passes, "unclipped", lambda *each: passes.append(1) or observed(*each)
    )

    def losses(model: nn.Module, examples: Any) -> Tensor:
        calls.append(1)
        return runs.losses_of(model, examples)

    engine.trace(tmp_path / "t.npz", every=3)
    sizes = []
    for _, batch in zip(range(5), runs.nonempty(engine), strict=False):
        engine.step(batch, losses)
        sizes.append(len(batch.sizes))
    assert len(calls) == sum(sizes)
    assert len(passes) == sizes[0] + sizes[3]


def test_every_nth_step_from_the_first_and_a_batch_without_a_step_gives_its_turn_away(tmp_path: Path) -> None:
    engine = engine_for()
    for _ in range(2):
        engine.step(next(runs.nonempty(engine)), runs.losses_of)
    engine.trace(tmp_path / "t.npz", every=2)
    batch = next(runs.nonempty(engine))
    runs.gather(engine, batch)
    batch.discard()  # charged as step 3
    with pytest.raises(RuntimeError, match="in a loss"):
        engine.step(next(runs.nonempty(engine)), lambda *_: (_ for _ in ()).throw(RuntimeError("in a loss")))
    for _ in range(5):
        engine.step(next(runs.nonempty(engine)), runs.losses_of)
    found = traces.read(tmp_path / "t.npz")
    assert found["step"].tolist() == [4, 6, 8]
    assert engine.steps_taken == 8


def test_an_empty_batch_is_a_step_without_examples(tmp_path: Path) -> None:
    engine = engine_for(batch_size=1, max_physical_batch_size=None)
    engine.trace(tmp_path / "t.npz", every=1)
    sizes = []
    while 0 not in sizes:
        for batch in engine.batches():
            engine.step(batch, runs.losses_of)
            sizes.append(sum(batch.sizes))
    found = traces.read(tmp_path / "t.npz")
    assert found["examples"].tolist() == sizes
    place = sizes.index(0)
    assert found["norms"][place].shape == (3, 0)
    assert found["clipped_norm"][place].tolist() == found["snr"][place].tolist() == [0.0] * 3
    for name in ("fraction_clipped", "cosine"):
        assert np.isnan(found[name][place]).all()
    assert math.isnan(found["noise_scale"][place])


def test_an_example_that_is_not_finite_is_left_out_of_the_sums(tmp_path: Path) -> None:
    dataset = runs.data(8, torch.float64)
    dataset.tensors[0][0] = math.inf
    model = runs.network(torch.float64)
    engine = runs.engine_for(model, dataset=dataset, sampling="without_replacement", self_check=False)
    engine.trace(tmp_path / "t.npz")
    good = [tensor[1:] for tensor in dataset.tensors]
    gradients = single_gradients(copy.deepcopy(model), [good])
    engine.step(next(iter(engine.batches())), runs.losses_of)
    found = traces.read(tmp_path / "t.npz")
    assert found["examples"].tolist() == [8]
    assert not np.isfinite(found["norms"][0][-1]).all()
    assert found["fraction_clipped"][0].tolist() == [1 / 8] * 3
    assert found["cosine"][0].tolist() == pytest.approx([1.0] * 3)
    rows = flat(gradients)
    assert found["clipped_norm"][0, -1] == pytest.approx(float(rows.sum(0).norm()))
    assert found["gradient_variance"][0] == pytest.approx(float(rows.var(0).sum()))


def test_norms_are_those_of_users(tmp_path: Path) -> None:
    engine = engine_for(unit_ids=[row // 2 for row in range(24)], batch_size=8, max_physical_batch_size=None)
    engine.trace(tmp_path / "t.npz", every=1)
    rows = []
    for batch in engine.batches():
        rows.append(flat(single_gradients(engine.model, runs.gather(engine, batch))))
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    found = traces.read(tmp_path / "t.npz")
    assert max(map(len, rows)) >= 4
    for norms, each in zip(found["norms"], rows, strict=True):
        np.testing.assert_allclose(norms[-1], (each[::2] + each[1::2]).norm(dim=1), rtol=1e-9)


def test_scaled_losses_are_traced_as_others(tmp_path: Path) -> None:
    found = []
    for scale in (1.0, 1024.0):
        torch.manual_seed(7)
        engine = engine_for(noise="test", seed=2, loss_scale=scale)
        engine.trace(tmp_path / f"{scale}.npz", every=1)
        runs.train(engine)
        found.append(traces.read(tmp_path / f"{scale}.npz"))
    one, other = found
    np.testing.assert_allclose(np.hstack(one["norms"]), np.hstack(other["norms"]), rtol=1e-9)
    for name in ("cosine", "snr", "noise_scale"):
        np.testing.assert_allclose(one[name], other[name], rtol=1e-9)
