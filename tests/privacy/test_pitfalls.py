"""How other libraries lost privacy without a word, each scenario in small: here it is exact, charged, or refused.

One test a row of that list, in its order. Of the crashes that users of others report, most are cases elsewhere: 4-D
inputs, in-place activations, keyword calls, masks, proj_size and lookups of positions in test_layers.py and
test_broadcast.py; unused layers in test_clipper_guards.py; adapters, generate and the Trainer in test_real_models.py;
checkpointing and half precision in test_modes.py; compiled steps in test_compiled.py; bare Parameters in
test_fallback.py; resuming in test_engine_checkpoint.py; adapters trained to nothing in test_self_check.py.
"""

import os
import pickle
from pathlib import Path

import numpy as np
import oracle
import paired
import private_runs as runs
import pytest
import torch
from case_models import Wired
from case_types import project
from cases import case
from comparing import assert_dicts_close, gradients, typical_norm
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, WeightedRandomSampler

import ghostclip
from ghostclip import (
    GradientLeakError,
    LedgerError,
    LossShapeError,
    PrivacyError,
    UnsupportedModelError,
    VerificationError,
)
from ghostclip.clipper import ClippingResult
from ghostclip.clipping import Adaptive
from ghostclip.engine import StepRecord
from ghostclip.events import SampledGaussian
from ghostclip.ledger import Ledger
from ghostclip.noise import noise_source

EXACT = 1e-10
ROOT = Path(__file__).resolve().parents[2]


def exact(model: nn.Module, inputs: tuple, batch_dims: list | None = None) -> None:
    """Norms and clipped sums are the loop's."""
    expected = oracle.per_example_grads(model, project, inputs, batch_dims)
    clipper = ghostclip.GhostClipper(ghostclip.wrap(model), bound := typical_norm(expected))
    result = clipper.backward(project(model(*inputs)))
    torch.testing.assert_close(result.norms, oracle.norms(expected), rtol=EXACT, atol=0)
    assert_dicts_close(gradients(model), oracle.clipped_sum(expected, bound), EXACT)


def whole(model: nn.Module, loss_fn=runs.losses_of, dataset=None, steps: int = 1, **options) -> ghostclip.PrivacyEngine:
    """An engine after steps of the whole data set."""
    dataset = runs.data(6) if dataset is None else dataset
    engine = runs.engine_for(model, None, dataset, **{"batch_size": len(dataset), "clipping": 1.0, **options})
    for _ in range(steps):
        engine.step(next(iter(engine.batches())), loss_fn)
    return engine


def test_losses_of_one_column():
    """losses of shape [B,1]: broadcast to [B,B] elsewhere; refused unless exactly [B]"""
    with pytest.raises(LossShapeError, match="exactly"):
        whole(nn.Linear(5, 1), lambda m, b: F.mse_loss(m(b[0]), b[0][:, :1], reduction="none"))


def test_a_mean_loss():
    """a criterion that ignores `reduction`, a mean loss: unclipped in effect; refused"""
    with pytest.raises(LossShapeError, match="reduction"):
        whole(runs.network(), lambda m, b: F.cross_entropy(m(b[0]), b[1]))


def test_a_plain_backward():
    """plain `loss.backward()` then `step()`: unclipped gradients; GradientLeakError"""
    engine = whole(runs.network(), steps=0)
    examples = next(next(iter(engine.batches())).physical())
    runs.losses_of(engine.model, examples).mean().backward()
    with pytest.raises(GradientLeakError):
        engine.backward(runs.losses_of(engine.model, examples))


