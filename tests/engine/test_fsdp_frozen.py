"""Frozen parameters under FSDP2: they are no reason to refuse a step, and a forward that writes to one is."""

from functools import partial
from pathlib import Path
from typing import Any

import private_runs as runs
import pytest
import torch
from case_models import Wired
from keeping_models import Codes
from ranks import on_ranks, outcome
from sharded import QUIET, sharded, weights
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import ghostclip

pytestmark = [pytest.mark.filterwarnings(text) for text in QUIET]

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


def network(kind: str) -> nn.Sequential:
    torch.manual_seed(1)
    if kind == "adapters":
        return nn.Sequential(adapted(5, 8), nn.Tanh(), adapted(8, 8), nn.Linear(8, 3))
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    (model[0] if kind == "layer" else model[0].weight).requires_grad_(False)
    return model


def trained(kind: str, **options: Any) -> Tensor:
    """Weights after two steps with all examples; a process alone shards nothing."""
    model = network(kind)
    if options.pop("by_layer", False) and torch.distributed.is_initialized():
        fully_shard(model[0], **options)
        fully_shard(model[2], **options)
    model = sharded(model, children=False, **options)  # type: ignore[assignment]
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.5)
    runs.train(runs.engine_for(model, optimizer, DATA, **ALL, clipping=0.1), 2)
    return weights(model)


WAYS: list[tuple[str, dict[str, Any]]] = [
    ("weight", {}),
    ("layer", {}),
    ("adapters", {"by_layer": True}),
    ("adapters", {"by_layer": True, "reshard_after_forward": False}),
]


def all_trained() -> list[Tensor]:
    return [trained(kind, **options) for kind, options in WAYS]


def test_models_with_frozen_parameters_take_the_steps_of_one_process(tmp_path: Path) -> None:
    """In the group of the model itself, which stays gathered after a forward, and in others."""
    alone = all_trained()
    for found in on_ranks(all_trained, tmp_path):
        for mine, one, (kind, _) in zip(found, alone, WAYS, strict=True):
            torch.testing.assert_close(mine, one, rtol=1e-5, atol=1e-6)
            assert not torch.equal(mine, weights(network(kind)))


def written(write: str, by_layer: bool) -> str:
    torch.manual_seed(1)
    model = nn.Sequential(Codes(write, "frozen parameter", 5), nn.Linear(5, 3))
    sharded(model, children=by_layer)
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.5)
    return outcome(partial(runs.train, runs.engine_for(model, optimizer, DATA, **ALL), 2))


WRITES = [
    ("in place", False),
    ("in place", True),
    ("through data", False),
    ("exchanged data", False),
    ("not at all", False),
]


def all_written() -> list[str]:
    return [written(*each) for each in WRITES]


def test_a_frozen_parameter_that_a_forward_writes_to_is_refused(tmp_path: Path) -> None:
    said = "ExamplesMixError: the self-check found that the forward keeps something of the examples in the frozen para"
    for found in on_ranks(all_written, tmp_path):
        assert [text[: len(said)] for text in found] == [said] * 4 + ["nothing"]


def checked() -> list[Any]:
    """What `check` finds by a batch, and by a loader, in a model that was never gathered."""
    batches = [list(DATA.tensors), torch.utils.data.DataLoader(DATA, batch_size=8)]
    return [ghostclip.check(sharded(network("layer"), children=False), runs.losses_of, batch) for batch in batches]


def test_check_finds_nothing_in_a_model_with_frozen_parameters(tmp_path: Path) -> None:
    assert on_ranks(checked, tmp_path) == [[[], []], [[], []]]
