"""Models under FSDP2 whose parameters come when layers need them: the engine's sums are those of single examples.

Frozen parameters are no reason to refuse a step, and a forward that writes to one is.
"""

import math
from functools import partial
from pathlib import Path
from typing import Any

import oracle
import private_runs as runs
import pytest
import torch
import torch.distributed as dist
from case_fallback import with_parameters
from case_models import Wired
from keeping_models import Codes
from ranks import on_ranks, outcome
from sharded import QUIET, losses_of_words, rows, settled, sharded, tagger, weights, whole, words
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import Sequential
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import ghostclip
from ghostclip import PrivacyEngine

pytestmark = [pytest.mark.filterwarnings(text) for text in QUIET]

NORM, COUNT = 0.3, 7


def recomputed(*layers: nn.Module) -> nn.Module:
    """Each layer is computed again in the backward."""

    def forward(m: Any, x: Tensor) -> Tensor:
        for layer in m.children():
            x = checkpoint(layer, x, use_reentrant=False)
        return x

    return Wired(forward, **{f"layer{number}": layer for number, layer in enumerate(layers)})


def averaged() -> nn.Module:
    """An LSTM's outputs, averaged over time."""
    return Wired(lambda m, x: m.inner(x)[0].mean(1), inner=nn.LSTM(5, 6, batch_first=True))


def twice() -> nn.Module:
    """One layer called twice, the second time on what the first gave, which is changed in place between."""
    return Wired(lambda m, x: m.inner(F.relu_(m.inner(x))), inner=nn.Linear(5, 5))


def bare() -> nn.Module:
    """A parameter outside of every layer."""
    return with_parameters(lambda m, x: x * m.scale, {"scale": (5,)})


def texts() -> list[Tensor]:
    inputs, labels = rows()
    return [inputs[:, None] * torch.arange(1, 5, dtype=torch.float64)[:, None], labels]


def images() -> list[Tensor]:
    made = torch.Generator().manual_seed(2)
    return [torch.randn(COUNT, 2, 6, 6, dtype=torch.float64, generator=made), torch.arange(COUNT) % 3]


# {name: (model, losses, batch)}; every layer is sharded by itself.
MODELS: dict[str, Any] = {
    "linear": (lambda: Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3)), runs.losses_of, rows),
    "in place, of positions": (
        lambda: Sequential(nn.Linear(5, 6), nn.ReLU(inplace=True), nn.Linear(6, 5), nn.ReLU(inplace=True), averaged(),
                           nn.Linear(6, 3)),
        runs.losses_of, texts,
    ),
    "recomputed": (
        lambda: recomputed(nn.Linear(5, 6), Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 3)),
        runs.losses_of, rows,
    ),
    "convolutions": (
        lambda: Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.Conv2d(4, 3, 3),
                        nn.Flatten(), nn.Linear(12, 3)),
        runs.losses_of, images,
    ),
    "twice": (lambda: Sequential(twice(), bare(), nn.Linear(5, 3)), runs.losses_of, rows),
    "frozen": (
        lambda: Sequential(nn.Linear(5, 6), nn.Linear(6, 6).requires_grad_(False), nn.ReLU(True), nn.Linear(6, 3)),
        runs.losses_of, rows,
    ),
    "tagger": (tagger, lambda model, batch: losses_of_words(model, batch[0]), lambda: [words()]),
}  # fmt: skip


def built(kind: str) -> nn.Module:
    torch.manual_seed(1)
    return MODELS[kind][0]().double()


def sharded_by_layer(kind: str, **options: Any) -> nn.Module:
    model = built(kind)
    if kind == "tagger":
        return sharded(model)
    for layer in model.children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer, **options)
    return fully_shard(model)


def engine_for(kind: str, model: nn.Module, second_pass: str = "auto", most: int | None = None) -> PrivacyEngine:
    """Without noise, with all examples in each batch."""
    return PrivacyEngine(
        model, torch.optim.SGD(model.parameters(), lr=1.0), TensorDataset(*MODELS[kind][2]()), batch_size=COUNT,
        noise_multiplier=0.0, clipping=NORM, second_pass=second_pass, sampling="without_replacement",
        max_physical_batch_size=most, noise="test", seed=1,
    )  # fmt: skip


