"""What can't be private under Opacus's names is refused, and names that aren't here: it is said what to do or write."""

import copy
import inspect
import pickle
from typing import Any

import private_runs as runs
import pytest
import torch
from case_models import Wired
from opacus_programs import MAX_NORM, assert_by_hand, mean_loss, private, small, train
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ghostclip
from ghostclip.compat import opacus
from ghostclip.compat.opacus import (
    BatchMemoryManager,
    DPDataLoader,
    ModuleValidator,
    PrivacyEngine,
    RDPAccountant,
    layers,
)
from ghostclip.errors import GradientLeakError, LossShapeError, PrivacyError, UnsupportedModelError


def step(model: nn.Module, optimizer: Any, batch: Any) -> None:
    optimizer.zero_grad()
    mean_loss(model, batch).backward()
    optimizer.step()


def words(**options: Any) -> Any:
    return private(PrivacyEngine(), "words", layers, **options)


def test_the_engine_goes_by_the_name_it_is_imported_under() -> None:
    engine = PrivacyEngine()
    assert repr(engine).startswith("<ghostclip.compat.opacus.PrivacyEngine object")
    assert type(pickle.loads(pickle.dumps(engine))) is PrivacyEngine
    with pytest.raises(TypeError, match=r"PrivacyEngine\.__init__\(\) got an unexpected keyword argument 'secure'"):
        PrivacyEngine(secure=True)
    with pytest.raises(TypeError, match=r"PrivacyEngine\.make_private\(\) missing 5 required keyword-only arguments"):
        engine.make_private()


def apart(model: nn.Module, optimizer: Any, batch: Any) -> None:
    """A part of the model called by itself."""
    hidden = torch.relu(model.hidden(model.embedding(batch[0]).mean(1)))
    nn.functional.cross_entropy(model.out(hidden), batch[1]).backward()


def skipped(model: nn.Module, optimizer: Any, batch: Any) -> None:
    """A signal that contradicts the batch."""
    optimizer.signal_skip_step(do_skip=True)
    mean_loss(model, batch).backward()


def penalized(model: nn.Module, optimizer: Any, batch: Any) -> None:
    """A term on the weights themselves."""
    (mean_loss(model, batch) + model.out.weight.square().sum()).backward()


@pytest.mark.parametrize(
    ("before", "error", "says"),
    [
        (lambda *_: None, PrivacyError, r"without loss\.backward\(\) of this batch"),
        (apart, PrivacyError, r"without loss\.backward\(\)"),
        (skipped, PrivacyError, "BatchMemoryManager"),
        (penalized, GradientLeakError, r"out\.weight"),
    ],
)
def test_a_step_after_something_else_than_a_backward(before: Any, error: Any, says: str) -> None:
    model, optimizer, loader = words()
    before(model, optimizer, next(iter(loader)))
    with pytest.raises(error, match=says):
        optimizer.step()


def test_a_step_outside_of_the_loop() -> None:
    model, optimizer, loader = words()
    with pytest.raises(PrivacyError, match="in a loop over the data_loader"):
        optimizer.step()
    batches = iter(loader)
    batch = next(batches)
    step(model, optimizer, batch)
    with pytest.raises(PrivacyError, match="in a loop over the data_loader"):
        step(model, optimizer, batch)


def test_a_batch_that_is_left_out() -> None:
    engine = PrivacyEngine()
    model, optimizer, loader = private(engine, "words", layers, noise_multiplier=1.0)
    batches = iter(loader)
    next(batches)
    with pytest.raises(PrivacyError, match="neither charged nor released"):
        next(batches)
    loader.discard()
    step(model, optimizer, next(iter(loader)))
    assert engine.accountant.history == [(1.0, 0.2, 2)]


def test_a_part_that_is_left_out() -> None:
    model, optimizer, loader = words(batch_size=20)
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=4, optimizer=optimizer) as parts:
        batches, before = iter(parts), runs.weights(model)
        step(model, optimizer, next(batches))
        next(batches)
        with pytest.raises(PrivacyError, match="neither charged nor released"):
            next(batches)
    assert torch.equal(runs.weights(model), before)


def test_an_exception_in_the_loop_leaves_nothing_behind() -> None:
    model, optimizer, loader = words()

    def interrupted() -> None:
        for batch in loader:
            mean_loss(model, batch).backward()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    for taken in train(loader, model, optimizer, mean_loss):
        assert_by_hand(taken, mean_loss, 8)


@pytest.mark.filterwarnings("ignore:the DataLoader's")
def test_outputs_of_an_earlier_batch() -> None:
    model, optimizer, loader = words(poisson_sampling=False)
    batches = iter(loader)
    batch = next(batches)
    earlier = mean_loss(model, batch)
    step(model, optimizer, batch)
    batch = next(batches)
    with pytest.raises(PrivacyError, match="outputs of an earlier batch"):
        (mean_loss(model, batch) + earlier).backward()


