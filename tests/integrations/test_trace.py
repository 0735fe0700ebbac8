"""Traces of an engine's steps: figures beside the slow loop, training untouched, files that can always be read."""

import copy
import logging
import math
import sys
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
from ghostclip.sampling.schemes import Poisson

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


def step(engine: Any, losses: Any = runs.losses_of) -> Any:
    """A step with a logical batch of several examples; returns the batch."""
    batch = next(runs.nonempty(engine))
    engine.step(batch, losses)
    return batch


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
        (c.PerLayer({"0": 0.1, "2": 0.2}), [0.1, 0.2]),
        (c.Composed(c.ByLayer(), c.Fixed({"0": 0.3, "2": 0.4})), [0.3, 0.4]),
        (c.Custom(lambda n: n, 0.7, groups={"0": ["0.*"], "2": ["2.*"]}), [math.nan, math.nan]),
        (0.6, [math.nan, math.nan]),
    ],
)
def test_thresholds_are_the_policy_s(policy: Any, expected: list[float], tmp_path: Path) -> None:
    engine = engine_for(clipping=policy)
    engine.trace(tmp_path / "t.npz")
    step(engine)
    found = traces.read(tmp_path / "t.npz")
    np.testing.assert_array_equal(found["threshold"][0], [*expected, engine.clipping.sensitivity])


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
    own = engine._steps.release.clipper.passes
    observed = own.unclipped
    monkeypatch.setattr(own, "unclipped", lambda *each: passes.append(1) or observed(*each))
    engine.trace(tmp_path / "t.npz", every=3)
    sizes = [len(step(engine, lambda *given: calls.append(1) or runs.losses_of(*given)).sizes) for _ in range(5)]
    assert len(calls) == sum(sizes)
    assert len(passes) == sizes[0] + sizes[3]


def test_every_nth_step_from_the_first_and_a_batch_without_a_step_gives_its_turn_away(tmp_path: Path) -> None:
    engine = engine_for()
    for _ in range(2):
        step(engine)
    engine.trace(tmp_path / "t.npz", every=2)
    batch = next(runs.nonempty(engine))
    runs.gather(engine, batch)
    batch.discard()  # charged as step 3
    with pytest.raises(RuntimeError, match="in a loss"):
        step(engine, lambda *_: (_ for _ in ()).throw(RuntimeError("in a loss")))
    for _ in range(5):
        step(engine)
    found = traces.read(tmp_path / "t.npz")
    assert found["step"].tolist() == [4, 6, 8]
    assert engine.steps_taken == 8


def test_an_empty_batch_is_a_step_without_examples(tmp_path: Path, monkeypatch: Any) -> None:
    sizes = [2, 0, 1]
    counts = iter(sizes)
    monkeypatch.setattr(Poisson, "count", lambda *_: next(counts))
    engine = engine_for(max_physical_batch_size=None)
    engine.trace(tmp_path / "t.npz", every=1)
    runs.train(engine)
    found = traces.read(tmp_path / "t.npz")
    assert found["examples"].tolist() == sizes
    assert found["norms"][1].shape == (3, 0)
    assert found["clipped_norm"][1].tolist() == found["snr"][1].tolist() == [0.0] * 3
    for name in ("fraction_clipped", "cosine", "noise_scale"):
        assert np.isnan(found[name][1]).all()


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


FIXED = {"sampling": "without_replacement", "self_check": False, "noise_multiplier": 1.0, "clipping": 0.3}


@pytest.fixture
def engine() -> Any:
    """An engine whose logical batches have 8 examples each, three of them in an epoch."""
    return runs.engine_for(runs.network(), **FIXED)


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_piece_that_is_tried_again_out_of_memory_counts_once(failing: int, tmp_path: Path) -> None:
    # The same examples in every run: of some, the difference below is next to nothing, and as large as rounding.
    engine = runs.engine_for(runs.network(), noise="test", seed=1, **FIXED)
    engine.trace(tmp_path / "t.npz")
    before, done, tried = copy.deepcopy(engine.model), [], []

    def losses(model: nn.Module, examples: Any) -> Tensor:
        found, passes = runs.losses_of(model, examples), []
        tried.append(len(found))
        done.extend([examples] if len(found) == 2 else [])

        def out_of_memory(grad: Tensor) -> None:
            passes.append(1)
            if len(found) > 2 and len(passes) == failing:
                raise MemoryError("no more")

        found.register_hook(out_of_memory)
        return found

    engine.step(next(iter(engine.batches())), losses)
    assert tried == [8, 4, 2, 2, 2, 2]
    found = traces.read(tmp_path / "t.npz")
    assert found["examples"].tolist() == [8]
    runs.losses_of(before, [torch.cat(parts) for parts in zip(*done, strict=True)]).mean().backward()
    squared = runs.grads(before).double().square().sum()
    expected = (8 * squared - np.square(found["norms"][0][-1].astype(float)).mean()) / 7
    assert found["squared_gradient"][0] == pytest.approx(float(expected), rel=1e-5)


