"""Several processes that train one model: what they tell each other, so that all take a step or none does.

Rank 0 of them leads: it alone draws the noise and charges. Whatever differs between ranks where it must not, and
whatever fails on one of them, becomes an error on all before anything is released. The engine adds up the ranks'
clipped sums itself, once a step and before the noise, however many physical batches each rank has.
DistributedDataParallel, which would average gradients after each backward, is kept from it and is a plain wrapper then.
Of a model sharded by FSDP2 each rank draws the noise of its own shards (`ghostclip.sharding.fsdp2`).
"""

from __future__ import annotations

import enum
import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ghostclip import errors
from ghostclip.errors import PrivacyError
from ghostclip.noise import Noise
from ghostclip.noise.cipher import KEY_BYTES
from ghostclip.noise.release import flat, on_flat
from ghostclip.sharding.detection import check_sharding, is_fully_sharded, mesh_group
from ghostclip.sharding.plain import Sharding, is_distributed

__all__ = ["Ranks", "keep_unsynchronised", "ranks_of"]

T = TypeVar("T")
# What is raised on the other ranks as what it was on one.
KINDS = {name: kind for name in errors.__all__ if isinstance(kind := getattr(errors, name), type)}
KINDS |= {kind.__name__: kind for kind in (ValueError, TypeError, OSError, MemoryError, ModuleNotFoundError)}


class Word(enum.Enum):
    """The message of this rank that other ranks may be waiting for, in the current logical batch."""

    AWAITED = "its facts, or a failure"
    GIVEN = "nothing until the next batch"
    REFUSED = "nothing: it refused the next batch, too"


