"""How other libraries lost privacy without a word: where each scenario is tested, and those that are tested here."""

from pathlib import Path

import numpy as np
import private_runs as runs
import pytest
import torch
from case_models import Wired
from comparing import assert_exact
from torch import nn
from torch.nn import functional as F

import ghostclip
from ghostclip.clipper import ClippingResult
from ghostclip.engine import StepRecord

ROOT = Path(__file__).resolve().parents[2]


# What happened elsewhere, and what happens here: the test of it.
ELSEWHERE = {
    "losses of shape [B,1], broadcast to [B,B]: refused":
        "clipper/test_clipper.py::test_losses_of_another_shape_are_refused_by_every_call",
    "a mean loss, unclipped in effect: refused":
        "engine/test_engine_guards.py::test_another_thing_in_the_loss_function_s_place",
    "a plain backward before ours, unclipped: refused":
        "engine/test_engine_guards.py::test_a_plain_backward_before_ours",
    "BatchNorm frozen in train mode, without affine, 1.02 to 2 C: refused":
        "layers/test_wrap.py::test_an_obstacle_is_found_with_its_path_and_remedy",
    "centring in a forward: refused": "engine/test_self_check.py::test_a_module_in_which_examples_meet_is_named",
    "losses that see the batch, by contrast or by weights: refused":
        "engine/test_comparison.py::test_losses_that_mix_are_refused_within_six_steps",
    "a weight used outside of its layer, padding modes, a repeated index of a bag, groups, shared layers: exact":
        "layers/test_layers.py::test_the_first_pass_equals_the_loop",
    "a layer that is not used, last batch's norm counted again: zero":
        "clipper/test_clipper.py::test_unused_parameters_answer_zero_every_time",
    "an interrupted logical batch, norm 4.6 to 6.5: discarded, its step refused":
        "engine/test_engine_guards.py::test_a_batch_left_early_is_refused_with_how_many_parts_ran",
    "NaN or inf in one example, all parameters NaN: it contributes zero, the others as ever":
        "clipper/test_nonfinite.py::test_a_spoilt_input_contributes_zero",
    "a parameter unused in a step, without noise: zero-filled first":
        "engine/test_engine.py::test_parameters_without_a_gradient_get_noise",
    "GradScaler with a fused optimizer, noise 1024x too small: refused":
        "engine/test_engine_arguments.py::test_a_grad_scaler_is_refused",
    "Gram norms of near-constant inputs, 11% off: a test for cancellation, then the direct form":
        "clipper/test_clipper.py::test_near_constant_inputs_do_not_cancel",
    "shuffled or fixed-size batches accounted as Poisson: drawn here":
        "privacy/test_sampling.py::test_sizes_are_binomial_and_empty_batches_come_at_their_rate",
    "other samplers accounted as Poisson: refused":
        "privacy/test_sampling.py::test_other_samplers_are_refused_with_a_remedy",
    "dividing by the realised batch size: the denominator is `batch_size`":
        "privacy/test_engine_sampling.py::test_sums_are_divided_by_the_public_size_under_every_sampling",
    "an empty Poisson batch skipped: a step of noise alone, charged":
        "engine/test_engine.py::test_an_empty_batch_is_a_step_of_noise_and_is_charged",
    "an older checkpoint loaded, 100 steps forgotten: every charge ever made counts":
        "privacy/test_engine_checkpoint.py::test_an_older_checkpoint_never_lowers_what_was_spent",
    "the accountant reset by a new process: the ledger counts for whoever opens it":
        "privacy/test_engine_ledger.py::test_epsilon_is_of_everything_in_the_ledger",
    "the same seed after resume, identical noise twice: fresh entropy":
        "privacy/test_engine_checkpoint.py::test_redone_steps_draw_fresh_samples_and_noise",
    "seeds that report a finite epsilon: infinity":
        "engine/test_engine.py::test_epsilon_is_infinite_without_private_noise",
    "a fresh generator with a constant seed in every process: seeded from the system, anew after a fork":
        "privacy/test_noise.py::test_a_fork_does_not_repeat_its_parents_noise",
    "noise and clipping read different bounds, noise 10x too small: one owner, the result's sensitivity":
        "engine/test_engine.py::test_noise_follows_the_largest_sensitivity_of_a_batch",
    "noise drawn on every physical batch: once a logical step":
        "engine/test_engine.py::test_noise_has_its_standard_deviation_and_comes_once_a_step",
    "adaptive clipping not charged: charged as one joint release":
        "clipper/test_adaptive.py::test_a_step_is_charged_as_both_releases",
    "epsilon of NaN sigma is 0: validated first": "privacy/test_accounting.py::test_values_out_of_range_are_named",
    "accountant reset by hand, a record of another ledger: the chain of hashes breaks":
        "privacy/test_ledger_damage.py::test_damage_is_refused_with_its_place_and_what_to_do",
    "pickle in checkpoints runs code: JSON and raw tensors only":
        "privacy/test_checkpoint.py::test_nothing_is_unpickled",
}  # fmt: skip


@pytest.mark.parametrize("row", ELSEWHERE)
def test_a_row_has_its_test(row):
    file, _, name = ELSEWHERE[row].partition("::")
    assert f"def {name}(" in (ROOT / "tests" / file).read_text()


def whole(model: nn.Module, loss_fn=runs.losses_of, dataset=None, steps: int = 1, **options) -> ghostclip.PrivacyEngine:
    """An engine after steps of the whole data set."""
    dataset = runs.data(6) if dataset is None else dataset
    engine = runs.engine_for(model, None, dataset, **{"batch_size": len(dataset), "clipping": 1.0, **options})
    for _ in range(steps):
        engine.step(next(iter(engine.batches())), loss_fn)
    return engine


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


def test_an_output_changed_in_place():
    """in-place op on a layer's output that is a view: norm 0, unclipped; exact, as for linear and recurrent layers"""
    layer = nn.MultiheadAttention(5, 1, batch_first=True)
    model = Wired(lambda m, x: m.layer(x, x, x)[0].mul_(2).relu_(), layer=layer)
    assert_exact(model.double(), torch.randn(3, 4, 5).double())


def test_samples_are_never_the_same_again():
    """the same seed after resume: nor do seeds of numpy and torch repeat the sampling"""
    drawn = []
    for _ in range(2):
        np.random.seed(5)
        torch.manual_seed(5)
        engine = whole(nn.Linear(5, 3), dataset=runs.data(400), batch_size=200, steps=0)
        drawn.append([sum(batch.sizes) for _ in range(8) for batch in engine.batches() if not runs.leave(engine)])
    assert drawn[0] != drawn[1]


def test_what_a_step_returns_is_called_private():
    """early stopping and best-of-n on private metrics: spent, never charged; said where users look"""
    for text in (StepRecord.__doc__, ClippingResult.__doc__, ghostclip.PrivacyEngine.step.__doc__):
        assert "rivate data" in text
    model = nn.Linear(5, 3)
    record = runs.train(runs.engine_for(model), steps=1)[0]
    result = ghostclip.GhostClipper(model).backward(runs.losses_of(model, runs.data(8)[:]))
    assert repr(record) == "StepRecord(losses, norms, weights: private data of single examples)"
    assert repr(result) == "ClippingResult(sensitivity=1; norms, weights: private data of single examples)"
    assert "early stopping" in (ROOT / "SECURITY.md").read_text()
