"""Norms and sums are formed in full float32 whatever precision torch may use for products elsewhere."""

import threading

import pytest
import torch
from torch import nn

import ghostclip
from ghostclip import GhostClipper
from ghostclip.clipper.second_pass import WeightedSums
from ghostclip.compiled.region import Region
from ghostclip.norms.precision import full_precision


def settings():
    """All that torch says of the precision of float32 products."""
    kinds = [(backend, kind) for backend in ("mkldnn", "cuda") for kind in ("all", "matmul", "conv", "rnn")]
    found = [torch._C._get_fp32_precision_getter(*kind) for kind in kinds]
    try:
        return [*found, torch.get_float32_matmul_precision()]
    except RuntimeError:  # a mixture of its older and newer settings
        return [*found, None]


def for_all_operations():
    torch.backends.mkldnn.matmul.fp32_precision, torch.backends.fp32_precision = "none", "bf16"


# What users may set.
WAYS = {
    "by_the_older_setting": lambda: torch.set_float32_matmul_precision("medium"),
    "by_device": lambda: setattr(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
    "for_all_operations": for_all_operations,
}


@pytest.fixture(params=WAYS)
def narrow(request):
    """Float32 products may round to less, in one of the ways in which users say so."""
    torch.set_float32_matmul_precision("highest")
    WAYS[request.param]()
    before = settings()
    yield before
    assert settings() == before
    torch.backends.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")


# name: a model, and the shape of an example
MODELS = {
    "linear": (lambda: nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 8)), (12, 64)),
    "convolution": (lambda: nn.Sequential(nn.Conv1d(64, 48, 3), nn.Tanh(), nn.Flatten(), nn.Linear(480, 8)), (64, 12)),
    "attention": (lambda: nn.TransformerEncoderLayer(64, 4, 48, 0.0, batch_first=True), (12, 64)),
}


def model(kind="linear"):
    torch.manual_seed(0)
    build, shape = MODELS[kind]
    return ghostclip.wrap(build()), torch.randn(16, *shape)


def squares(outputs):
    return outputs.flatten(1).square().sum(1)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("strategy", ["gram", "direct"])
@pytest.mark.parametrize("second_pass", ["cached", "reweight"])
@pytest.mark.usefixtures("narrow")
@pytest.mark.one_in(3)
def test_one_example_s_share_keeps_to_the_bound(kind, strategy, second_pass):
    network, x = model(kind)
    clipper = GhostClipper(network, 0.01, norm_strategy=strategy, second_pass=second_pass)
    for row in x.split(1):  # whose sum is a share
        network.zero_grad()
        clipper.backward(squares(network(row)))
        share = torch.cat([p.grad.flatten().double() for p in network.parameters()]).norm()
        assert share <= 0.01 * (1 + 1e-5)


@pytest.mark.parametrize("method", ["norms", "per_example_grads", "backward"])
def test_the_model_s_own_backward_keeps_what_was_set(method, narrow):
    (network, x), seen = model(), []
    hidden = network[0](x)
    hidden.register_hook(lambda grad: seen.append(settings()))
    getattr(GhostClipper(network), method)(squares(network[2](hidden.tanh())))
    assert seen
    assert all(each == narrow for each in seen)


@pytest.mark.usefixtures("narrow")
def test_an_exception_leaves_the_settings_as_they_were(monkeypatch):
    (network, x), seen = model(), []
    clipper = GhostClipper(network)

    def fails(*args, **options):
        seen.append(settings())
        raise KeyboardInterrupt

    monkeypatch.setattr(clipper.passes._planner, "answer", fails)
    with pytest.raises(KeyboardInterrupt):
        clipper.norms(squares(network(x)))
    assert seen[0][1] == "ieee"


@pytest.mark.usefixtures("narrow")
def test_threads_that_leave_in_any_order_leave_the_settings_as_they_were():
    inside, may_leave = threading.Event(), threading.Event()

    def other():
        with full_precision(torch.device("cpu")):
            inside.set()
            may_leave.wait()

    thread = threading.Thread(target=other)
    with full_precision(torch.device("cpu")):
        thread.start()
        inside.wait()
    still = settings()[1]
    may_leave.set()
    thread.join()
    assert still == "ieee"


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("second_pass", ["cached", "reweight"])
def test_sums_are_formed_in_full_precision(second_pass, monkeypatch):
    seen, of = [], WeightedSums.of
    monkeypatch.setattr(WeightedSums, "of", lambda *arguments: seen.append(settings()[1]) or of(*arguments))
    network, x = model()
    GhostClipper(network, second_pass=second_pass).backward(squares(network(x)))
    assert set(seen) == {"ieee"}


@pytest.mark.usefixtures("narrow")
def test_steps_are_not_compiled_while_products_may_round():
    network, x = model()
    clipper = GhostClipper(network, compile=True)
    for _ in range(3):
        clipper.clip(lambda model, batch: squares(model(batch)), x)
    assert clipper.compiled.graphs == 0
    assert "float32 products are allowed to round" in clipper.compiled.refusals[0]


def test_a_graph_made_before_a_setting_was_changed_keeps_full_precision(narrow):
    region = Region.__new__(Region)
    region._on_cuda, region._run = False, lambda *inputs: settings()
    assert narrow[1] != "ieee"
    assert region(torch.zeros(1))[1] == "ieee"