def test_noise_follows_the_bound_that_was_clipped_at():
    """noise and clipping read different C: noise 10x too small; one owner, the result's sensitivity"""
    engine = whole(runs.network(), noise_multiplier=2.0, noise="test", seed=3, clipping=Adaptive(1.0), steps=0)
    stds = []
    release = engine._steps.release._noise.release
    engine._steps.release._noise.release = lambda sums, std, by: stds.append(std) or release(sums, std, by)
    for bound in (1.0, 7.0):
        engine.clipping.max_norm = bound
        engine.step(next(iter(engine.batches())), runs.losses_of)
    assert stds[1] / stds[0] == pytest.approx(7.0, rel=0.2)


def contrasted(model: nn.Module, batch: list) -> torch.Tensor:
    hidden = model(batch[0])
    return (hidden @ hidden.T).logsumexp(1)


class Centred(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(5), nn.BatchNorm1d(5, affine=False), Centred()])
def test_layers_in_which_examples_meet(layer):
    """BatchNorm frozen but in train mode, without affine, centring in forward: 1.02 to 2 C; refused"""
    with pytest.raises((UnsupportedModelError, VerificationError)):
        whole(nn.Sequential(layer.requires_grad_(False), nn.Linear(5, 3)))


def weighted(model: nn.Module, batch: list) -> torch.Tensor:
    return runs.losses_of(model, batch) * F.softmax(batch[0].sum(1), 0)


@pytest.mark.parametrize("loss_fn", [contrasted, weighted])
def test_losses_in_which_examples_meet(loss_fn):
    """in-batch contrastive loss, loss weights normalised by the batch: refused at the first batch"""
    with pytest.raises((UnsupportedModelError, VerificationError)):
        whole(runs.network(), loss_fn)


def test_a_weight_used_outside_of_its_layer():
    """weight used outside its layer: 1.38 C; exact"""
    tied = Wired(lambda m, i: F.linear(torch.tanh(m.e(i)), m.e.weight), e=nn.Embedding(6, 4)).double()
    exact(tied, (torch.randint(6, (4, 3)),))


def test_a_layer_that_is_not_used():
    """layer not used this batch: last batch's norm counted again; zero"""
    model = Wired(lambda m, x: m.a(x) if len(x) == 4 else m.b(x), a=nn.Linear(5, 2), b=nn.Linear(5, 2)).double()
    clipper = ghostclip.GhostClipper(model)
    for size, unused in ((4, "b"), (3, "a")):
        norms = clipper.norms(project(model(torch.randn(size, 5).double())), per="layer")
        assert not norms[unused].any()
        assert norms["ab".replace(unused, "")].all()


def test_an_interrupted_batch():
    """interrupted logical batch: released norm 4.6 to 6.5, ledger unaware; discarded, its step refused"""
    engine = whole(runs.network(), steps=0, max_physical_batch_size=2)
    for examples in next(iter(engine.batches())).physical():
        engine.backward(runs.losses_of(engine.model, examples))
        break
    assert all(parameter.grad is None for parameter in engine.model.parameters())
    with pytest.raises(PrivacyError, match="after 1 of the 3"):
        engine.optimizer.step()
    assert engine.steps_taken == 0


@pytest.mark.one_in(3)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize(
    "name",
    ["linear", "conv2d plain", "bare einsum", "bare distances", "bare layer_norm", "own gate", "whole transformer"],
)
def test_one_bad_example(name, bad, monkeypatch):
    """NaN/Inf in one example: all parameters NaN; it contributes zero, the others as ever"""
    pair = paired.Pair(case(name), torch.float32)
    monkeypatch.setitem(paired.ADVERSARIES, "bad", lambda x: torch.full_like(x, bad))
    for second_pass in paired.SECOND_PASSES:
        assert pair.ratio(pair.clipper("flat", second_pass), "bad") <= 1.00001


