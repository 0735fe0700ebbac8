"""`ghostclip.same_as`: a user's class gets the rule of torch's, if it computes the same; all else is refused."""

import copy
import pickle

import declared_layers as mine
import oracle
import pytest
import torch
from case_types import project
from comparing import assert_close, assert_compiled_exact, assert_dicts_close, assert_exact, gradients
from declared_layers import declared
from graphs import interpret
from torch import nn
from torch.utils.checkpoint import checkpoint

import ghostclip
from ghostclip import UnsupportedModelError
from ghostclip.nn.base import GhostLayer
from ghostclip.nn.declared import DECLARED, Declared

pytestmark = pytest.mark.usefixtures("declarations")


# name: (class, torch's, one of the class, inputs of a batch of that size)
SAME = {
    "linear": (mine.MyLinear, nn.Linear, lambda: mine.MyLinear(5, 4), lambda b: torch.randn(b, 5)),
    "linear 3-D": (mine.MyLinear, nn.Linear, lambda: mine.MyLinear(5, 4), lambda b: torch.randn(b, 3, 5)),
    "no subclass": (mine.HandLinear, nn.Linear, lambda: mine.HandLinear(5, 4), lambda b: torch.randn(b, 5)),
    "conv": (mine.MyConv2d, nn.Conv2d, lambda: mine.MyConv2d(2, 3, 3, padding=1), lambda b: torch.randn(b, 2, 5, 4)),
    "layer norm": (mine.MyLayerNorm, nn.LayerNorm, lambda: mine.MyLayerNorm(4), lambda b: torch.randn(b, 3, 4)),
    "embedding": (
        mine.IndexEmbedding,
        nn.Embedding,
        lambda: mine.IndexEmbedding(7, 4),
        lambda b: torch.randint(7, (b, 3)),
    ),
    "lstm": (mine.MyLSTM, nn.LSTM, lambda: mine.MyLSTM(5, 4, batch_first=True), lambda b: torch.randn(b, 3, 5)),
    "random numbers": (mine.DrawingLinear, nn.Linear, lambda: mine.DrawingLinear(5, 4), lambda b: torch.randn(b, 5)),
}
same = pytest.mark.parametrize("name", SAME)


class Model(nn.Module):
    """Two layers of one class, the first called once or twice."""

    def __init__(self, build, times):
        super().__init__()
        self.first, self.second, self.times = build(), build(), times

    def forward(self, x):
        inputs = [x * (1 + turn) if x.is_floating_point() else x for turn in range(self.times)]
        outputs = [*map(self.first, inputs), self.second(x)]
        return [out[0] if isinstance(out, tuple) else out for out in outputs]


def made(name, times=1, batch=4):
    """A model of declared layers, and a batch for it."""
    kind, target, build, inputs = SAME[name]
    torch.manual_seed(3)
    model, x = Model(build, times).double(), inputs(batch)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    ghostclip.same_as(kind, target)
    return model, x.double() if x.is_floating_point() else x


@same
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize(
    "options", [{"second_pass": "cached"}, {"second_pass": "reweight"}, {"norm_strategy": "gram"}], ids=str
)
def test_declared_layers_are_the_loop(name, times, options):
    model, x = made(name, times)
    clipper = assert_exact(model, x, **options)
    assert {row.rule for row in clipper.explain()} == {f"{SAME[name][1].__name__} (declared)"}


def test_a_declared_model_has_no_findings():
    model, x = made("linear")
    assert ghostclip.check(model) == ghostclip.check(ghostclip.wrap(model)) == []
    assert ghostclip.check(model, lambda m, b: project(m(b)), x) == []


def test_a_declaration_covers_no_subclass():
    ghostclip.same_as(mine.MyLinear, nn.Linear)
    model, x = nn.Sequential(mine.SubclassOfMine(3, 4)).double(), torch.randn(5, 3).double()
    assert_exact(model, x)
    assert not isinstance(model[0], Declared)


