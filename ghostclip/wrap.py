"""Swapping layers: torch's classes to wrappers in place and back, and what stands in the way, all told at once."""

from __future__ import annotations

import importlib
import inspect
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import replace as replace_of
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn as torch_nn

from ghostclip.errors import UnsupportedModelError
from ghostclip.nn.base import LAYERS, GhostLayer
from ghostclip.nn.declared import DECLARED
from ghostclip.nn.grad_mode import keeping_grad_mode
from ghostclip.nn.normalization import instead_of_batchnorm
from ghostclip.sharding.detection import INSTEAD_OF_SHARDING, sharding_problem

__all__ = [
    "Finding",
    "check_module",
    "listed",
    "obstacles",
    "refuse_obstacles",
    "unwrap",
    "unwrapped",
    "wrap",
    "wrapped",
]

# Libraries with layers of their own: the module that has rules for them, imported on meeting one.
ELSEWHERE = {"transformers": "ghostclip.integrations.huggingface_layers"}
# What `wrap` leaves in a module.
OWN = ("ghost_path", "ghost_batch_dim")
# The hooks of clippers that `unwrap` took off a module, which has them again once it is wrapped: they go on with it.
_taken_off = weakref.WeakKeyDictionary[torch_nn.Module, list[Any]]()
# What a group of GroupNorm has at least in place of BatchNorm1d, where there are so many channels.
FEWEST_IN_GROUP = 16
# What `replace` takes; timm's BatchNormAct2d has dropout and an activation behind it, as children.
BATCHNORM = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm", "BatchNormAct2d")


@dataclass(frozen=True)
class Finding:
    """One obstacle to training a model privately.

    Attributes:
        path: the module's name in the model ("" for the model itself).
        problem: what is wrong.
        remedy: what to do about it.
        line: the line of code, "file:line: source"; "" if it isn't known.
    """

    path: str
    problem: str
    remedy: str
    line: str = ""

    def __str__(self) -> str:
        where = f" [{self.line}]" if self.line else ""
        return f"{self.path or 'the model itself'}: {self.problem}{where}; {self.remedy}"


@keeping_grad_mode
def wrap(
    model: torch_nn.Module,
    *,
    batch_dim: int | Mapping[str, int] = 0,
    replace: Mapping[str, str] | None = None,
) -> torch_nn.Module:
    """Changes the class of every layer in ``model`` to its wrapper class, in place.

    Module objects, Parameters and state_dict keys stay the same.

    Args:
        model: any torch module. Wrapping it twice changes nothing.
        batch_dim: the dimension of inputs and outputs that holds examples, for layers without a ``batch_first``
            option: an int, or {name pattern: int} for some modules.
        replace: such as {"BatchNorm2d": "GroupNorm"}: replaces layers that mix examples (timm's "BatchNormAct2d" too).
            New modules have new parameters, so build the optimizer afterwards.

    Returns:
        The same model.

    Raises:
        UnsupportedModelError: the model can't be clipped exactly. The message lists every finding of `ghostclip.check`,
            and the model is unchanged.
        ValueError, TypeError: a batch_dim or replacement that names nothing or can't be made; no module.
    """
    check_module(model)
    dims = _batch_dims(model, batch_dim)
    swaps = _replacements(model, replace or {})
    refuse_obstacles(model, swaps)
    for path, new in swaps.items():
        parent, _, child = path.rpartition(".")
        setattr(model.get_submodule(parent), child, new)
    for path, module in model.named_modules():
        if (wrapper := _wrapper_for(module)) is not None:
            module.__class__ = wrapper
        if isinstance(module, GhostLayer):
            if path:
                module.ghost_path = path
            if path in dims:
                module.ghost_batch_dim = dims[path]
        for hook in _taken_off.pop(module, ()):
            module.register_forward_pre_hook(hook, with_kwargs=True)
    return model


