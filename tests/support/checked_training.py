"""Training in which every step is compared with the loop over single examples, for the tests of faults."""

import copy
from collections.abc import Iterator
from typing import Any

import private_runs as runs
import torch
from torch import Tensor, nn

import ghostclip
from ghostclip.engine import PrivacyEngine

NORM, RATE = 0.1, 2.0


def small_engine(dtype: torch.dtype = torch.float32, **changes: Any) -> PrivacyEngine:
    """An engine without noise whose norm nearly every example is clipped to."""
    model = runs.network(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    options = {"clipping": NORM, "max_physical_batch_size": 4, "self_check": False, **changes}
    return runs.engine_for(model, optimizer, options.pop("data", runs.data(dtype=dtype)), **options)


def update_of(model: nn.Module, batch: list[list[Tensor]]) -> Tensor:
    """What a step over these physical batches adds to the parameters, by the loop over single examples."""
    total = runs.clipped_sum(ghostclip.unwrap(copy.deepcopy(model)), batch, NORM)
    return -RATE * torch.cat([each.flatten() for each in total]) / 8


class Training:
    """Steps of an engine, each compared with what the loop over single examples would have done."""

    def __init__(self, engine: PrivacyEngine, by_hand: bool = False) -> None:
        self.engine, self.by_hand = engine, by_hand
        self.epoch: Iterator[Any] = iter(())
        self.seen: list[list[Tensor]] = []

    def next_batch(self) -> Any:
        for _ in range(2):
            for batch in self.epoch:
                return batch
            self.epoch = iter(self.engine.batches())
        raise AssertionError("an epoch without batches")

    def losses_of(self, model: nn.Module, examples: list[Tensor]) -> Tensor:
        self.seen.append(examples)
        return runs.losses_of(model, examples)

    def step(self) -> Any:
        self.seen = []
        batch = self.next_batch()
        if not self.by_hand:
            self.engine.step(batch, self.losses_of)
            return batch
        for examples in batch.physical():
            self.engine.backward(self.losses_of(self.engine.model, examples))
        self.engine.optimizer.step()
        self.engine.optimizer.zero_grad()
        return batch

    def checked_step(self) -> None:
        """A step that uses each example of its batch once, and releases their clipped sum and nothing else."""
        if self.by_hand:
            self.engine.optimizer.zero_grad()
        before, charged = copy.deepcopy(self.engine.model), self.engine.steps_taken
        batch = self.step()
        assert self.engine.steps_taken == charged + 1
        assert [len(labels) for _, labels in self.seen] == batch.sizes
        rows = [tuple(row) for inputs, _ in self.seen for row in inputs.tolist()]
        assert len(set(rows)) == len(rows)
        moved = runs.weights(self.engine.model) - runs.weights(before)
        torch.testing.assert_close(moved, update_of(before, self.seen), atol=1e-6, rtol=1e-4)


class Broken(Exception):
    pass


def broken(*_: Any, **__: Any) -> Any:
    raise Broken
