"""Model, optimizer, configuration and random states as a checkpoint holds them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from ghostclip.errors import PrivacyError

__all__ = [
    "configuration_of",
    "describe_model",
    "in_words",
    "optimizer_state",
    "put_optimizer_state",
    "random_states",
    "set_random_states",
]


def describe_model(state: Mapping[str, Any]) -> dict[str, Any]:
    """{name: shape and type} of what a model has."""
    return {
        name: f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}" if isinstance(value, Tensor) else "state"
        for name, value in state.items()
    }


def configuration_of(model: nn.Module, optimizer: Optimizer, policy: Any) -> dict[str, Any]:
    """What of model, optimizer and clipping must be the same for a checkpoint to fit, as JSON."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    return {
        "the optimizer's class": _name(type(optimizer)),
        **{f"the optimizer's group {number}": group for number, group in enumerate(groups)},
        "trained": [name for name, parameter in model.named_parameters() if parameter.requires_grad],
        "clipping": in_words(policy),
    }


def in_words(value: Any) -> str:
    """A policy, a sampling scheme or a value of theirs, the same in every process and without what training changes."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {in_words(item)}" for key, item in value.items()) + "}"
    if value is None or isinstance(value, bool | int | float | str | list | tuple):
        return repr(value)
    if callable(value) and hasattr(value, "__qualname__"):
        return _name(value)
    state = value.state_dict() if hasattr(value, "state_dict") else {}
    if is_dataclass(value):
        names = [item.name for item in fields(value) if item.repr]
    else:
        names = [name for name in vars(value) if name[0] != "_"]
    settings = [f"{name}={in_words(getattr(value, name))}" for name in names if name not in state]
    return f"{type(value).__name__}({', '.join(settings)})"


def _name(thing: Any) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"


def optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's ``state_dict()``; PrivacyError when it isn't a dict."""
    state = optimizer.state_dict()
    if not isinstance(state, dict) or not {"state", "param_groups"} <= set(state):
        raise PrivacyError(
            f"{_name(type(optimizer))}.state_dict() has not the form of torch's optimizers, so it can't be saved"
        )
    return state


def put_optimizer_state(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """The same as ``load_state_dict``, but every tensor keeps the type it had: torch casts them to the parameter's."""
    optimizer.load_state_dict(state)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    for parameter, number in zip(parameters, numbers, strict=True):
        if number in state["state"] and parameter in optimizer.state:  # not where it is an inner optimizer's
            optimizer.state[parameter] = tree_map(_typed, optimizer.state[parameter], state["state"][number])


def _typed(loaded: Any, stored: Any) -> Any:
    """``loaded``; a tensor of another type than stored is replaced by what was stored, on the same device."""
    if not isinstance(loaded, Tensor) or loaded.dtype == stored.dtype:
        return loaded
    return stored.to(loaded.device)


def random_states() -> dict[str, Any]:
    """Those of torch (each GPU in use included), numpy and Python, as plain data and tensors.

    Of dropout and data augmentation, never of sampling or noise.
    """
    name, keys, place, has_normal, normal = np.random.get_state()
    version, words, next_normal = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "numpy": [str(name), torch.from_numpy(np.asarray(keys).astype(np.int64)), place, has_normal, normal],
        "python": [version, torch.tensor(words, device="cpu"), next_normal],
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Takes back what `random_states` gave; GPUs that aren't there are left out."""
    torch.set_rng_state(states["torch"])
    for device, state in enumerate(states["cuda"]):
        if device < torch.cuda.device_count():
            torch.cuda.set_rng_state(state, device)
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    version, words, next_normal = states["python"]
    random.setstate((version, tuple(words.tolist()), next_normal))