def unwrap(model: torch_nn.Module) -> torch_nn.Module:
    """Undoes `wrap` in place: every layer gets its plain torch class back. Returns the same model.

    The hooks by which clippers and engines note the model's calls are taken off, too, so that it can be scripted, and
    stored for programs without GhostClip. End an engine's run before (``engine.detach()``).
    """
    check_module(model)
    for module in model.modules():
        for number, hook in list(module._forward_pre_hooks.items()):
            if getattr(hook, "ghost_hook", False):
                _taken_off.setdefault(module, []).append(hook)
                module._forward_pre_hooks.pop(number, None)
                module._forward_pre_hooks_with_kwargs.pop(number, None)
        if isinstance(module, GhostLayer):
            module.__class__ = plain_class(type(module))  # type: ignore[assignment]
            for name in OWN:
                vars(module).pop(name, None)
    return model


def plain_class(kind: type[GhostLayer]) -> type[torch_nn.Module]:
    """The class that a wrapper wraps; itself for a layer that was written with its rule, without ``wraps``."""
    return getattr(kind, "wrapped", kind)


@contextmanager
def wrapped(model: torch_nn.Module) -> Iterator[torch_nn.Module]:
    """`wrap` of a model inside, which is as it was before afterwards: plain, wrapped, or built of wrappers in part."""
    before = [
        (module, type(module), {name: vars(module).get(name, module) for name in OWN}) for module in model.modules()
    ]
    try:
        yield wrap(model)
    finally:
        for module, kind, own in before:
            module.__class__ = kind
            for name, value in own.items():
                vars(module).pop(name, None)
                # The module itself stands for nothing.
                if value is not module:
                    vars(module)[name] = value


@contextmanager
def unwrapped(model: torch_nn.Module) -> Iterator[torch_nn.Module]:
    """A model with its plain torch classes inside, which has its wrappers afterwards."""
    before = [(module, type(module)) for module in model.modules() if isinstance(module, GhostLayer)]
    try:
        for module, kind in before:
            module.__class__ = plain_class(kind)  # type: ignore[assignment]
        yield model
    finally:
        for module, kind in before:
            module.__class__ = kind


def obstacles(model: torch_nn.Module) -> list[Finding]:
    """What its modules by themselves tell that keeps ``model`` from being trained privately. Changes nothing.

    Raises:
        TypeError: ``model`` is no torch module.
    """
    check_module(model)
    sharding = sharding_problem(model)
    findings = [] if sharding is None else [Finding(*sharding, INSTEAD_OF_SHARDING)]
    inside = set[int]()  # of a scripted module
    for path, module in model.named_modules():
        if id(module) in inside:
            continue
        scripted = isinstance(module, torch.jit.ScriptModule)
        inside |= {id(each) for each in module.modules()} if scripted else set()
        found = _of_scripted(module) if scripted else _obstacles(module)
        findings += [Finding(path, problem, remedy) for problem, remedy in found]
    return findings


def refuse_obstacles(model: torch_nn.Module, without: Collection[str] = ()) -> None:
    """Raises UnsupportedModelError for all `obstacles` but those of modules with paths ``without``."""
    if findings := [each for each in obstacles(model) if each.path not in without]:
        raise UnsupportedModelError(f"the model can't be clipped exactly as it is:\n{listed(findings)}")


def listed(findings: Sequence[Finding]) -> str:
    """A numbered line for each problem, with the names of all modules that have it."""
    places: dict[Finding, list[str]] = {}
    for finding in findings:
        places.setdefault(replace_of(finding, path=""), []).append(finding.path)
    names = {finding: ", ".join(path or "the model itself" for path in paths) for finding, paths in places.items()}
    # Many layers have numbers as names.
    lines = [
        replace_of(finding, path=f"module {name}" if any(places[finding]) else name) for finding, name in names.items()
    ]
    return "\n".join(f"  {number}. {line}" for number, line in enumerate(lines, 1))


