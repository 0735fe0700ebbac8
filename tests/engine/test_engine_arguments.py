"""What an engine is built of and attached to: optimizers, models, settings and hooks that it must refuse."""

import copy
import io

import private_runs as runs
import pytest
import torch
from torch import nn

import ghostclip
from ghostclip import PrivacyError, UnsupportedModelError
from ghostclip.clipping import PerLayer
from ghostclip.engine import PrivacyEngine


@pytest.fixture
def model():
    return runs.network()


@pytest.fixture
def engine(model):
    return runs.engine_for(model, noise_multiplier=1.0, clipping=1.0, max_physical_batch_size=2)


@pytest.mark.parametrize("name", sorted(PrivacyEngine.fixed_names))
def test_settings_are_not_changed_afterwards(engine, name):
    before = getattr(engine, name)
    with pytest.raises(AttributeError, match=rf"{name} of a PrivacyEngine can't be changed.*build a new engine"):
        setattr(engine, name, 5.0)
    assert getattr(engine, name) is before


@pytest.mark.parametrize("name", ["max_physical_batch_size", "self_check", "unit_ids", "sigma", "max_grad_norm"])
def test_what_an_engine_was_built_with_is_not_set_afterwards(engine, name):
    with pytest.raises(AttributeError, match=rf"{name} of a PrivacyEngine can't be set: noise and charges"):
        setattr(engine, name, 5)


class Named(PrivacyEngine):
    def __init__(self, *args, run_name, **options):
        super().__init__(*args, **options)
        self.run_name = run_name


def test_a_subclass_has_attributes_of_its_own(model):
    engine = Named(
        model, torch.optim.SGD(model.parameters()), runs.data(), batch_size=8, noise_multiplier=1.0, run_name="a"
    )
    assert engine.run_name == "a"


@pytest.mark.parametrize("unscale_first", [False, True])
@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}])
def test_a_grad_scaler_is_refused(model, options, unscale_first):
    optimizer = torch.optim.Adam(model.parameters(), **options)
    engine = runs.engine_for(model, optimizer, noise_multiplier=1.0, max_physical_batch_size=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))
    runs.gather(engine, next(runs.nonempty(engine)))
    if unscale_first:
        scaler.unscale_(optimizer)
    runs.assert_refused(
        engine, PrivacyError, r"a GradScaler called this step.*Call optimizer\.step\(\) itself",
        lambda: scaler.step(optimizer),
    )  # fmt: skip
    engine.detach()
    assert optimizer.__dict__.get("_step_supports_amp_scaling", False) is ("fused" in options)


def test_a_second_engine_on_one_optimizer(engine, model):
    with pytest.raises(PrivacyError, match=r"another PrivacyEngine is attached.*detach\(\)"):
        runs.engine_for(model, engine.optimizer)
    engine.detach()
    runs.train(second := runs.engine_for(model, engine.optimizer, noise_multiplier=1.0), 1)
    assert (engine.steps_taken, second.steps_taken) == (0, 1)


def test_detaching_leaves_an_ordinary_optimizer(engine, model):
    runs.gather(engine, next(runs.nonempty(engine)))
    engine.detach()
    assert all(p.grad is None for p in model.parameters())
    runs.plain_backward(model)
    gradient, before = runs.grads(model).clone(), runs.weights(model)
    engine.optimizer.step()
    torch.testing.assert_close(runs.weights(model), before - 0.5 * gradient)
    with pytest.raises(PrivacyError, match="this engine was detached"):
        engine.batches()


def test_parameters_of_another_model_that_the_optimizer_gets_later(engine, model):
    batch = next(runs.nonempty(engine))
    engine.optimizer.add_param_group({"params": nn.Linear(2, 7).parameters()})
    runs.gather(engine, batch)
    with pytest.raises(PrivacyError, match=r"parameter of shape \[7, 2\] \(group 1\) that the model doesn't own"):
        engine.optimizer.step()
    assert engine.steps_taken == 0


def built(model, optimizer=None, data=None, **options):
    return runs.engine_for(model, optimizer, data, **options)


def stepped_with(model, batch, loss_fn=runs.losses_of):
    runs.engine_for(model).step(batch, loss_fn)


def first_batch(model):
    return next(iter(runs.engine_for(model).batches()))