class Ranks:
    """The processes of a group, each with an engine of its own over the same model and data; or one that is alone.

    Args:
        group: of torch.distributed; None: all processes.

    Attributes:
        size: how many processes there are; one that is alone agrees with itself.
        leads: whether this one draws the noise and charges.
        sharding: of the parameters of the clipper's model; none before there is a clipper.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self.rank, self.size = (dist.get_rank(group), dist.get_world_size(group)) if is_distributed() else (0, 1)
        self._world_size = _world_size()
        self.leads, self._word = self.rank == 0, Word.AWAITED
        self.sharding = Sharding(nn.Module())
        self._leader = 0 if group is None else dist.get_global_rank(group, 0)

    def begin(self) -> None:
        """A logical batch begins, or none."""
        self._word = Word.AWAITED

    def check_alone(self) -> None:
        """Raises PrivacyError where processes have joined since the engine was built for one that is alone."""
        if _world_size() > self._world_size:
            raise PrivacyError(
                "processes were joined after this PrivacyEngine was built, which samples, charges and draws noise for "
                "its own process alone; call torch.distributed.init_process_group() first and build the engine then"
            )

    def agree(self, facts: Mapping[str, Any], last: bool = True) -> list[dict[str, Any]]:
        """The facts of all ranks about the current logical batch; all of several ranks call it together.

        Args:
            facts: of this rank; "same": what must be the same on all.
            last: whether no rank waits for another's facts after these, until the next batch.

        Raises:
            PrivacyError: another rank failed, or ranks differ in what must be the same.
        """
        self._word = Word.GIVEN
        said = self.all_gathered({"failed": None, **facts})
        for rank, each in enumerate(said):
            if each["failed"] is not None:
                raise PrivacyError(
                    f"nothing was released, because rank {rank} failed: {each['failed'][1]} ({each['failed'][0]} there)"
                )
        _refuse_differences([each.get("same", {}) for each in said], "at every step")
        self._word = Word.GIVEN if last else Word.AWAITED
        return said

    def agreed(self, work: Callable[[], T]) -> T:
        """What ``work`` returns here, once it has come to an end on all ranks; raises as `agree`, or as ``work``."""
        if self.size == 1:
            self.check_alone()
            return work()
        try:
            done = work()
        except Exception as problem:
            self._refuse(problem)
            raise
        self.agree({})
        return done

    def report_failure(self, problem: Exception) -> None:
        """Sends this rank's failure to ranks that wait in `agree` for the current batch, which then raise it, too."""
        if self._word is Word.AWAITED:
            self._word = Word.GIVEN
            self._refuse(problem)

    def refuse_next(self, problem: Exception) -> None:
        """This rank takes no further batch: refuses, once, what the others agree on next; they may have taken one."""
        if self._word is not Word.REFUSED:
            self._word = Word.REFUSED
            self._refuse(problem)

    def _refuse(self, problem: Exception) -> None:
        """Takes part in the `agree` that the other ranks wait in, with what failed here; raises nothing for it."""
        if self.size > 1:
            self.all_gathered({"failed": _told(problem)})

    def check_alike(self, facts: Mapping[str, Any], where: str) -> None:
        """Raises PrivacyError unless all ranks have the same facts; ``where`` they must."""
        _refuse_differences(self.all_gathered(facts), where)

    def led(self, work: Callable[[], T]) -> T:
        """What ``work`` returns on the leading rank, where alone it runs; raises on all ranks what it raises."""
        if self.size == 1:
            return work()
        self.sharding.serve()
        told: list[Any] = [None, None]
        problem: Exception | None = None
        if self.leads:
            try:
                told[1] = work()
            except Exception as error:
                told[0], problem = _told(error), error
        dist.broadcast_object_list(told, self._leader, self._group)
        if problem is not None:
            raise problem
        if told[0] is not None:
            kind, message = told[0]
            raise KINDS[kind](f"{message} (on rank 0, which leads)")
        return told[1]

    def all_gathered(self, value: T) -> list[T]:
        """The values of all ranks, in their order; plain data."""
        found: list[Any] = [value] * self.size
        if self.size > 1:
            self.sharding.serve()
            dist.all_gather_object(found, value, self._group)
        return found

    @torch.no_grad()
    def release_total(self, noise: Noise, sums: list[Tensor], std: float, divisor: float) -> list[Tensor]:
        """(total of all ranks' sums + noise) / divisor, on all of them; the leading rank draws the noise."""
        if self.size == 1:
            return noise.release(sums, std, divisor)

        def total(some: list[Tensor]) -> Tensor:
            dist.all_reduce(numbers := flat(some), group=self._group)
            return numbers

        totals = on_flat(sums, total)

        def work() -> None:
            totals[:] = noise.release(totals, std, divisor)

        self.led(work)
        return self.spread(totals)

    @torch.no_grad()
    def spread(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The leading rank's tensors, on all; those of other ranks say which shapes and types to expect."""

        def given(some: list[Tensor]) -> Tensor:
            dist.broadcast(numbers := flat(some), self._leader, self._group)
            return numbers

        return on_flat(tensors, given)

    @torch.no_grad()
    def start_alike(self, model: nn.Module) -> None:
        """Parameters and buffers of all ranks become the leading one's, as DistributedDataParallel has it."""
        self.sharding.start_alike(self._copy_leading)
        self._copy_leading(model.buffers())

    def _copy_leading(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            tensor.copy_(self.spread([tensor.detach().clone()])[0])

    def whole(self, value: Any) -> Any:
        """The full tensor of a DTensor, on the leading rank; other values as they are. All ranks call it together."""
        if not hasattr(value, "full_tensor"):
            return value
        found = value.full_tensor()
        return found.cpu() if self.leads else found.new_empty(0)  # of sharded ones, nothing on the others

    def generators(self, source: Noise) -> Callable[[], Any]:
        """Makes generators for sampling, the same on all ranks, one after another."""
        if self.size == 1:
            return source.generator
        key, made = self.led(lambda: os.urandom(KEY_BYTES)), itertools.count(1)
        return lambda: source.generator(hashlib.sha256(key + next(made).to_bytes(8, "big")).digest())


def _world_size() -> int:
    """How many processes are joined, whatever group they train in."""
    return dist.get_world_size() if is_distributed() else 1


def _told(problem: Exception) -> tuple[str, str]:
    """The nearest kind of error that all ranks know, and the message."""
    kind = next((kind.__name__ for kind in type(problem).__mro__ if KINDS.get(kind.__name__) is kind), None)
    if kind is None:
        return PrivacyError.__name__, f"{type(problem).__name__}: {problem}"
    return kind, str(problem)


def _refuse_differences(said: Sequence[Mapping[str, Any]], where: str) -> None:
    """Raises PrivacyError unless all ranks say the same; the first thing in which they differ is named."""
    for name in dict.fromkeys(name for each in said for name in each):
        values = [each.get(name, "nothing") for each in said]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            raise PrivacyError(
                f"the ranks must agree on {name} {where}; rank 0 has {values[0]} and rank {other} {values[other]}"
            )


def ranks_of(model: nn.Module, process_group: Any = None) -> Ranks:
    """The processes that train ``model``: those it is sharded over or its DistributedDataParallel's, the given, or all.

    Raises:
        UnsupportedModelError: the model is sharded in a way that can't be gathered.
        PrivacyError: its DistributedDataParallel exchanges the parameters for others, or has another group.
        ValueError: a group is given, and no processes are joined.
    """
    check_sharding(model)
    if process_group is not None and not is_distributed():
        raise ValueError(
            "process_group is for processes that torch.distributed.init_process_group() joined, and this one is alone; "
            "call that first, or leave process_group out"
        )
    if is_fully_sharded(model):
        return Ranks(mesh_group(model, process_group))
    wrappers = _wrappers(model)
    for name, wrapper in wrappers.items():
        if wrapper.mixed_precision is not None:
            raise PrivacyError(
                f"{name or 'the model'} is wrapped in DistributedDataParallel with mixed_precision, which exchanges "
                "the parameters for others in each forward; use torch.autocast in the loss function instead"
            )
        if wrapper.static_graph:
            raise PrivacyError(
                f"{name or 'the model'} is wrapped in DistributedDataParallel with static_graph=True, which waits for "
                "gradients that the engine adds up itself; leave it out"
            )
    groups = [wrapper.process_group for wrapper in wrappers.values()]
    if process_group is not None and any(group is not process_group for group in groups):
        raise PrivacyError(
            "process_group isn't the one that the model's DistributedDataParallel was built with; leave it out, or "
            "build both with the same"
        )
    if not is_distributed():
        return Ranks()
    group = process_group if process_group is not None else next(iter(groups), None)
    if dist.get_rank(group) < 0:
        raise PrivacyError("this process is not in process_group; build the engine in its members only")
    return Ranks(group)


def _wrappers(model: nn.Module) -> dict[str, DistributedDataParallel]:
    return {name: module for name, module in model.named_modules() if isinstance(module, DistributedDataParallel)}


def keep_unsynchronised(model: nn.Module) -> Callable[[], None]:
    """Has no DistributedDataParallel reduce the gradients of ``model``; returns what undoes it.

    A forward through one that does, built around the model later or told to, raises PrivacyError.
    """
    wrappers = list(_wrappers(model).values())
    before = [(wrapper.require_backward_grad_sync, wrapper.require_forward_param_sync) for wrapper in wrappers]
    for wrapper in wrappers:
        # The first forward of a wrapper exchanges buffers even so: ranks without an example in it would be waited for.
        wrapper.require_backward_grad_sync = wrapper.require_forward_param_sync = False
    watched = [model, *(wrapper.module for wrapper in wrappers)] if is_distributed() else []
    hooks = [module.register_forward_pre_hook(_refuse_averaging) for module in watched]

    def undo() -> None:
        for wrapper, settings in zip(wrappers, before, strict=True):
            wrapper.require_backward_grad_sync, wrapper.require_forward_param_sync = settings
        for hook in hooks:
            hook.remove()

    return undo


def _refuse_averaging(module: nn.Module, _: Any) -> None:
    """Raises PrivacyError in a forward whose backward would average gradients. A model with it can still be pickled."""
    active = DistributedDataParallel._active_ddp_module
    if active is not None and active.require_backward_grad_sync and torch.is_grad_enabled():
        raise PrivacyError(
            "the model was called inside of a DistributedDataParallel that averages its gradients, which the engine "
            "adds up itself; give the engine that wrapper as model=, or call the model without it"
        )