def update(kind: str, model: nn.Module, second_pass: str, most: int | None = None, extra: bool = False) -> list[Tensor]:
    """What one step without noise moves the parameters by, times the batch size.

    With ``extra`` the ranks make forwards of their own, and the model is sharded between forward and backward.
    """
    before = [whole(each) for each in model.parameters()]
    engine, losses_of = engine_for(kind, model, second_pass, most), MODELS[kind][1]
    for batch in engine.batches():
        for number, examples in enumerate(batch.physical()):
            if extra and dist.get_rank() == number % 2:
                losses_of(model, examples).sum().item()
            losses = losses_of(model, examples)
            if extra:
                settled(model)
                assert kind != "linear" or all(hasattr(each, "device_mesh") for each in model.parameters())
            engine.backward(losses)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    settled(model)
    return [COUNT * (old - whole(new)) for old, new in zip(before, model.parameters(), strict=True)]


def looped(kind: str) -> list[Tensor]:
    """Clipped sums by one backward for each example."""
    model, (_, losses_of, make) = built(kind), MODELS[kind]
    grads = oracle.grads_of_single_losses(model, losses_of(model, make()))
    sums = oracle.clipped_sum(grads, NORM)
    return [sums.get(name, torch.zeros_like(each)) for name, each in model.named_parameters()]


def updates(most: int | None, extra: bool = False, **options: Any) -> dict[tuple[str, str], list[Tensor]]:
    return {
        (kind, second_pass): update(kind, sharded_by_layer(kind, **options), second_pass, most, extra)
        for kind in MODELS
        for second_pass in ("cached", "reweight")
    }


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {"most": None}),
        (2, {"most": 1}),
        pytest.param(2, {"most": 2, "extra": True}, marks=pytest.mark.slow),  # parameters at different times
        pytest.param(2, {"most": 3, "reshard_after_forward": False}, marks=pytest.mark.slow),
        pytest.param(4, {"most": 1}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.one_in(math.inf)
def test_sums_are_those_of_single_examples(ranks: int, options: dict[str, Any], tmp_path: Path) -> None:
    for outcomes in on_ranks(partial(updates, **options), tmp_path, ranks):
        for (kind, second_pass), sums in outcomes.items():
            for mine, expected in zip(sums, looped(kind), strict=True):
                assert (mine - expected).norm() <= 1e-9 * expected.norm(), (kind, second_pass)


def resident() -> list[list[int]]:
    """Bytes of whole parameters by layer: after a forward, before the second layer's own, and after a backward."""
    model = sharded_by_layer("linear")
    layers: list[Any] = [model[number] for number in (0, 2, 3)]  # type: ignore[index]
    sizes: list[list[int]] = []

    def note(*_: Any) -> None:
        held = [each._get_fsdp_state()._fsdp_param_groups[0].fsdp_params for each in layers]
        sizes.append([sum(each._unsharded_param.untyped_storage().nbytes() for each in some) for some in held])

    engine = engine_for("linear", model)
    for batch in engine.batches():
        for examples in batch.physical():
            losses = runs.losses_of(model, examples)
            note()
            handle = layers[1].register_forward_pre_hook(note)
            runs.losses_of(model, examples)
            handle.remove()
            engine.backward(losses)
            note()
        engine.optimizer.step()
    return sizes


def test_layers_have_whole_parameters_in_their_turn_only(tmp_path: Path) -> None:
    assert on_ranks(resident, tmp_path) == [[[0, 0, 0], [0, 8 * 6 * 7, 0], [0, 0, 0]]] * 2


def failing_late() -> tuple[list[str], bool]:
    """What is raised where a rank's sums can't be formed after some were reduced, and whether parameters moved."""
    model = sharded_by_layer("linear")
    engine = engine_for("linear", model)
    before = [whole(each) for each in model.parameters()]
    totals: Any = engine._steps.release.sums._totals
    reduce, said = totals._reduce_large, []

    def fails(new: Any) -> None:
        reduce(new)
        if dist.get_rank() and totals._begun:
            raise MemoryError("no memory")

    totals._reduce_large = fails
    batch = next(iter(engine.batches()))
    for examples in batch.physical():
        while len(said) < 2 * dist.get_rank():
            said.append(outcome(lambda rows=examples: engine.backward(runs.losses_of(model, rows))))
            totals._reduce_large = reduce
        if not dist.get_rank():
            engine.backward(runs.losses_of(model, examples))
    said.append(outcome(engine.optimizer.step))
    engine.detach()
    settled(model)
    return said, all(torch.equal(old, whole(new)) for old, new in zip(before, model.parameters(), strict=True))


def test_a_batch_whose_sums_were_reduced_in_part_is_lost(tmp_path: Path) -> None:
    (first, same), (second, alike) = on_ranks(failing_late, tmp_path)
    assert second[0] == "MemoryError: no memory"
    assert second[1].startswith("PrivacyError: a physical batch failed after a part of its sums had been added up")
    assert second[2].startswith("PrivacyError")
    assert first[0].startswith("PrivacyError: nothing was released, because rank 1 failed")
    assert same
    assert alike


ROWS = torch.randn(24, 5, generator=torch.Generator().manual_seed(0))
DATA = torch.utils.data.TensorDataset(ROWS, torch.arange(24) % 3)
# Half of the examples for each of two ranks: where a Poisson sample leaves a rank less than two, nothing is compared.
ALL: dict[str, Any] = {"batch_size": 24, "sampling": "without_replacement"}


def adapted(inputs: int, outputs: int) -> Wired:
    """A frozen layer and a low-rank adapter."""
    return Wired(
        lambda m, x: m.base(x) + m.up(m.down(x)), base=nn.Linear(inputs, outputs).requires_grad_(False),
        down=nn.Linear(inputs, 2, bias=False), up=nn.Linear(2, outputs, bias=False),
    )  # fmt: skip


def with_frozen(kind: str) -> nn.Sequential:
    torch.manual_seed(1)
    if kind == "adapters":
        return Sequential(adapted(5, 8), nn.Tanh(), adapted(8, 8), nn.Linear(8, 3))
    model = Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    (model[0] if kind == "layer" else model[0].weight).requires_grad_(False)
    return model


FROZEN: list[tuple[str, dict[str, Any]]] = [
    ("weight", {}),
    ("adapters", {"by_layer": True, "reshard_after_forward": False}),
]


def trained() -> list[Tensor]:
    """Weights after a step with all examples; a process alone shards nothing."""
    found = []
    for kind, options in FROZEN:
        model, own = with_frozen(kind), {**options}
        if own.pop("by_layer", False) and dist.is_initialized():
            fully_shard(model[0], **own)
            fully_shard(model[2], **own)
        model = sharded(model, children=False, **own)  # type: ignore[assignment]
        optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.5)
        runs.train(runs.engine_for(model, optimizer, DATA, **ALL, clipping=0.1), 1)
        found.append(weights(model))
    return found