def test_a_parametrization_takes_a_module_out():
    before = mine.MyLinear(3, 4)
    nn.utils.parametrizations.weight_norm(before)
    model = declared(mine.MyLinear, nn.Linear, 3, 3)
    model.append(before)
    assert not isinstance(ghostclip.wrap(model)[2], Declared)
    assert ghostclip.GhostClipper(model).norms(project(model(torch.randn(5, 3)))).shape == (5,)
    nn.utils.parametrizations.weight_norm(model[1])
    with pytest.raises(UnsupportedModelError, match="class was changed after it was wrapped"):
        model(torch.randn(5, 3))


def test_the_forward_of_the_class_runs_once_for_each_module_and_mode(monkeypatch):
    monkeypatch.setattr(mine.MyLinear, "calls", 0)
    model, x = made("linear")
    ghostclip.wrap(model)
    counts = []
    for prepare in (model.train, model.train, model.eval, model.train, model.eval, model.float, model.double):
        prepare()
        model(x.to(model.first.weight.dtype))
        counts.append(mine.MyLinear.calls)
    assert counts == [2, 2, 4, 4, 4, 6, 6]
    model.first.weight.requires_grad_(False)
    with torch.no_grad():
        model(x)
    assert mine.MyLinear.calls == 8


def test_an_engine_s_trials_verify_once(monkeypatch):
    monkeypatch.setattr(mine.MyLinear, "calls", 0)
    model = declared(mine.MyLinear, nn.Linear, 3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = torch.utils.data.TensorDataset(torch.randn(40, 3), torch.randint(2, (40,)))
    engine = ghostclip.PrivacyEngine(model, optimizer, data, batch_size=20, noise_multiplier=1.0, target_delta=1e-3)
    for _ in range(2):
        for batch in engine.batches():
            engine.step(batch, lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1], reduction="none"))
    assert mine.MyLinear.calls == 1  # trials of the self-check have gradients, too


def test_an_example_that_is_not_finite_is_in_nobody_s_way():
    model, x = made("linear")
    x[1] = torch.nan
    result = ghostclip.GhostClipper(model, 0.5).backward(project(model(x)))
    assert (result.weights > 0).tolist() == [True, False, True, True]


def test_what_a_forward_would_do_later_is_not_done():
    model, x = declared(mine.FlaggedLinear, nn.Linear, 3, 4).double(), torch.randn(5, 3).double()
    model(x)
    plain = nn.Linear(3, 4).double()
    plain.load_state_dict(model[1].state_dict())
    expected = oracle.per_example_grads(plain, project, (x,))
    mine.FlaggedLinear.flag = True
    try:
        assert torch.equal(model(x), plain(x))
        found = ghostclip.GhostClipper(model).norms(project(model(x)))
    finally:
        mine.FlaggedLinear.flag = False
    assert_close(found, oracle.norms(expected), 1e-10)


def test_keywords_are_those_of_torch_s_forward():
    model = declared(mine.MyLinear, nn.Linear, 3, 4)
    model[1](torch.randn(5, 3))
    with pytest.raises(UnsupportedModelError, match=r"can't be called so.*unexpected keyword argument 'x'"):
        model[1](x=torch.randn(5, 3))


def test_packed_sequences_are_compared():
    x = nn.utils.rnn.pack_sequence([torch.randn(3, 5), torch.randn(2, 5)])
    model = declared(mine.MyLSTM, nn.LSTM, 5, 4)
    plain = nn.LSTM(5, 4)
    plain.load_state_dict(model[1].state_dict())
    assert torch.equal(model(x)[0].data, plain(x)[0].data)
    with pytest.raises(UnsupportedModelError, match="other values"):
        declared(mine.DoubledLSTM, nn.LSTM, 5, 4)(x)


def test_hooks_run_once():
    model, seen = declared(mine.MyLinear, nn.Linear, 3, 4), []
    model[1].register_forward_pre_hook(lambda module, inputs: seen.append("before"))
    model[1].register_forward_hook(lambda module, inputs, output: seen.append("after"))
    model[1].weight.register_hook(lambda grad: seen.append("gradient"))
    x = torch.randn(5, 3, requires_grad=True)
    x.register_hook(lambda grad: seen.append("input"))
    model(x)
    assert seen == ["before", "after"]


