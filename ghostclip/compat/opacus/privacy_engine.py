"""Opacus's PrivacyEngine: its arguments and results over the engine, samplers and charges of this package."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ghostclip.clipping import Grouped
from ghostclip.compat.opacus.accountants import Accountant, create_accountant
from ghostclip.compat.opacus.backward import ScalarLosses, TrialHook, ZeroGrad
from ghostclip.compat.opacus.checkpoints import load_opacus_names
from ghostclip.compat.opacus.core import CoreEngine, expected_batch_size
from ghostclip.compat.opacus.criteria import reduced
from ghostclip.compat.opacus.loaders import DPDataLoader
from ghostclip.compat.opacus.optimizer import DPOptimizer
from ghostclip.compat.opacus.validators import ModuleValidator
from ghostclip.errors import PrivacyError
from ghostclip.events import FixedSizeGaussian, SampledGaussian, SampledRelease
from ghostclip.sampling.loading import size_of
from ghostclip.sharding.plain import is_distributed
from ghostclip.validate import one_of, open_fraction, positive, positive_int
from ghostclip.wrap import wrap

__all__ = ["OpacusEngine", "Options"]

# Ways to per-example gradients in Opacus; all give the same clipped sums, and "ghost" has the criterion returned, too.
MODES = ("hooks", "functorch", "ew", "ghost")


@dataclass(frozen=True)
class Options:
    """The keyword options of `OpacusEngine.make_private`, where they are described, checked when they are built.

    Raises:
        ValueError: a value that this engine doesn't support.
    """

    batch_first: bool = True
    loss_reduction: str = "mean"
    poisson_sampling: bool = True
    clipping: str = "flat"
    noise_generator: torch.Generator | None = None
    grad_sample_mode: str = "hooks"
    wrap_model: bool = True
    rand_on_empty: bool = False

    def __post_init__(self) -> None:
        one_of(("mean", "sum"), loss_reduction=self.loss_reduction)
        if self.clipping not in ("flat", "per_layer"):
            raise ValueError(
                f'clipping must be "flat" or "per_layer"; got {self.clipping!r}. Adaptive clipping: '
                "ghostclip.PrivacyEngine(clipping=ghostclip.clipping.Adaptive(...))"
            )
        if self.grad_sample_mode not in MODES:
            raise ValueError(
                f"grad_sample_mode must be one of {MODES}; got {self.grad_sample_mode!r}. For per-example gradients of "
                "your own: ghostclip.GhostClipper(model).per_example_grads(losses)"
            )
        if not self.wrap_model:
            raise ValueError("wrap_model must be left out: the model stays the same object, and nothing is around it")

    @property
    def sampling(self) -> str:
        """The engine's name for it."""
        return "poisson" if self.poisson_sampling else "without_replacement"