@pytest.mark.parametrize("autocast", [True, False])
def test_narrow_types(autocast):
    """bf16/fp16 norms: norm/C up to 1.01, sums of many examples far off; sums in float32, norms too"""
    dtype = torch.float32 if autocast else torch.bfloat16
    data = [torch.randn(1, 5).to(dtype).expand(600, -1).contiguous(), torch.zeros(600, dtype=torch.long)]
    moved = []
    for count in (600, 599):
        model = nn.Sequential(nn.Linear(5, 3)).to(dtype)
        nn.init.constant_(model[0].weight, 0.3)
        nn.init.constant_(model[0].bias, 0.1)
        engine = runs.engine_for(model, None, torch.utils.data.TensorDataset(*[d[:count] for d in data]),
                                 batch_size=count, clipping=0.01, self_check=False)  # fmt: skip
        sums = []
        release = engine._steps.release._noise.release
        engine._steps.release._noise.release = lambda found, std, by, s=sums, r=release: (
            s.extend(each.clone() for each in found) or r(found, std, by)
        )
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            engine.step(
                next(iter(engine.batches())), lambda m, b: F.cross_entropy(m(b[0]).float(), b[1], reduction="none")
            )
        moved.append(torch.cat([each.flatten() for each in sums]).double())
    # It is clipped, so its share is the bound: no less either, which rounding would hide behind.
    assert float((moved[0] - moved[1]).norm()) / 0.01 == pytest.approx(1.0, rel=2e-3)


@pytest.mark.parametrize(
    "layer", [nn.Linear(5, 5), nn.LSTM(5, 5, batch_first=True), nn.MultiheadAttention(5, 1, batch_first=True)]
)
def test_an_output_changed_in_place(layer):
    """in-place op on a layer's output that is a view: norm 0, unclipped; exact"""

    def wiring(m, x):
        out = m.layer(x, x, x) if isinstance(layer, nn.MultiheadAttention) else m.layer(x)
        out = out[0] if isinstance(out, tuple) else out
        return out.mul_(2).relu_()

    exact(Wired(wiring, layer=layer).double(), (torch.randn(3, 4, 5).double(),))


def test_an_unused_parameter_gets_noise():
    """parameter unused in a step: optimizers skip None, no noise; zero-filled first"""
    model = runs.network()
    model.unused = nn.Linear(3, 3)
    before = model.unused.weight.detach().clone()
    model.forward = lambda x: model[2](model[1](model[0](x)))
    whole(model, noise_multiplier=1.0)
    assert (model.unused.weight != before).all()


def test_a_scaler_unknown_to_the_engine():
    """GradScaler with a fused optimizer: noise 1024x too small; refused unless the engine knows it"""
    engine = whole(runs.network(), steps=0)
    engine.optimizer.grad_scale = torch.tensor(1024.0)
    runs.gather(engine, next(iter(engine.batches())))
    with pytest.raises(PrivacyError, match="GradScaler"):
        engine.optimizer.step()


def test_nearly_constant_inputs():
    """Gram norms of near-constant inputs in float32: 11% off; a test for cancellation, then the direct form"""
    model = nn.Linear(8, 6, bias=False)
    x, c = 1.0 + 4e-4 * torch.randn(2, 256, 8), torch.randn(2, 256, 6)
    c -= c.mean(1, keepdim=True)
    found = ghostclip.GhostClipper(model, norm_strategy="gram").norms((model(x) * c).sum((1, 2)))
    expected = torch.einsum("btp,btd->bpd", c.double(), x.double()).flatten(1).norm(dim=1)
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_padding_modes(mode):
    """conv `padding_mode` other than zeros: norm down to 0.74 of the truth; exact"""
    exact(nn.Conv2d(2, 3, 3, padding=1, padding_mode=mode).double(), (torch.randn(3, 2, 4, 4).double(),))


def test_a_bag_with_a_repeated_index():
    """EmbeddingBag with a repeated index: gradient row 1.0 instead of 2.0; exact"""
    exact(nn.EmbeddingBag(4, 3, mode="sum").double(), (torch.tensor([[1, 1, 1], [0, 2, 2]]),))