COLUMNS = torch.zeros(24, 5), torch.zeros(24)
NO_MODULE = r"model must be a torch\.nn\.Module; got function"
# Calls with something that isn't what they take.
WRONG = {
    "a model without values": (lambda m: built(m.to("meta")), ValueError, r"0\.weight is on the meta device"),
    "SparseAdam": (
        lambda m: built(m, torch.optim.SparseAdam(m.parameters())), PrivacyError, "SparseAdam takes sparse gradients",
    ),
    "LBFGS": (lambda m: built(m, torch.optim.LBFGS(m.parameters())), PrivacyError, "LBFGS evaluates the loss several"),
    "parameters of another model": (
        lambda m: built(m, torch.optim.SGD([*m.parameters(), *nn.Linear(2, 7).parameters()], lr=0.1)),
        PrivacyError, r"parameter of shape \[7, 2\] \(group 0\) that the model doesn't own",
    ),
    "no optimizer": (lambda m: built(m, {}), TypeError, r"optimizer must be a torch\.optim\.Optimizer; got dict"),
    "several optimizers": (
        lambda m: built(m, [torch.optim.SGD(m[place].parameters(), lr=0.1) for place in (0, 2)]),
        TypeError, "got list: build one optimizer, with a parameter group for each",
    ),
    "all frozen": (lambda m: built(m.requires_grad_(False)), ValueError, "no trainable parameter"),
    "a misspelt name": (lambda m: built(m, noise_multiplyer=1.0), TypeError, "noise_multiplyer"),
    "a class": (lambda m: built(m, clipping=PerLayer), TypeError, "clipping is the class PerLayer itself"),
    "a number as text": (
        lambda m: built(m, noise_multiplier="1"), TypeError, "^noise_multiplier must be .*; got '1' of type str",
    ),
    "a truth value": (lambda m: built(m, batch_size=True), TypeError, "^batch_size must be .*; got True of type bool"),
    "a text as a flag": (
        lambda m: built(m, self_check="no"), TypeError, "^self_check must be True or False; got 'no'",
    ),
    "a text as a clipper's flag": (
        lambda m: ghostclip.GhostClipper(m, compile="yes"), TypeError, "^compile must be True or False; got 'yes'",
    ),
    "noise of a name": (lambda m: built(m).noise_std("0.weight"), ValueError, "takes a parameter .*; got str"),
    "a tuple of tensors": (
        lambda m: built(m, data=COLUMNS),
        TypeError, r"tuple of 2 tensors \(\[24, 5\], \[24\]\).*TensorDataset\(inputs, targets\)",
    ),
    "a list of tensors": (lambda m: built(m, data=[*COLUMNS]), TypeError, "list of 2 tensors"),
    "a tuple of arrays": (
        lambda m: built(m, data=tuple(each.numpy() for each in COLUMNS)),
        TypeError, r"tuple of 2 ndarrays \(\[24, 5\], \[24\]\).*for arrays after torch\.as_tensor",
    ),
    "a group of processes that aren't there": (
        lambda m: built(m, process_group="nccl"), ValueError, "this one is alone; .* leave process_group out",
    ),
    "a data set as a batch": (
        lambda m: ghostclip.check(m, runs.losses_of, runs.data(4)),
        TypeError, r"batch must be.*got TensorDataset: give DataLoader\(dataset\)",
    ),
    "an iterator as a batch": (
        lambda m: ghostclip.check(m, runs.losses_of, iter(torch.utils.data.DataLoader(runs.data(4)))),
        TypeError, r"batch must be.*Iter: give DataLoader\(dataset\)",
    ),
    "a loop over the engine": (lambda m: iter(built(m)), TypeError, r"write `for batch in engine\.batches\(\)`"),
    "swapped": (lambda m: stepped_with(m, runs.losses_of, []), PrivacyError, r"got function first: are they swapped\?"),
    "a physical batch": (
        lambda m: stepped_with(m, COLUMNS), PrivacyError, r"got tuple first: call it once .* for each physical",
    ),
    "a loader's batch": (
        lambda m: stepped_with(m, [*COLUMNS]),
        PrivacyError, r"not one of a DataLoader of yours.*for batch in engine\.batches\(\)",
    ),
    "a logical batch unpacked": (
        lambda m: [*first_batch(m)],
        TypeError, r"can't be unpacked.*engine\.step\(batch, loss_fn\).*batch\.physical\(\)",
    ),
    "a logical batch indexed": (
        lambda m: first_batch(m)[0], TypeError, r"unpacked or indexed.*: hand it to engine\.step\(batch, loss_fn\)",
    ),
    "no model of wrap": (lambda _: ghostclip.wrap(runs.data), TypeError, NO_MODULE),
    "no model of unwrap": (lambda _: ghostclip.unwrap(runs.data), TypeError, NO_MODULE),
    "no model of check": (lambda _: ghostclip.check(runs.data), TypeError, NO_MODULE),
    "no model of a clipper": (lambda _: ghostclip.GhostClipper(runs.data), TypeError, NO_MODULE),
    "no model of an engine": (
        lambda m: PrivacyEngine(runs.data, torch.optim.SGD(m.parameters()), runs.data()), TypeError, NO_MODULE,
    ),
}  # fmt: skip