class OpacusEngine:
    """Opacus's PrivacyEngine: makes model, optimizer and data loader private, for a loop with ``loss.backward()``.

    The loss must be the mean, or the sum, of one loss per example. A loss that mixes examples (a mean over all tokens
    of the batch, a contrastive loss) makes the guarantee wrong. The engine can't see this in a single number;
    `ghostclip.PrivacyEngine` takes the losses [B] and can.

    Args:
        accountant: how `get_epsilon` computes epsilon: "prv" (by privacy loss distributions) or "rdp" (by Rényi
            divergences).
        secure_mode: draw the noise from a cipher and release numbers on a lattice, as ``noise="hardened"`` of
            `ghostclip.PrivacyEngine`.

    Raises:
        ValueError: ``accountant`` has another value.
    """

    def __init__(self, *, accountant: str = "prv", secure_mode: bool = False) -> None:
        self._accountant = create_accountant(accountant)
        self.secure_mode = secure_mode
        self._engines: list[CoreEngine] = []
        self._undo: list[Any] = []

    @property
    def accountant(self) -> Accountant:
        """The accountant of all models that this engine made private.

        An `RDPAccountant` or `PRVAccountant` that is assigned takes over what the one before it counted. Any other
        object raises TypeError.
        """
        return self._accountant

    @accountant.setter
    def accountant(self, other: Accountant) -> None:
        if not isinstance(other, Accountant):
            raise TypeError(
                f"accountant must be an RDPAccountant or a PRVAccountant of ghostclip.compat.opacus; got {other!r}. "
                "accountant.load_state_dict(...) adds what another one counted"
            )
        if other is not self._accountant:
            other.take_over(self._accountant)
            self._accountant = other

    def make_private(
        self, *, module: nn.Module, optimizer: Optimizer, data_loader: DataLoader[Any], noise_multiplier: float,
        max_grad_norm: float | list[float], criterion: Any = None, **options: Any,
    ) -> tuple[Any, ...]:  # fmt: skip
        """Makes a model, its optimizer and its data loader private, and returns them.

        An epoch has ``len(data_loader)`` steps. Each draws a random batch, to which each example belongs with
        probability ``1 / len(data_loader)``.

        Args:
            module: any torch model. Its layers are wrapped in place. The returned model is the same object, and so is
                its attribute ``_module``.
            optimizer: over parameters of ``module``.
            data_loader: of a map-style dataset. Its ``collate_fn`` is kept and its sampler replaced.
            noise_multiplier: standard deviation of the noise over the sensitivity.
            max_grad_norm: the clipping norm; with ``clipping="per_layer"`` a list of norms, one per trained parameter.
            criterion: with ``grad_sample_mode="ghost"`` only. What is returned for it computes one loss for each
                example, and their mean or sum. None: CrossEntropyLoss.
            options: Opacus's keyword arguments.
                ``batch_first`` (True): whether dimension 0 holds the examples in layers that have no ``batch_first``
                of their own; else dimension 1 does.
                ``loss_reduction`` ("mean"): the loss is the "mean" or the "sum" of the examples' losses. Noisy sums
                aren't divided by the expected batch size.
                ``poisson_sampling`` (True): False draws batches of one size without replacement, anew for each
                step, and charges them as such.
                ``clipping`` ("flat"): or "per_layer", a threshold for each trained parameter.
                ``noise_generator`` (None): a generator whose initial seed makes noise and batches repeatable. Then
                epsilon is inf.
                ``grad_sample_mode`` ("hooks"): also "functorch", "ew" or "ghost". All give the same sums; "ghost"
                returns a criterion too.
                ``rand_on_empty`` (False): True hands out a batch of one row of ones in place of an empty one, for
                models that can't take 0 rows. Its gradients are dropped.
                ``wrap_model`` (True) takes no other value.

        Returns:
            (module, optimizer, data_loader), or (module, optimizer, criterion, data_loader) with
            ``grad_sample_mode="ghost"``. The optimizer is a `DPOptimizer`, the data loader a `DPDataLoader`.

        Raises:
            PrivacyError: several processes train together, or `ghostclip.PrivacyEngine` raises it.
            UnsupportedModelError: the model can't be clipped exactly; every obstacle is listed.
            ValueError, TypeError: an argument is unknown, out of range or not supported.
        """
        chosen = _chosen(options)
        reducing = reduced(criterion, chosen.loss_reduction) if chosen.grad_sample_mode == "ghost" else None
        optimizer = optimizer.original_optimizer if isinstance(optimizer, DPOptimizer) else optimizer
        data_loader = data_loader.given if isinstance(data_loader, DPDataLoader) else data_loader
        expected = expected_batch_size(_examples_in(data_loader), len(data_loader))
        mean, batch_dims = chosen.loss_reduction == "mean", (0,) if chosen.batch_first else (1, 0)
        wrap(module, batch_dim=batch_dims[0])
        engine = CoreEngine(
            module, optimizer, data_loader, batch_size=expected if mean else 1, noise_multiplier=noise_multiplier,
            clipping=_policy(module, max_grad_norm, chosen.clipping), sampling=chosen.sampling,
            counted_by=self.accountant, **self._noise(chosen.noise_generator),
        )  # fmt: skip
        self._engines.append(engine)
        losses = self._attach(module, engine, mean, batch_dims)
        private = DPOptimizer(optimizer, engine, losses, loss_reduction=chosen.loss_reduction,
                              expected_batch_size=expected)  # fmt: skip
        self._undo.append(private.handle)
        loader = DPDataLoader(engine, data_loader, chosen.rand_on_empty)
        return (module, private, loader) if reducing is None else (module, private, reducing, loader)

    def make_private_with_epsilon(
        self, *, module: nn.Module, optimizer: Optimizer, data_loader: DataLoader[Any], target_epsilon: float,
        target_delta: float, epochs: int, max_grad_norm: float | list[float], **options: Any,
    ) -> tuple[Any, ...]:  # fmt: skip
        """Calls `make_private` with the least noise that keeps ``epochs`` epochs within ``target_epsilon``.

        As in Opacus, steps taken before aren't counted in the target, and further epochs are not refused: they spend
        more than the target, which `get_epsilon` tells.

        Args:
            target_epsilon: by this engine's accountant; finite, > 0.
            target_delta: in (0, 1).
            epochs: passes over ``data_loader``, >= 1.
            module, optimizer, data_loader, max_grad_norm, options: as for `make_private`.

        Returns:
            As `make_private`.

        Raises:
            ValueError: no noise reaches the target, or an argument is out of range.
            PrivacyError, UnsupportedModelError, TypeError, ModuleNotFoundError: as `make_private`.
        """
        data_loader = data_loader.given if isinstance(data_loader, DPDataLoader) else data_loader
        examples, steps = _examples_in(data_loader), len(data_loader)
        kind: type[SampledRelease] = SampledGaussian
        rate = 1 / steps
        if not options.get("poisson_sampling", True):
            kind, rate = FixedSizeGaussian, expected_batch_size(examples, steps) / examples
        planned = kind(rate, 1.0, positive_int(epochs=epochs) * steps)
        noise = self.accountant.noise_for(planned, target_epsilon, open_fraction(target_delta=target_delta))
        return self.make_private(
            module=module, optimizer=optimizer, data_loader=data_loader, noise_multiplier=noise,
            max_grad_norm=max_grad_norm, **options,
        )  # fmt: skip

    def get_epsilon(self, delta: float) -> float:
        """The epsilon spent so far at ``delta``, by this engine's accountant: 0 before the first step.

        It is inf as soon as one step had no noise or ``noise_generator`` noise.

        Raises:
            ValueError: ``delta`` isn't in (0, 1).
            PrivacyError: trained parameters changed outside of steps, see `accept_parameters`.
        """
        return self.accountant.get_epsilon(delta)

    def accept_parameters(self) -> None:
        """Accepts trained parameters that were changed outside of steps, if no private data went into the change.

        Examples: a loaded state dict, steps on public data.

        Raises:
            PrivacyError: a logical batch is unfinished, or parameters were replaced or changed their type.
        """
        for engine in self._engines:
            engine.accept_parameters()

    def detach(self) -> None:
        """Removes the hooks from all models and optimizers, whose later steps are not private.

        The accountant keeps what was spent.
        """
        while self._engines:
            self._engines.pop().detach()
        while self._undo:
            self._undo.pop().remove()

    def is_compatible(self, *, module: nn.Module, **_: Any) -> bool:
        """Whether the model can be trained privately; see `ModuleValidator.is_valid`."""
        return ModuleValidator.is_valid(module)

    def validate(self, *, module: nn.Module, **_: Any) -> None:
        """Checks that the model can be trained privately.

        Raises:
            UnsupportedModelError: it can't; every obstacle is listed.
        """
        ModuleValidator.validate(module, strict=True)

    @classmethod
    def get_compatible_module(cls, module: nn.Module) -> nn.Module:
        """A copy of the model that can be trained privately; see `ModuleValidator.fix`.

        Raises:
            UnsupportedModelError: an obstacle remains after the replacements.
        """
        return ModuleValidator.fix_and_validate(module)

    def save_checkpoint(
        self, *, path: str | os.PathLike[str], module: nn.Module, optimizer: Optimizer | None = None,
        checkpoint_dict: Mapping[str, Any] | None = None, module_state_dict_kwargs: Mapping[str, Any] | None = None,
        torch_save_kwargs: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """Writes the state dicts of model, accountant and optimizer to a file, by ``torch.save``.

        Args:
            path: of the file, or what else ``torch.save`` takes.
            module, optimizer: whose states are saved; an optimizer of None is left out.
            checkpoint_dict: {name: value} to save beside them.
            module_state_dict_kwargs, torch_save_kwargs: arguments of ``module.state_dict`` and ``torch.save``.
        """
        states = {
            "module_state_dict": module.state_dict(**(module_state_dict_kwargs or {})),
            "privacy_accountant_state_dict": self.accountant.state_dict(),
        }
        if optimizer is not None:
            states["optimizer_state_dict"] = optimizer.state_dict()
        torch.save({**(checkpoint_dict or {}), **states}, path, **(torch_save_kwargs or {}))

    def load_checkpoint(
        self, *, path: str | os.PathLike[str], module: nn.Module, optimizer: Optimizer | None = None,
        module_load_dict_kwargs: Mapping[str, Any] | None = None, torch_load_kwargs: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Loads a file that `save_checkpoint`, of this class or of Opacus, wrote.

        Steps in the file are added to those that the accountant counted, never put in their place.

        Args:
            path: of the file. It is read with ``weights_only=True``: tensors and plain data.
            module, optimizer: whose states are loaded; parameters may have Opacus's names.
            module_load_dict_kwargs: arguments of ``module.load_state_dict``, as ``{"strict": False}``.
            torch_load_kwargs: arguments of ``torch.load``, as ``{"map_location": "cpu"}``.

        Returns:
            All that the file holds.

        Raises:
            PrivacyError: a logical batch is unfinished.
            KeyError: the file lacks the state of the model, the accountant or the optimizer; nothing was loaded.
        """
        stored = torch.load(path, **{**(torch_load_kwargs or {}), "weights_only": True})
        needed = ("privacy_accountant_state_dict", "module_state_dict", "optimizer_state_dict")
        if missing := [name for name in needed[: 2 + (optimizer is not None)] if name not in stored]:
            raise KeyError(
                f"{path} has no {', '.join(missing)}; load what save_checkpoint() wrote, and give the optimizer to "
                "both or to neither"
            )
        self.accountant.load_state_dict(stored["privacy_accountant_state_dict"])
        module.load_state_dict(stored["module_state_dict"], **(module_load_dict_kwargs or {}))
        if optimizer is not None:
            optimizer.load_state_dict(stored["optimizer_state_dict"])
        self.accept_parameters()
        return stored

    def _noise(self, generator: torch.Generator | None) -> dict[str, Any]:
        """The engine's arguments for noise."""
        if generator is None:
            return {"noise": "hardened" if self.secure_mode else "standard"}
        if self.secure_mode:
            raise ValueError("noise_generator makes noise repeatable, and secure_mode unpredictable; leave one out")
        return {"noise": "test", "seed": generator.initial_seed()}

    def _attach(self, module: nn.Module, engine: CoreEngine, mean: bool, batch_dims: tuple[int, ...]) -> ScalarLosses:
        """Puts the hooks on the model."""
        losses = ScalarLosses(engine, mean, batch_dims)
        self._undo += [
            module.register_forward_pre_hook(TrialHook(losses), with_kwargs=True),
            module.register_forward_hook(losses, with_kwargs=True),
            module.register_load_state_dict_pre_hook(load_opacus_names),
            ZeroGrad(module, losses),
        ]
        # As a plain attribute: a submodule would be one of itself.
        vars(module)["_module"] = module
        return losses


def _chosen(options: Mapping[str, Any]) -> Options:
    """The options of ``make_private``; TypeError for a name that isn't among them, after what `Options` raises."""
    known = [each.name for each in fields(Options)]
    chosen = Options(**{name: value for name, value in options.items() if name in known})
    if unknown := [name for name in options if name not in known]:
        raise TypeError(f"make_private() has no option {unknown[0]!r}; it takes {', '.join(known)}")
    return chosen


def _examples_in(loader: DataLoader[Any]) -> int:
    """How many examples the loader has; PrivacyError where they can't be drawn at random, or for several processes."""
    if not isinstance(loader, DataLoader):
        raise TypeError(f"data_loader must be a torch DataLoader; got {type(loader).__name__}")
    if is_distributed() and torch.distributed.get_world_size() > 1:
        raise PrivacyError("ghostclip.compat.opacus trains in one process; use ghostclip.PrivacyEngine in several")
    return size_of(loader.dataset)


def _policy(module: nn.Module, max_grad_norm: float | list[float], clipping: str) -> Any:
    """Flat clipping, or a threshold for each trained parameter."""
    if clipping == "flat":
        if isinstance(max_grad_norm, list | tuple):
            raise ValueError(f'max_grad_norm={max_grad_norm!r} goes with clipping="per_layer"; else give one number')
        return positive(max_grad_norm=max_grad_norm)
    names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    if not isinstance(max_grad_norm, list) or len(max_grad_norm) != len(names):
        raise ValueError(
            f'max_grad_norm must be a list of {len(names)} norms with clipping="per_layer", one for each trained '
            f"parameter; got {max_grad_norm!r}"
        )
    norms = [positive(max_grad_norm=each) for each in max_grad_norm]
    return Grouped({name: [name] for name in names}, dict(zip(names, norms, strict=True)))