def test_a_penalty_on_the_gradient() -> None:
    model, _, loader = private(PrivacyEngine(), "images", layers)
    x, _ = next(iter(loader))
    x.requires_grad_()
    with pytest.raises(PrivacyError, match="create_graph=True"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)


@pytest.mark.parametrize(
    ("returns", "error", "says"),
    [
        (lambda outputs: outputs.square().mean(), LossShapeError, r"loss of shape \[\] that the model"),
        (lambda outputs: outputs - outputs.mean(0), UnsupportedModelError, "mix|depend"),
    ],
)
def test_outputs_that_do_not_belong_to_examples(returns: Any, error: Any, says: str) -> None:
    module, optimizer, loader = small(Wired(lambda m, x: returns(m.layer(x)), layer=nn.Linear(5, 2)))
    module(next(iter(loader))[0]).square().mean().backward()
    with pytest.raises(error, match=says):
        optimizer.step()


def test_parameters_that_moved_elsewhere() -> None:
    engine = PrivacyEngine()
    model, optimizer, loader = private(engine, "words", layers)
    list(train(loader, model, optimizer, mean_loss))
    model.load_state_dict(model.state_dict())
    with pytest.raises(PrivacyError, match="changed outside"):
        engine.get_epsilon(1e-5)
    engine.accept_parameters()
    assert engine.get_epsilon(1e-5) == float("inf")


@pytest.mark.parametrize("name", ["noise_multiplier", "max_grad_norm", "expected_batch_size", "loss_reduction"])
def test_numbers_that_charges_are_made_from_stay(name: str) -> None:
    _, optimizer, _ = words()
    with pytest.raises(AttributeError, match=r"make_private\(\) again|no setter|can't set"):
        setattr(optimizer, name, 0.0)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self) -> Any:
        yield torch.zeros(3)


def foreign_loader() -> None:
    BatchMemoryManager(data_loader=[1], max_physical_batch_size=2, optimizer=words()[1])  # type: ignore[arg-type]