def test_the_class_comes_back_with_its_keys_and_has_its_methods_meanwhile():
    model = nn.Sequential(mine.MyLinear(3, 4))
    keys, attributes = list(model.state_dict()), set(vars(model[0]))
    ghostclip.same_as(mine.MyLinear, nn.Linear)
    ghostclip.wrap(model)(torch.randn(5, 3))
    assert isinstance(model[0], GhostLayer)
    assert isinstance(model[0], mine.MyLinear)
    assert model[0].describe() == "mine, 4 wide"
    assert list(model.state_dict()) == keys
    assert repr(model[0]) == repr(mine.MyLinear(3, 4))
    ghostclip.unwrap(model)
    assert type(model[0]) is mine.MyLinear
    assert set(vars(model[0])) == attributes


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_declared_and_verified_anew(copied, monkeypatch):
    model, x = made("linear")
    expected = oracle.per_example_grads(model, project, (x,))
    ghostclip.wrap(model)(x)
    twin = copied(model)
    monkeypatch.setattr(mine.MyLinear, "calls", 0)
    assert type(twin.first) is type(model.first)
    assert_close(ghostclip.GhostClipper(twin).norms(project(twin(x))), oracle.norms(expected), 1e-10)
    assert mine.MyLinear.calls == 2


def test_a_wrapped_model_is_not_loaded_without_the_declaration():
    saved = pickle.dumps(declared(mine.MyLinear, nn.Linear, 3, 4))
    DECLARED.clear()
    with pytest.raises(UnsupportedModelError, match=r"call ghostclip.same_as\(MyLinear, Linear\) before"):
        pickle.loads(saved)


def test_under_activation_checkpointing():
    model, x = made("linear")
    expected = oracle.per_example_grads(model, project, (x,))
    clipper = ghostclip.GhostClipper(model, 0.5)
    clipper.backward(project([checkpoint(model.first, x, use_reentrant=False), model.second(x)]))
    assert_dicts_close(gradients(model), oracle.clipped_sum(expected, 0.5), 1e-10)


def test_under_autocast():
    model = declared(mine.FlaggedLinear, nn.Linear, 3, 4)  # torch's function, which autocast knows
    twin = ghostclip.wrap(nn.Sequential(nn.Identity(), nn.Linear(3, 4)))
    twin.load_state_dict(model.state_dict())
    x = torch.randn(5, 3)
    norms = []
    for each in (model, twin):
        clipper = ghostclip.GhostClipper(each)
        with torch.autocast("cpu", torch.bfloat16):
            losses = project(each(x)).float()
        norms.append(clipper.norms(losses))
    assert torch.equal(*norms)


def test_under_transforms_of_functions_the_own_forward_runs_until_it_is_verified():
    model, x = declared(mine.Doubled, nn.Linear, 3, 4), torch.randn(5, 3)
    plain = nn.Linear(3, 4)
    plain.load_state_dict(model[1].state_dict())
    torch.testing.assert_close(torch.func.vmap(model)(x), 2 * plain(x))


def test_where_the_examples_are():
    model = declared(mine.HandLinear, nn.Linear, 3, 4, batch_dim=1).double()
    x = torch.randn(6, 5, 3).double()
    plain = ghostclip.unwrap(copy.deepcopy(model))
    expected = oracle.per_example_grads(plain, lambda out: project(out, 1), (x,), (1,))
    found = ghostclip.GhostClipper(model).norms(project(model(x), 1))
    assert_close(found, oracle.norms(expected), 1e-10)


@pytest.mark.parametrize("kind", [mine.MyLinear, mine.HandLinear])
def test_rows_that_all_examples_share(kind):
    class Places(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = kind(3, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.head(x + self.layer(torch.arange(6.0, dtype=x.dtype).view(1, 2, 3)))

    ghostclip.same_as(kind, nn.Linear)
    assert_exact(Places().double(), torch.randn(5, 2, 4).double())


@pytest.mark.parametrize("second_pass", ["cached", "reweight"])
def test_compiled_steps(second_pass, monkeypatch):
    interpret(monkeypatch)
    model, x = made("linear")
    assert_compiled_exact(
        model, x, lambda outputs: sum(out.square().sum(1) for out in outputs), second_pass=second_pass
    )