def _wrapper_for(module: torch_nn.Module) -> type | None:
    """The wrapper for a module, of its class or as declared; None when there is none."""
    found = type(module)
    if issubclass(found, GhostLayer):
        return None
    if found in DECLARED:
        return DECLARED[found]
    library = found.__module__.partition(".")[0]
    if library in ELSEWHERE and found not in LAYERS:
        importlib.import_module(ELSEWHERE[library]).register(found)
    return LAYERS.get(found) or _wrapper_of_subclass(found)


def _wrapper_of_subclass(found: Any) -> type | None:
    """A wrapper made for a subclass of a torch class that keeps or calls its forward; else None.

    The parent's rule is that of the parent's call. What else a forward does with its parameters is in the graph, where
    they are followed.
    """
    base = next((base for base in found.__mro__[1:] if base in LAYERS), None)
    if base is None or getattr(found, "_conv_forward", None) is not getattr(base, "_conv_forward", None):
        return None
    content = {"wrapped": found, "__module__": found.__module__}
    if found.forward is base.forward and found.__call__ is base.__call__:
        return type(found.__name__, (LAYERS[base], found), content)
    code = getattr(inspect.unwrap(found.forward), "__code__", None)
    if code is not None and {"super", "forward"} <= set(code.co_names):
        return type(found.__name__, (found, LAYERS[base]), content)
    return None


def _of_scripted(module: torch_nn.Module) -> Iterator[tuple[str, str]]:
    """The same for one that torch.jit compiled; none where nothing in it is trained, and no mode of training is on."""
    if getattr(module, "training", False) or any(parameter.requires_grad for parameter in module.parameters()):
        yield (
            f"{type(module).__name__} is compiled by torch.jit, which hides its layers",
            "give the model that it was made of, and script ghostclip.unwrap(model) after the training; or freeze it, "
            "and call its .eval()",
        )


def _obstacles(module: torch_nn.Module) -> Iterator[tuple[str, str]]:
    """(problem, remedy) for one module by itself."""
    kind = type(module).__name__
    if isinstance(module, torch_nn.modules.lazy.LazyModuleMixin) and module.has_uninitialized_params():
        yield f"{kind} has no sizes yet", "run one batch through the model before wrapping it"
        return
    wrapper: Any = type(module) if isinstance(module, GhostLayer) else _wrapper_for(module)
    trained = [parameter for parameter in module.parameters(recurse=False) if parameter.requires_grad]
    if wrapper is not None:
        if trained or wrapper.checked_when_frozen:
            for problem, remedy in wrapper.obstacles(module):
                yield f"{kind}: {problem}", remedy
    elif isinstance(module, torch_nn.DataParallel):
        yield (
            "DataParallel runs copies of the model in threads, which per-example gradients can't be had of",
            "give its .module; for several devices start a process for each, with DistributedDataParallel",
        )
    elif any(each.__module__.startswith("opacus.grad_sample") for each in type(module).__mro__):
        yield f"{kind} of Opacus has hooks on the layers", "take them off: model = model.to_standard_module()"
    elif isinstance(module, torch_nn.modules.batchnorm._BatchNorm) and module.training:
        known = kind in BATCHNORM
        remedy = (
            instead_of_batchnorm(kind)
            if known
            else "use GroupNorm in its place, or keep it in eval mode (after model.train(), call its own .eval())"
        )
        yield f"{kind} mixes the examples of a batch", remedy
    elif (threshold := _outlier_threshold(module)) > 0.0:
        yield (
            f"{kind} computes a feature in another precision as soon as one example of the batch has a value above "
            f"{threshold:g} there, which mixes examples",
            "load the model with BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0), or in 4 bits",
        )
    elif (
        module.training
        and getattr(module, "track_running_stats", False)
        and getattr(module, "running_mean", None) is not None
    ):
        yield f"{kind} updates running statistics from private data", "set track_running_stats=False"
    if module._compiled_call_impl is not None or kind == "OptimizedModule":
        yield (
            f"{kind} is compiled by torch.compile, which hides what happens to each example",
            "give the model without torch.compile, and call engine.compile() for compiled steps",
        )
    if any(parameter.is_complex() for parameter in trained):
        yield f"{kind} has complex parameters", "use real ones: norms and noise are defined for those"


