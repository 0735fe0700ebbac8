"""A default device (`torch.set_default_device`) where the model isn't: nothing of ours is made there.

What is made on the meta device has no values: whatever came into a computation from there would end in an error.
"""

import pytest
import torch
from comparing import every_pass, gradients
from private_runs import data, engine_for, losses_of, network, weights

import ghostclip
from ghostclip import PrivacyEngine, nn
from ghostclip.bench.workloads import WORKLOADS

POLICIES = {"flat": 0.5, "per layer": ghostclip.clipping.PerLayer(0.5)}
ELSEWHERE = torch.device("meta")


@every_pass
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["cnn", "lstm", "transformer"])
@pytest.mark.one_in(3)
def test_clipped_sums_are_the_same(name, policy, second_pass):
    workload = WORKLOADS[name]
    model, (inputs, targets) = workload.model(), workload.batch(4)
    clipper = ghostclip.GhostClipper(model, POLICIES[policy], second_pass=second_pass)
    sums = []
    for device in (ELSEWHERE, torch.device("cpu")):
        with device:
            clipper.backward(workload.losses(model(inputs), targets))
        sums.append({name: grad.clone() for name, grad in gradients(model).items()})
        model.zero_grad()
    torch.testing.assert_close(*sums, rtol=1e-4, atol=1e-6)


def an_epoch(engine: PrivacyEngine) -> None:
    # torch's DataLoader draws a seed on the default device as it begins, and looks at it.
    for batch in engine.batches():
        with ELSEWHERE:
            engine.step(batch, losses_of)


def test_norms_gradients_and_the_loop():
    model, (inputs, targets) = network(), data().tensors
    clipper = ghostclip.GhostClipper(model, 0.5)
    with ELSEWHERE:
        for per in ("layer", "parameter"):
            clipper.norms(losses_of(model, [inputs, targets]), per=per)
        grads = clipper.per_example_grads(losses_of(model, [inputs, targets]))
        assert clipper.verify(losses_of, [inputs, targets]) < 1e-4
    assert all(grad.device.type == "cpu" for grad in grads.values())


@pytest.mark.parametrize("noise", ["standard", "hardened", "test"])
def test_a_run_is_saved_and_goes_on(noise, tmp_path):
    options = {"noise_multiplier": 1.0, "clipping": 0.5, "noise": noise, "seed": 7 if noise == "test" else None}
    ends = []
    for place in range(2):
        model = network()
        engine = engine_for(model, max_physical_batch_size=4, dataset=data(), **options)
        if not place:
            an_epoch(engine)
        with ELSEWHERE:
            engine.restore(tmp_path / "saved") if place else engine.save(tmp_path / "saved")
        before = weights(model)
        an_epoch(engine)
        assert weights(model).isfinite().all()
        assert not torch.equal(weights(model), before)
        ends.append(weights(model))
    if noise == "test":
        assert torch.equal(*ends)


def test_recurrent_cells_without_a_state():
    cell, x = nn.LSTMCell(3, 4), torch.randn(2, 3)
    clipper = ghostclip.GhostClipper(cell, 1.0)
    with ELSEWHERE:
        result = clipper.backward(cell(x)[0].sum(1))
    assert result.norms.device.type == "cpu"