def test_after_a_wrong_argument_the_optimizer_is_free(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="self_check must be"):
        runs.engine_for(model, optimizer, self_check="no")
    assert runs.engine_for(model, optimizer) is not None


@pytest.mark.parametrize("name", WRONG)
def test_another_thing_than_what_is_taken(model, name):
    call, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        call(model)


@pytest.mark.parametrize("shapes", [[(5,)] * 24, [(3, n, n) for n in range(1, 25)]])
def test_a_list_of_single_examples_is_a_dataset(model, shapes):
    assert runs.engine_for(model, dataset=[torch.zeros(shape) for shape in shapes]).steps_taken == 0


def test_a_model_that_mixes_examples_leaves_the_optimizer_alone():
    optimizer = torch.optim.SGD((mixing := nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))).parameters())
    with pytest.raises(UnsupportedModelError, match="BatchNorm1d"):
        runs.engine_for(mixing, optimizer)
    assert not optimizer._optimizer_step_pre_hooks


TARGET = {"noise_multiplier": None, "target_epsilon": 3.0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noise_multiplier": None}, "either noise_multiplier, or target_epsilon .* got neither"),
        ({"target_epsilon": 3.0, "epochs": 1}, "either noise_multiplier, or target_epsilon .* got both"),
        ({"steps": 3}, "epochs and steps say what target_epsilon is to be calibrated for"),
        (TARGET, "give either epochs or steps; got neither"),
        ({**TARGET, "epochs": 1, "steps": 3}, "epochs or steps; got both"),
        ({**TARGET, "epochs": 0}, "^epochs must be a whole number >= 1; got 0"),
        ({**TARGET, "steps": 1.5}, "^steps must be a whole number >= 1; got 1.5"),
        ({**TARGET, "target_epsilon": -1.0, "steps": 1}, "^target_epsilon must be a finite number > 0"),
        ({"noise_multiplier": float("nan")}, "^noise_multiplier must be a finite number >= 0; got nan"),
        ({"target_delta": 0.0}, "^target_delta must be a number in"),
        ({"batch_size": None}, "batch_size must be given with a dataset"),
        ({"clipping": 0.0}, "^clipping must be a finite number > 0"),
        ({"second_pass": "fast"}, "^second_pass must be one of"),
        ({"noise": "loud"}, "^noise must be one of"),
        ({"sampling": "truncated"}, "max_batch_size must be given"),
        ({"max_physical_batch_size": "big"}, "max_physical_batch_size must be a number, 'auto' or None"),
        ({"max_physical_batch_size": "auto", "memory_limit": 0}, "memory_limit must be"),
        ({"max_physical_batch_size": 8, "memory_limit": 1}, 'memory_limit is for max_physical_batch_size="auto"'),
        ({"max_physical_batch_size": "auto", "unit_ids": [0] * 24}, "don't go together"),
    ],
)
def test_arguments_out_of_range_or_that_do_not_go_together(model, options, message):
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ValueError, match=message):
        PrivacyEngine(model, optimizer, runs.data(), **{"noise_multiplier": 1.0, "batch_size": 8, **options})
    assert not optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize("wrong", [{"delta": 0.0}, {"delta": float("nan")}, {"accountant": "gdp"}])
def test_epsilon_checks_its_arguments_even_when_it_is_infinite(model, wrong):
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))} must be "):
        runs.engine_for(model, noise_multiplier=0.0).epsilon(**wrong)


def stored(model):
    torch.save(model, content := io.BytesIO())
    content.seek(0)
    return torch.load(content, weights_only=False)