def _outlier_threshold(module: Any) -> float:
    """From which value on a layer of int8 numbers, of bitsandbytes, takes a feature for an outlier; 0 where none is."""
    if not type(module).__module__.startswith("bitsandbytes."):
        return 0.0
    return float(getattr(getattr(module, "state", None), "threshold", 0.0))


def check_module(model: Any) -> None:
    """Raises TypeError for a model that is no torch module."""
    if not isinstance(model, torch_nn.Module):
        raise TypeError(f"model must be a torch.nn.Module; got {type(model).__name__}")


def _batch_dims(model: torch_nn.Module, batch_dim: int | Mapping[str, int]) -> dict[str, int]:
    """Which module paths get which batch dimension."""
    names = [path for path, _ in model.named_modules()]
    patterns = {"*": batch_dim} if isinstance(batch_dim, int) else batch_dim
    if not isinstance(patterns, Mapping):
        raise TypeError(f"batch_dim must be an int or {{name pattern: int}}; got {batch_dim!r}")
    found: dict[str, int] = {}
    for pattern, dim in patterns.items():
        if isinstance(dim, bool) or not isinstance(dim, int) or dim < 0:
            raise ValueError(f"batch_dim must be a dimension >= 0; got {dim!r} for {pattern!r}")
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            raise ValueError(
                f"batch_dim names {pattern!r}, but no module of the model has such a name; take names of "
                "model.named_modules(), or patterns such as 'encoder.*'"
            )
        found.update(dict.fromkeys(matching, dim))
    return {name: dim for name, dim in found.items() if dim != 0 or not isinstance(batch_dim, int)}


def _replacements(model: torch_nn.Module, replace: Mapping[str, str]) -> dict[str, torch_nn.Module]:
    """New modules by path, made but not yet put in place."""
    if not isinstance(replace, Mapping):
        raise TypeError(f'replace must be a dict such as {{"BatchNorm2d": "GroupNorm"}}; got {replace!r}')
    for old, new in replace.items():
        if old not in BATCHNORM or new not in ("GroupNorm", "LayerNorm", "Identity"):
            raise ValueError(
                f"replace turns {', '.join(BATCHNORM)} into GroupNorm, LayerNorm or Identity; got {old!r}: {new!r}"
            )
    found: dict[str, torch_nn.Module] = {}
    for path, module in model.named_modules():
        wanted = replace.get(getattr(module, "wrapped", type(module)).__name__)
        if wanted is None or not isinstance(module, torch_nn.modules.batchnorm._BatchNorm):
            continue
        if not path:
            raise ValueError("replace can't replace the model itself; put it into a Sequential first")
        channels, reference = module.num_features, next(module.parameters(), torch.empty(0))
        # LayerNorm over channels and positions is GroupNorm with one group, and needs no spatial size.
        most = 1 if wanted == "LayerNorm" else min(32, channels)
        if isinstance(module, torch_nn.BatchNorm1d):  # which may have no positions: a group of one value is always 0
            most = min(most, max(1, channels // FEWEST_IN_GROUP))
        groups = max(g for g in range(1, most + 1) if channels % g == 0)
        norm = torch_nn.GroupNorm(groups, channels, module.eps, module.affine, reference.device, reference.dtype)
        found[path] = torch_nn.Identity() if wanted == "Identity" else norm
        if behind := dict(module.named_children()):
            found[path] = torch_nn.Sequential(OrderedDict({"norm": found[path], **behind}))
    if replace and not found:
        warnings.warn(f"replace named {', '.join(replace)}, but the model has none", stacklevel=3)
    return found