def test_models_with_frozen_parameters_take_the_steps_of_one_process(tmp_path: Path) -> None:
    """In the group of the model itself, which stays gathered after a forward, and in others."""
    alone = trained()
    for found in on_ranks(trained, tmp_path):
        for mine, one, (kind, _) in zip(found, alone, FROZEN, strict=True):
            torch.testing.assert_close(mine, one, rtol=1e-5, atol=1e-6)
            assert not torch.equal(mine, weights(with_frozen(kind)))


# How a forward writes to a frozen parameter, and whether that one is sharded by itself.
WRITES = [("in place", False), ("in place", True), ("through data", False), ("exchanged data", False)]


def written() -> list[str]:
    said = []
    for write, by_layer in [*WRITES, ("not at all", False)]:
        torch.manual_seed(1)
        model = sharded(Sequential(Codes(write, "frozen parameter", 5), nn.Linear(5, 3)), children=by_layer)
        optimizer = torch.optim.SGD(model[1].parameters(), lr=0.5)  # type: ignore[index]
        said.append(outcome(partial(runs.train, runs.engine_for(model, optimizer, DATA, **ALL), 2)))
    return said


def test_a_frozen_parameter_that_a_forward_writes_to_is_refused(tmp_path: Path) -> None:
    said = "ExamplesMixError: 0: the forward keeps something of the examples in the frozen parameter '0.codes'"
    for found in on_ranks(written, tmp_path):
        assert [text[: len(said)] for text in found] == [said] * 4 + ["nothing"]


def checked() -> list[Any]:
    """What `check` finds by a batch, and by a loader, in a model that was never gathered."""
    batches = [list(DATA.tensors), torch.utils.data.DataLoader(DATA, batch_size=8)]
    return [ghostclip.check(sharded(with_frozen("layer"), children=False), runs.losses_of, batch) for batch in batches]


def test_check_finds_nothing_in_a_model_with_frozen_parameters(tmp_path: Path) -> None:
    assert on_ranks(checked, tmp_path) == [[[], []], [[], []]]
