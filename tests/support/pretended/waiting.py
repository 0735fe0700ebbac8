"""How often the host waits for the device in a private step: once a physical batch, whatever the layers.

Run by test_pretended_cuda.py in a process of its own.
"""

import warnings

import pytest
import torch
from pretended_cuda import waits
from torch.utils.data import TensorDataset

import ghostclip
from ghostclip.bench.workloads import WORKLOADS
from ghostclip.compiled.trial import Trial
from ghostclip.graph import layouts
from ghostclip.self_check import first_steps

B = 4
POLICIES = {
    "flat": ghostclip.clipping.Flat(1.0),
    "automatic": ghostclip.clipping.Automatic(1.0),
    "per layer": ghostclip.clipping.PerLayer(1.0),
}

every_pass = pytest.mark.parametrize("second_pass", ["reweight", "cached"])


def engine_on(name: str, fused: bool = False, **options):
    """The private training of one of the benchmark's networks, its data on the device, and its losses."""
    torch.manual_seed(0)
    workload = WORKLOADS[name]
    model = workload.model().to("cuda")
    data = TensorDataset(*(column.to("cuda") for column in workload.batch(2 * B)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=fused)
    engine = ghostclip.PrivacyEngine(model, optimizer, data, batch_size=2 * B, noise_multiplier=1.0, **options)
    return engine, lambda model, batch: workload.losses(model(batch[0]), batch[1])


# The third step is neither compared nor measured: ownership is in steps 1, 2 and 4.
STEADY = 3


@pytest.fixture(autouse=True)
def nothing_at_random(monkeypatch):
    """Comparing losses and watching a batch wait, too; the first two steps are compared, and none is at random."""
    monkeypatch.setattr(first_steps, "STEPS", 2)
    monkeypatch.setattr(first_steps, "SELDOM", 10**9)
    monkeypatch.setattr(layouts, "WATCHED", 10**9)


def waited(engine, losses, steps: int) -> list[int]:
    """The waits of each step."""
    found = []
    while len(found) < steps:
        for batch in engine.batches():
            waits()
            engine.step(batch, losses)
            found.append(waits())
    return found


# Each network, and each policy on one: what a policy looks at doesn't depend on the layers.
@every_pass
@pytest.mark.parametrize(
    ("name", "policy"),
    [*((name, "flat") for name in ("mlp", "cnn", "lstm", "transformer", "embedding")),
     *(("cnn", policy) for policy in POLICIES if policy != "flat")],
)  # fmt: skip
def test_once_for_a_batch_in_one_piece(name, policy, second_pass):
    engine, losses = engine_on(name, clipping=POLICIES[policy], second_pass=second_pass)
    first, *_, last = waited(engine, losses, STEADY)
    assert last == 1
    assert first > last  # the mixing test and the plan's measurements sync in the first batch only


@every_pass
def test_once_for_each_physical_batch(second_pass):
    engine, losses = engine_on("cnn", clipping=1.0, second_pass=second_pass, max_physical_batch_size=B)
    assert waited(engine, losses, STEADY)[-1] == 2


@pytest.mark.parametrize("noise", ["standard", "hardened", "test"])
def test_a_run_is_saved_and_goes_on(noise, tmp_path):
    options = {"clipping": 1.0, "noise": noise, "seed": 7 if noise == "test" else None}
    engine, losses = engine_on("mlp", **options)
    waited(engine, losses, 2)
    engine.save(tmp_path / "saved")
    waited(engine, losses, 1)
    other, losses = engine_on("mlp", **options)
    other.restore(tmp_path / "saved")
    waited(other, losses, 1)
    pairs = list(zip(engine.model.parameters(), other.model.parameters(), strict=True))
    assert all(p.is_cuda and p.isfinite().all() for pair in pairs for p in pair)
    if noise == "test":
        assert all(torch.equal(one, same) for one, same in pairs)


@pytest.fixture
def graphs(monkeypatch):
    """How many graphs were compiled; they run as they were written down, since nothing makes kernels for the device."""
    found, note = [], Trial.note
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's, of what torch uses
        import torch._inductor.compile_fx

    def compiled(graph, inputs, **settings):
        assert {value.device.type for value in inputs} == {"cuda"}
        found.append(graph)
        return graph

    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", compiled)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: None)

    def never_slower(trial, *seen):
        reason = note(trial, *seen)
        return None if reason is not None and reason.startswith("eager is faster") else reason

    monkeypatch.setattr(Trial, "note", never_slower)
    return found


# Each pass with each of Adam's ways on one network: what the update is made of doesn't depend on the layers.
@pytest.mark.parametrize(
    ("name", "second_pass", "fused"),
    [(name, second_pass, fused) for name in ("mlp", "cnn", "lstm") for second_pass in ("reweight", "cached")
     for fused in (False, True) if name == "mlp" or fused == (second_pass == "cached")],
)  # fmt: skip
def test_a_compiled_step_is_the_eager_one_and_waits_once(name, fused, second_pass, graphs):
    ends = []
    for compiled in (False, True):
        options = {"clipping": 1.0, "second_pass": second_pass, "noise": "test", "seed": 7}
        engine, losses = engine_on(name, fused, **options)
        if compiled:
            engine.compile()
        assert waited(engine, losses, 14)[-1] == 1
        ends.append(torch.cat([p.detach().flatten() for p in engine.model.parameters()]))
    assert graphs
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-6)