def warned(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("copied", [lambda model: model, copy.deepcopy, stored])
@pytest.mark.parametrize("ledgers", ["both", "the second", "none"])
def test_a_model_that_another_engine_trained(ledgers, copied, caplog, tmp_path):
    """Steps of it, or of what it is a copy of, aren't counted by the new one, which says so; in one ledger they are."""
    model = runs.network()
    for has_ledger in (ledgers == "both", ledgers != "none"):
        ledger = tmp_path / "run.ledger" if has_ledger else None
        runs.train(engine := runs.engine_for(model, noise_multiplier=1.0, clipping=1.0, ledger=ledger), 1)
        engine.detach()
        model = copied(model)
    assert warned(caplog) == (ledgers != "both") * [
        "another engine took 1 step with this model before; epsilon() of the new one doesn't count them. Give both the "
        'same ledger="..." so that they add up (docs/training.md says how where the first has none), or train a new '
        "model"
    ]


def train_only(model, part):
    for number, layer in enumerate(model):
        layer.requires_grad_(number == part)


@pytest.mark.parametrize("shared", [True, False])
def test_two_engines_that_train_parts_of_a_model_in_turn(shared, model, caplog, tmp_path):
    """Built before any step, neither counts the other's, which is said once; in one ledger both do."""
    engines = {}
    for part in (0, 2):
        train_only(model, part)
        optimizer, ledger = torch.optim.SGD(model[part].parameters(), lr=0.1), tmp_path / "run.ledger"
        engines[part] = runs.engine_for(model, optimizer, noise_multiplier=1.0, ledger=ledger if shared else None)
    for part, engine in [*engines.items()] * 2:
        train_only(model, part)
        engine.accept_parameters()
        runs.train(engine, 1)
    assert warned(caplog) == (not shared) * [
        "another engine may take steps with this model, too; epsilon() of neither counts those of the other. Give both "
        'the same ledger="..." so that they add up, or call detach() of the engine that isn\'t used'
    ]


@pytest.mark.parametrize("ended", [True, False])
def test_an_engine_that_was_given_up_before_a_step_is_not_warned_of(ended, model, caplog):
    """As when a notebook's cell is run twice, where the first engine is there until the second one is built."""
    kept = []
    for _ in range(2):
        engine = runs.engine_for(model)
        batches = engine.batches()
        if ended and not kept:
            engine.detach()
            kept.append(engine)
    for batch in batches:
        engine.step(batch, runs.losses_of)
    assert warned(caplog) == []


@pytest.mark.usefixtures("coarse_losses")
def test_a_limit_below_the_target_is_said(model, caplog):
    for limit in (1.0, 2.0):
        runs.engine_for(model, noise_multiplier=None, target_epsilon=2.0, steps=4, max_epsilon=limit)
    assert warned(caplog) == ["max_epsilon=1.0 is below target_epsilon=2.0: training ends before its last step"]


def test_an_engine_that_could_not_be_built_leaves_the_optimizer_alone(model, monkeypatch, tmp_path):
    """Neither its hooks nor its ledger keep the next one from being built."""
    optimizer, ledger = torch.optim.SGD(model.parameters()), tmp_path / "run.ledger"
    with monkeypatch.context() as patched:
        patched.setattr("ghostclip.engine.privacy_engine.keep_unsynchronised", lambda model: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            runs.engine_for(model, optimizer, ledger=ledger)
    runs.train(runs.engine_for(model, optimizer, ledger=ledger), 1)


def test_a_guarantee_without_noise_says_so(model):
    runs.train(engine := runs.engine_for(model, noise_multiplier=0.0), 1)
    assert engine.guarantee().endswith(" No noise was added, so nothing is promised.")
    engine.detach()
    runs.train(engine := runs.engine_for(model, noise_multiplier=1.0, noise="test", seed=1), 1)
    assert engine.guarantee().endswith(" The noise can be repeated by its seed, so nothing is promised.")


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("options", [{}, {"second_pass": "cached"}, {"clipping": PerLayer(1.0)}])
def test_a_hook_on_a_parameter_is_refused(model, register, options):
    """It could make a clipped sum as large as it likes, before the noise is added."""
    engine = runs.engine_for(model, max_physical_batch_size=3, **options)
    runs.train(engine, 1)
    handle = getattr(model[0].weight, register)(lambda *given: None)
    for work in (lambda: runs.engine_for(model, **options), lambda: runs.train(engine, 1)):
        with pytest.raises(PrivacyError, match=r"'0\.weight' has a hook"):
            work()
    handle.remove()
    runs.train(engine, 1)
    assert engine.steps_taken == 2