def test_groups_and_shared_layers():
    """grouped conv, shared Linear: relative error up to 1.4; exact"""
    exact(nn.Conv1d(4, 4, 3, groups=2).double(), (torch.randn(3, 4, 6).double(),))
    shared = nn.Linear(5, 5)
    exact(nn.Sequential(shared, nn.Tanh(), shared).double(), (torch.randn(3, 5).double(),))


def test_other_samplers():
    """shuffled or fixed-size batches accounted as Poisson: up to 4x too little; drawn here, others refused"""
    engine = whole(runs.network(), dataset=runs.data(40), batch_size=20, steps=0)
    sizes = set()
    for _ in range(15):
        for batch in engine.batches():
            sizes.add(sum(batch.sizes))
            batch.discard()
    assert len(sizes) > 3
    with pytest.raises(PrivacyError, match="WeightedRandomSampler"):
        runs.engine_for(runs.network(), None, DataLoader(runs.data(), 4, sampler=WeightedRandomSampler([1.0] * 24, 24)))


def test_the_divisor_is_public():
    """dividing by the realised or floored batch size: leaks N; the denominator is `batch_size`"""
    model = runs.network()
    engine = runs.engine_for(model, None, runs.data(30), batch_size=7, clipping=1e-3)
    divisors = []
    release = engine._steps.release._noise.release
    engine._steps.release._noise.release = lambda sums, std, by: divisors.append(by) or release(sums, std, by)
    for batch in engine.batches():
        engine.step(batch, runs.losses_of)
    assert set(divisors) == {7}


def test_an_empty_batch():
    """empty Poisson batch skipped; a step of noise alone, charged"""
    engine = runs.engine_for(model := runs.network(), None, runs.data(3), batch_size=1, noise_multiplier=1.0)
    while (batch := next(iter(engine.batches()))).sizes:
        runs.leave(engine)
    before = runs.weights(model)
    engine.step(batch, runs.losses_of)
    assert (runs.weights(model) != before).all()
    assert engine.steps_taken == 1


def test_an_older_checkpoint(tmp_path):
    """accountant reset by loading an older checkpoint: 100 steps forgotten; every charge ever made counts"""
    engine = whole(runs.network(), noise_multiplier=1.0)
    engine.save(tmp_path / "run")
    for _ in range(2):
        engine.step(next(iter(engine.batches())), runs.losses_of)
    spent = engine.epsilon()
    engine.restore(tmp_path / "run")
    assert engine.steps_taken == 3
    assert engine.epsilon() == spent


def test_a_ledger_outlives_its_engines(tmp_path):
    """accountant reset (by a new process): the ledger's charges count for whoever opens it"""
    for taken in (1, 2):
        engine = whole(runs.network(), noise_multiplier=1.0, ledger=tmp_path / "spent.ledger")
        assert sum(event.count for event in engine.events) == taken
        engine.detach()


def test_a_record_of_another_ledger(tmp_path):
    """accountant reset (by hand): a record can't be exchanged, even for one that is whole and as old"""
    event, lines = SampledGaussian(0.1, 1.0), []
    for name in ("mine", "theirs"):
        account = Ledger(tmp_path / name, block=1).account()
        for _ in range(3):
            account.charge(event)
        account.close()
        lines.append((tmp_path / name).read_bytes().splitlines(keepends=True))
    (tmp_path / "copied").write_bytes(b"".join([*lines[0][:2], lines[1][2], *lines[0][3:]]))
    with pytest.raises(LedgerError):
        _ = Ledger(tmp_path / "copied").events


def test_noise_is_never_the_same_again(tmp_path):
    """the same seed after resume: identical noise twice; fresh entropy, and seeds report epsilon = infinity"""
    finished = []
    for _ in range(2):
        torch.manual_seed(5)
        np.random.seed(5)
        model = runs.network()
        engine = whole(model, noise_multiplier=1.0, steps=0)
        (engine.restore if finished else engine.save)(tmp_path / "run")
        engine.step(next(iter(engine.batches())), runs.losses_of)
        finished.append(runs.weights(model))
    assert (finished[0] != finished[1]).all()
    assert whole(runs.network(), noise_multiplier=1.0, noise="test", seed=1).epsilon() == float("inf")