def with_target_delta_0() -> None:
    model, loader = nn.Linear(3, 2), DataLoader(TensorDataset(torch.zeros(4, 3)))
    PrivacyEngine().make_private_with_epsilon(
        module=model, optimizer=torch.optim.SGD(model.parameters()), data_loader=loader, target_epsilon=1.0,
        target_delta=0, epochs=1, max_grad_norm=1.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("build", "error", "says"),
    [
        (lambda: words(loss_reduction="none"), ValueError, "loss_reduction"),
        (lambda: words(clipping="adaptive"), ValueError, "Adaptive"),
        (lambda: words(clipping="adaptive", target_unclipped_quantile=0.5), ValueError, "Adaptive"),
        (lambda: words(clipping="per_layer"), ValueError, "a list of 5 norms"),
        (lambda: words(grad_sample_mode="no_op"), ValueError, "per_example_grads"),
        (lambda: words(max_grad_norm="1"), TypeError, "^max_grad_norm must be a finite number > 0; got '1'"),
        (lambda: words(max_grad_norm=None), TypeError, "^max_grad_norm must be .* got None"),
        (lambda: words(max_grad_norm=-1), ValueError, "^max_grad_norm must be .* got -1"),
        (lambda: words(max_grad_norm=[1.0] * 5), ValueError, r'^max_grad_norm=\[.*clipping="per_layer"'),
        (lambda: words(max_grad_norm=[-1] * 5, clipping="per_layer"), ValueError, "^max_grad_norm must be .* got -1"),
        (with_target_delta_0, ValueError, r"^target_delta must be .* got 0"),
        (lambda: words()[1].__class__(None, noise_multiplier=1.0), TypeError, r"noise_multiplier; use .*make_private"),
        (lambda: DPDataLoader.from_data_loader([1]), TypeError, r"no from_data_loader; use .*make_private"),
        (lambda: RDPAccountant().get_optimizer_hook_fn, AttributeError, "each step is charged"),
        (lambda: RDPAccountant().load_state_dict(None), TypeError, r"the dict of its state_dict\(\); got None"),
        (lambda: setattr(RDPAccountant(), "history", "foo"), ValueError, r"history must be a list of \(noise.*'foo'"),
        (lambda: setattr(RDPAccountant(), "history", [(1.0, 0.1)]), ValueError, r"history must be .*1\.0, 0\.1"),
        (lambda: opacus.import_history(None, "none.ledger"), TypeError, "of an accountant is .* got None"),
        (lambda: opacus.from_opacus(None), TypeError, r"state_dict must be a dict .*; got None"),  # type: ignore[arg-type]
        (lambda: ModuleValidator.fix(None), TypeError, r"must be a torch\.nn\.Module"),  # type: ignore[arg-type]
        (lambda: words(wrap_model=False), ValueError, "same object"),
        (
            lambda: words(grad_sample_mode="ghost", criterion=nn.CrossEntropyLoss(reduction="sum")),
            ValueError,
            r"criterion\.reduction must be 'mean'.*'sum'",
        ),
        (lambda: words(max_grad_nrom=1.0), TypeError, r"make_private\(\) has no option 'max_grad_nrom'; it takes"),
        (lambda: words()[1].grad_samples, AttributeError, "per_example_grads"),
        (foreign_loader, TypeError, "make_private"),
        (lambda: PrivacyEngine(accountant="gdp"), ValueError, "central-limit"),
        (
            lambda: small(nn.Linear(5, 5), engine=PrivacyEngine(secure_mode=True), noise_generator=torch.Generator()),
            ValueError,
            "leave one out",
        ),
        (lambda: small(nn.Sequential(nn.Linear(5, 2), nn.BatchNorm1d(2))), UnsupportedModelError, "BatchNorm"),
        (lambda: small(nn.Linear(3, 2), Stream()), PrivacyError, "can't be read at random"),
    ],
)
def test_what_has_no_meaning_here(build: Any, error: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        build()


def test_noise_and_samples_that_can_be_foretold_are_charged_as_none() -> None:
    found = []
    for _ in range(2):
        engine = PrivacyEngine()
        options = {"noise_multiplier": 1.0, "noise_generator": torch.Generator().manual_seed(5)}
        model, optimizer, loader = private(engine, "words", layers, **options)
        list(train(loader, model, optimizer, mean_loss))
        found.append(runs.weights(model))
        assert engine.get_epsilon(1e-5) == float("inf")
    assert torch.equal(*found)


def test_a_copy_of_the_model_is_a_model_alone() -> None:
    model, optimizer, loader = words()
    batch = next(iter(loader))
    other = copy.deepcopy(model)
    mean_loss(other, batch).backward()
    assert all(parameter.grad is not None for parameter in other.parameters())
    assert other._module is other
    with pytest.raises(PrivacyError, match=r"without loss\.backward\(\)"):
        optimizer.step()


@pytest.mark.parametrize("way", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_a_copy_of_the_optimizer_leaves_others_as_they_are(way: Any) -> None:
    model, optimizer, loader = words()
    other = way(optimizer)
    assert type(other) is torch.optim.SGD
    assert other.state_dict() == optimizer.state_dict()
    for each in train(loader, model, optimizer, mean_loss):
        assert_by_hand(each, mean_loss, 8)


def test_what_one_accountant_counts_needs_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    first, second = PrivacyEngine(), PrivacyEngine()
    model, optimizer, loader = private(first, "words", layers, noise_multiplier=1.0)

    def again(engine: PrivacyEngine) -> list[str]:
        caplog.clear()
        found = DataLoader(loader.dataset, batch_size=8, collate_fn=loader.collate_fn)
        made = engine.make_private(module=model, optimizer=optimizer, data_loader=found, noise_multiplier=1.0,
                                   max_grad_norm=MAX_NORM)  # fmt: skip
        list(train(made[2], model, made[1], mean_loss))
        engine.detach()
        return [record.message for record in caplog.records if "another engine" in record.message]

    list(train(loader, model, optimizer, mean_loss))
    first.detach()
    assert again(first) == []
    assert first.accountant.history == [(1.0, 0.2, 10)]
    (warned,) = again(second)
    assert "accountant.load_state_dict" in warned
    second.accountant = first.accountant
    assert again(second) == []
    assert first.accountant.history == [(1.0, 0.2, 20)]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_a_scaler_of_gradients_is_refused_before_anything_is_released(kind: Any) -> None:
    engine, model = PrivacyEngine(), nn.Linear(5, 5)
    model, optimizer, loader = small(model, engine=engine, optimizer=kind(model.parameters(), lr=0.1))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(mean_loss(model, next(iter(loader)))).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(PrivacyError, match="leave it out, and use bfloat16"):
        scaler.step(optimizer)
    assert not engine.accountant.history


OPACUS_ARGUMENTS = ghostclip.PrivacyEngine.refused_names
ATTRIBUTES = {
    "get_epsilon": r"engine\.epsilon\(delta",
    "accountant": r"engine\.epsilon\(\)",
    "make_private": r"PrivacyEngine\(model, optimizer, data",
    "make_private_with_epsilon": r"PrivacyEngine\(model, optimizer, data",
    "save_checkpoint": r"engine\.save",
    "load_checkpoint": r"engine\.restore",
}


def own_engine(**options: Any) -> ghostclip.PrivacyEngine:
    return runs.engine_for(runs.network(), noise_multiplier=1.0, **options)


def clipper(**options: Any) -> None:
    ghostclip.GhostClipper(nn.Linear(3, 2), **options)


@pytest.mark.parametrize(
    ("build", "argument", "says"),
    [
        *((own_engine, name, f"no argument {name}; use {use[:8]}") for name, use in OPACUS_ARGUMENTS.items()),
        (own_engine, "target_eps", "PrivacyEngine has no argument target_eps; did you mean target_epsilon?"),
        (own_engine, "batchsize", "PrivacyEngine has no argument batchsize; did you mean batch_size?"),
        (own_engine, "foo", "unexpected keyword argument 'foo'"),
        (clipper, "max_grad_norm", "GhostClipper has no argument max_grad_norm; use clipping"),
        (clipper, "max_norm", "GhostClipper has no argument max_norm; use clipping"),
    ],
)
def test_arguments_of_others_are_refused_with_ours(build: Any, argument: str, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        build(**{argument: 1.0})


def test_what_is_named_instead_of_opacus_s_arguments_is_there() -> None:
    ours = inspect.signature(ghostclip.PrivacyEngine).parameters
    assert all(use.partition("=")[0] in ours or use.startswith("engine.epsilon(") for use in OPACUS_ARGUMENTS.values())
    with pytest.raises(TypeError, match=r"build engine = PrivacyEngine\(model, optimizer, data.*compat\.opacus"):
        ghostclip.PrivacyEngine()  # type: ignore[call-arg]


@pytest.mark.parametrize(("name", "instead"), ATTRIBUTES.items())
def test_opacus_s_attribute_of_our_engine(name: str, instead: str) -> None:
    built = own_engine()
    for owner in (built, ghostclip.PrivacyEngine):
        assert not hasattr(owner, name)
        with pytest.raises(AttributeError, match=f"no {name}; .*{instead}"):
            getattr(owner, name)
    with pytest.raises(AttributeError, match="has no attribute 'epsilons'"):
        built.epsilons  # type: ignore[attr-defined]  # noqa: B018


def imported(line: str) -> Any:
    """What a line brings in, which Opacus has with its own name in place of the package's."""
    found: dict[str, Any] = {}
    exec(line.replace("opacus", "ghostclip.compat.opacus"), found)
    return found[line.split()[-1]]


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("from opacus.utils.batch_memory_manager import BatchMemoryManager", "BatchMemoryManager"),
        ("from opacus.optimizers import DPOptimizer", "DPOptimizer"),
        ("from opacus.optimizers.optimizer import DPOptimizer", "DPOptimizer"),
        ("from opacus.data_loader import DPDataLoader", "DPDataLoader"),
        ("from opacus.validators.module_validator import ModuleValidator", "ModuleValidator"),
        ("from opacus.accountants import create_accountant", "create_accountant"),
        ("from opacus.privacy_engine import PrivacyEngine", "PrivacyEngine"),
    ],
)
def test_longer_import_lines_bring_the_same(line: str, name: str) -> None:
    assert imported(line) is getattr(opacus, name)
    assert imported("from opacus.utils import batch_memory_manager").BatchMemoryManager is BatchMemoryManager


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("from opacus import GradSampleModule", "per_example_grads"),
        ("from opacus.grad_sample import register_grad_sampler", r"none is needed.*own_layers\.md"),
        ("from opacus.accountants.utils import get_noise_multiplier", r"accounting\.noise_multiplier"),
        ("from opacus.accountants import GaussianAccountant", 'use "prv" or "rdp"'),
        ("from opacus.optimizers import AdaClipDPOptimizer", r"clipping\.Adaptive"),
        ("from opacus.optimizers import DPPerLayerOptimizer", 'clipping="per_layer"'),
        ("from opacus.schedulers import ExponentialNoise", r"clipping\.Schedule"),
        ("from opacus.schedulers import StepGradClip", r"clipping\.Schedule"),
        ("from opacus.utils.uniform_sampler import UniformWithReplacementSampler", r"make_private\(\.\.\.\) returns"),
        ("from opacus.utils.batch_memory_manager import wrap_data_loader", "use BatchMemoryManager"),
        ("from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping", 'mode="ghost"'),
        ("from opacus.distributed import DifferentiallyPrivateDistributedDataParallel", r"several_processes\.md"),
        ("from opacus.validators.errors import UnsupportedModuleError", r"catch ghostclip\.UnsupportedModelError"),
        ("from opacus.validators import register_module_fixer", r"ghostclip\.wrap\(model, replace"),
        ("from opacus.utils import nothing", "cannot import name 'nothing'"),
    ],
)
def test_names_that_are_not_here_are_told_with_ours(line: str, says: str) -> None:
    with pytest.raises(ImportError, match=says):
        imported(line)