def test_files_say_that_they_are_private_and_so_does_the_log(tmp_path: Path, caplog: Any) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    said = "raw data: contains norms of single examples without noise; not covered by the guarantee; don't publish"
    for path in (tmp_path / "t.npz", tmp_path / "t.parquet"):
        engine = runs.engine_for(runs.network(), **FIXED)
        with caplog.at_level(logging.WARNING, "ghostclip"):
            engine.trace(path)
        assert said in caplog.text
        caplog.clear()
        runs.train(engine)
        assert (path / "_PRIVATE.txt").read_text() == f"{said}\n"
        assert traces.read(path)["privacy"] == said
        assert path.stat().st_mode & 0o077 == 0
    (file,) = (tmp_path / "t.npz").glob("*.npz")
    with np.load(file) as arrays:
        assert arrays.files[0] == "privacy"
    table = parquet.read_table(tmp_path / "t.parquet")  # the folder as one table, as others read it
    assert table.column_names[:3] == ["step", "group", "norms"]
    assert table.num_rows == 3


def test_both_kinds_hold_the_same(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    found = []
    for suffix in ("npz", "parquet"):
        torch.manual_seed(5)
        engine = runs.engine_for(runs.network(), noise="test", seed=1, clipping=c.PerLayer(0.2), noise_multiplier=1.0)
        engine.trace(tmp_path / f"t.{suffix}", every=2)
        runs.train(engine)
        found.append(traces.read(tmp_path / f"t.{suffix}"))
    one, other = found
    assert one.keys() == other.keys() >= {*traces.BY_GROUP, *traces.BY_STEP, "norms", "step", "examples"}
    assert one.pop("groups") == other.pop("groups") == ["0", "2", "all"]
    assert one.pop("privacy") == other.pop("privacy")
    for norms, others in zip(one.pop("norms"), other.pop("norms"), strict=True):
        assert norms.dtype == others.dtype == np.float32
        np.testing.assert_array_equal(norms, others)
    for name, values in one.items():
        np.testing.assert_array_equal(values, other[name])


@pytest.mark.parametrize("end", ["None", "close", "detach"])
def test_a_trace_ends_and_can_be_read_before_whatever_was_begun(engine: Any, end: str, tmp_path: Path) -> None:
    trace = engine.trace(str(tmp_path / "deep" / "t.npz"), every=1)
    runs.train(engine)
    (trace.path / ".step-0000000004.npz").write_bytes(b"half of")
    assert traces.read(trace.path)["step"].tolist() == [1, 2, 3]
    {"None": lambda: engine.trace(None), "close": trace.close, "detach": engine.detach}[end]()
    if end != "detach":
        runs.train(engine)
    assert traces.read(trace.path)["step"].tolist() == [1, 2, 3]


def test_one_that_is_ended_within_a_batch_leaves_it_out_and_another_begins_with_the_next(
    engine: Any, tmp_path: Path
) -> None:
    first = engine.trace(tmp_path / "1.npz", every=1)
    for place, batch in enumerate(engine.batches()):
        runs.gather(engine, batch)
        if place == 1:
            engine.trace(tmp_path / "2.npz", every=1)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    assert traces.read(first.path)["step"].tolist() == [1]
    assert traces.read(tmp_path / "2.npz")["step"].tolist() == [3]


SUFFIX = r"must end in \.parquet or \.npz"


@pytest.mark.parametrize(
    ("name", "every", "words"),
    [
        *(("t.npz", every, "every must be a whole number >= 1") for every in (0, 1.5)),
        *((name, 1, SUFFIX) for name in ("t.csv", "t")),
        ("mine.npz", 1, r"mine\.npz exists; give the path of a trace that is to be made"),
    ],
)
def test_what_can_not_be_traced_is_refused_and_nothing_is_made(
    engine: Any, name: str, every: Any, words: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.npz").write_text("mine")
    with pytest.raises((ValueError, TypeError, FileExistsError), match=words):
        engine.trace(tmp_path / name, every=every)
    with pytest.raises(TypeError, match="path must be a str or a Path; got 3 of type int"):
        engine.trace(3)
    if words == SUFFIX:
        with pytest.raises(ValueError, match=words):
            traces.read(tmp_path / name)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_engines_that_are_not_traced(engine: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """Of a group with the name of all parameters, without pyarrow, and with compiled steps."""
    groups = {"all": ["0.*"], "rest": ["2.*"]}
    other = runs.engine_for(runs.network(), clipping=c.Grouped(groups, max_norm=1.0))
    with pytest.raises(ValueError, match="a group of parameters is called 'all'"):
        other.trace(tmp_path / "t.npz")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs pyarrow: pip install pyarrow; \.npz needs nothing"):
        engine.trace(tmp_path / "t.parquet")
    assert not list(tmp_path.iterdir())
    engine.trace(tmp_path / "t.npz")
    with pytest.raises(ValueError, match="holds no traced step"):
        traces.read(tmp_path / "t.npz")
    with pytest.raises(ValueError, match=r"trace\(\) and compile\(\) don't go together"):
        engine.compile()
    assert engine.trace(None) is None
    engine.compile()
    with pytest.raises(ValueError, match=r"trace\(\) and compile\(\) don't go together"):
        engine.trace(tmp_path / "u.npz")
    assert not (tmp_path / "u.npz").exists()


def test_a_disk_that_is_full_ends_the_trace_and_not_the_run(
    engine: Any, tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    engine.trace(tmp_path / "t.npz", every=1)
    engine.step(next(iter(engine.batches())), runs.losses_of)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with caplog.at_level(logging.WARNING, "ghostclip"):
        runs.train(engine)
    assert caplog.text.count("ends here, since it can't be written: [Errno 28] No space left") == 1
    assert engine.steps_taken > 2
    assert traces.read(tmp_path / "t.npz")["step"].tolist() == [1]