def test_samples_are_never_the_same_again():
    """the same seed after resume: nor do seeds of numpy and torch repeat the sampling"""
    drawn = []
    for _ in range(2):
        np.random.seed(5)
        torch.manual_seed(5)
        engine = whole(nn.Linear(5, 3), dataset=runs.data(400), batch_size=200, steps=0)
        drawn.append([sum(batch.sizes) for _ in range(8) for batch in engine.batches() if not runs.leave(engine)])
    assert drawn[0] != drawn[1]


def test_noise_in_two_processes():
    """fresh `torch.Generator()`: constant seed in every process; seeded from the system, anew after a fork"""
    source, zeros = noise_source(), [torch.zeros(8)]
    source.release(zeros, 1.0)
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.write(writing, pickle.dumps(source.release(zeros, 1.0)[0].tolist()))
        os._exit(0)
    theirs = pickle.loads(os.read(reading, 4096))
    os.wait()
    os.close(reading)
    os.close(writing)
    assert not set(theirs) & set(source.release(zeros, 1.0)[0].tolist())


def test_noise_once_for_all_physical_batches():
    """noise scaled wrongly or drawn on every microbatch: sqrt(G) off; once per logical step"""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 2000))
    engine = whole(
        model, lambda m, b: 0 * m(b[0]).sum(1), noise_multiplier=3.0, clipping=0.5, steps=0, max_physical_batch_size=1
    )
    before = runs.weights(model)
    engine.step(next(iter(engine.batches())), lambda m, b: 0 * m(b[0]).sum(1))
    std = float((runs.weights(model) - before).std()) / 0.5  # the learning rate
    assert std == pytest.approx(3.0 * 0.5 / 6, rel=0.05)
    assert engine._steps.release._noise.draws == 1


def test_adaptive_clipping_is_charged():
    """adaptive clipping not charged: charged as one joint release"""
    fixed, adaptive = (whole(runs.network(), noise_multiplier=1.0, clipping=c, dataset=runs.data(40)).epsilon()
                       for c in (1.0, Adaptive(1.0, count_noise=1.0)))  # fmt: skip
    assert adaptive > fixed


def test_what_a_step_returns_is_called_private():
    """early stopping and best-of-n on private metrics: spent, never charged; said where users look"""
    for text in (StepRecord.__doc__, ClippingResult.__doc__, ghostclip.PrivacyEngine.step.__doc__):
        assert "rivate data" in text
    assert "early stopping" in (ROOT / "SECURITY.md").read_text()


@pytest.mark.parametrize("sigma", [float("nan"), float("inf"), -1.0])
def test_noise_that_is_no_number(sigma):
    """epsilon of NaN sigma is 0: validated first"""
    with pytest.raises(ValueError, match=r"^noise_multiplier must be"):
        ghostclip.accounting.epsilon(noise_multiplier=sigma, sample_rate=0.1, steps=1, delta=1e-5)
    with pytest.raises(ValueError, match=r"^noise_multiplier must be"):
        whole(runs.network(), noise_multiplier=sigma)


def test_checkpoints_run_no_code(tmp_path):
    """pickle in checkpoints: code execution; JSON and raw tensors only"""
    engine = whole(runs.network(), noise_multiplier=1.0)
    engine.save(tmp_path / "run")
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {path.suffix for path in files} <= {".json", ".safetensors"}
    assert not any(b"\x80\x04" in path.read_bytes()[:8] for path in files)
    for module in (ROOT / "ghostclip" / "checkpoint").glob("*.py"):
        assert "import pickle" not in module.read_text()
        assert "torch.load" not in module.read_text()
