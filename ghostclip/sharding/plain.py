"""A model of which each process holds all: little to do. The classes for FSDP2 override what differs there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ghostclip.sharding.detection import refuse_sharded

__all__ = ["Add", "Sharding", "Totals", "is_distributed", "local_part"]

# Takes a part of a parameter (its id and the rows), and what is to be added to its sum: a tensor that nobody else uses.
Add = Callable[[tuple[int, tuple[int, int] | None], Tensor], None]
# Physical batches whose sums are added up as they are.
FEW = 64


def is_distributed() -> bool:
    """Whether torch.distributed has a process group, in which processes wait for each other's gradients."""
    return dist.is_available() and dist.is_initialized()


def local_part(tensor: Any) -> Tensor:
    """What this process holds of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class Sharding:
    """What clippers and engines call about the parameters of a model.

    Attributes:
        sharded: whether a process holds shards only.
        totals: the clipped sums of a logical batch.
        stepped: {id of a Parameter that layers use: the one that the optimizer steps}, where these differ.
    """

    sharded = False

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.stepped: dict[int, nn.Parameter] = {}
        self.totals = Totals()

    @property
    def pairs(self) -> list[tuple[str, nn.Parameter, nn.Parameter]]:
        """(name, the Parameter that the optimizer steps, the one that layers use); both are the same here."""
        return [(name, parameter, parameter) for name, parameter in self._model.named_parameters()]

    def check(self, known: Container[int]) -> None:
        """Raises UnsupportedModelError where the model was sharded since layers used the Parameters ``known`` by id."""
        if is_distributed():
            refuse_sharded(self._model, known)

    def versions(self, parameters: Sequence[nn.Parameter]) -> list[int]:
        """A number for each of all stepped parameters, in order, that grows when its values are written to."""
        return [*map(attrgetter("_version"), parameters)]

    def addresses(self, parameters: Sequence[nn.Parameter]) -> list[int]:
        """Where the values of each lie."""
        return [*map(Tensor.data_ptr, parameters)]

    def unshard(self) -> None:
        """A logical batch begins: until `reshard` each layer has whole Parameters while it runs."""

    def reshard(self) -> None:
        """Undoes `unshard`; other ranks needn't do it at the same time."""

    def reshard_between_batches(self, caller: str) -> None:
        """Puts shards back where a forward left whole Parameters; PrivacyError, with the caller, after `unshard`."""

    def unsharded_parameters(self) -> AbstractContextManager[None]:
        """Inside, modules have whole Parameters. Their values may be there only while a layer runs."""
        return nullcontext()

    def keep_resident(self, parameters: Collection[nn.Parameter]) -> None:
        """Keeps the values of some whole Parameters until `reshard`."""

    def unsharded_values(self) -> AbstractContextManager[None]:
        """Inside, all whole Parameters have their values; all ranks enter it together."""
        return nullcontext()

    def summed(self) -> AbstractContextManager[None]:
        """As `unsharded_values`; what is added to the p.grads of whole Parameters inside are sums of this rank."""
        return nullcontext()

    def serve(self) -> None:
        """Takes part in what other ranks need of the model until none needs anything."""

    def released(
        self, ranks: Any, noise: Any, sums: list[Tensor], std: float, divisor: float, parameters: list[nn.Parameter]
    ) -> list[Tensor]:
        """(total of all ranks' sums + noise) / divisor, on all of them, by the engine's ``ranks`` and ``noise``.

        The first sums are those of ``parameters``, which the optimizer steps (of a sharded model this rank's shards).
        """
        return ranks.release_total(noise, sums, std, divisor)

    def start_alike(self, copy: Callable[[Iterable[Tensor]], None]) -> None:
        """Makes the ranks' parameters alike; ``copy`` makes tensors those of the leading rank."""
        copy(self._model.parameters())

    def part(self, value: Any, like: Tensor) -> Any:
        """This rank's part of what was stored of the parameter ``like``, or of what an optimizer knows of it."""
        return value

    def shard_of(self, part: Tensor, like: Tensor) -> Tensor:
        """What this rank has, ``part``, of something that is sharded as the parameter ``like`` is."""
        return part


class Totals(dict[int, Tensor]):
    """{id of a Parameter: its clipped sum, float32 or wider}, over the physical batches of a logical one.

    Sums of more than FEW physical batches are added up in float64: in float32 one example could change how those of all
    after it are rounded.
    """

    def __init__(self) -> None:
        super().__init__()
        self._added = 0

    @torch.no_grad()
    def add(self, new: dict[int, Tensor]) -> None:
        """Adds the sums of a physical batch, and empties ``new``."""
        if self and (both := [owner for owner in new if owner in self]):
            if self._added >= FEW:
                self.update({owner: self._widened(self[owner]) for owner in both})
            torch._foreach_add_([self[owner] for owner in both], [new.pop(owner) for owner in both])
        self._added += 1
        self.update(new)
        new.clear()

    def _widened(self, total: Tensor) -> Tensor:
        """In float64, as a sum of many physical batches is kept."""
        return total.double()

    def clear(self) -> None:
        super().clear()
        self._added = 0

    def physical_batch(self, add: Add, new: dict[int, Tensor]) -> AbstractContextManager[Add]:
        """Around a physical batch, with what adds to its sums ``new``: ``add``, after which ranks may reduce them."""
        return nullcontext(add)

    def check(self) -> None:
        """Raises PrivacyError where the sums can't be completed."""

    def complete(self, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        """The sums of parameters that the optimizer steps, or of their shards; zeros where one took no part.

        All ranks call it together, after their last physical batch.
        """
        found = []
        for parameter in parameters:
            wide = torch.promote_types(parameter.dtype, torch.float32)
            if (total := self.get(id(parameter))) is None:
                total = torch.zeros_like(local_part(parameter), dtype=wide)
            found.append(total.to(wide))
        return found
