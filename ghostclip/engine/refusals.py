"""What a PrivacyEngine refuses: names that Opacus's has, changes of what noise and charges follow from, and copies."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar, NoReturn

from ghostclip.errors import PrivacyError
from ghostclip.validate import RefusesNames

__all__ = ["Refusals"]

BUILD = (
    "build engine = PrivacyEngine(model, optimizer, data, batch_size=..., and noise_multiplier=... or "
    "target_epsilon=... with epochs=...), which wraps the model in place; Opacus's own interface is "
    "ghostclip.compat.opacus.PrivacyEngine"
)


class OpacusName:
    """An attribute that isn't there: reading it, of the class or an engine, raises AttributeError with ``instead``."""

    def __init__(self, instead: str) -> None:
        self._instead = instead

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, engine: Any, owner: type | None = None) -> Any:
        raise AttributeError(f"PrivacyEngine has no {self._name}; {self._instead}")


class Refusals(RefusesNames):
    """The base of `ghostclip.PrivacyEngine`, which has Opacus's names under other ones.

    Attributes of the ``fixed_names`` are set once.
    """

    fixed_names: ClassVar[frozenset[str]] = frozenset()

    refused_names: ClassVar = {
        "accountant": 'engine.epsilon(accountant="pld") or "rdp"',
        "data_loader": "data",
        "delta": "target_delta",
        "epsilon": "target_epsilon=... with epochs=... (or steps=...)",
        "expected_batch_size": "batch_size",
        "grad_sample_mode": "second_pass=..., or leave it out",
        "l2_norm_clip": "clipping",
        "max_grad_norm": "clipping",
        "max_norm": "clipping",
        "module": "model",
        "noise_generator": 'noise="test" with seed=..., which reports epsilon = inf',
        "physical_batch_size": "max_physical_batch_size",
        "poisson_sampling": 'sampling="poisson" or "without_replacement"',
        "sample_rate": "batch_size=..., the rate times len(data)",
        "secure_mode": 'noise="hardened"',
        "sigma": "noise_multiplier",
    }
    without_arguments: ClassVar = BUILD

    accountant = OpacusName("use engine.epsilon() and engine.events")
    get_epsilon = OpacusName("use engine.epsilon(delta=...)")
    make_private = OpacusName(BUILD)
    make_private_with_epsilon = OpacusName(BUILD)
    load_checkpoint = OpacusName("use engine.restore(path)")
    save_checkpoint = OpacusName("use engine.save(path)")

    def __iter__(self) -> NoReturn:
        """Raises TypeError: a loop is over `PrivacyEngine.batches`."""
        raise TypeError("an engine gives no batches by itself; write `for batch in engine.batches()`")

    def __setattr__(self, name: str, value: Any) -> None:
        own = vars(self)
        added = "_snapshots" in own and name not in own  # once it is built
        if added:  # arguments of a subclass of the user's are its own
            engine = next(each for each in type(self).__mro__ if Refusals in each.__bases__)
            added = name in {*self.refused_names, *inspect.signature(engine).parameters}
        if added or (name in self.fixed_names and name in own):
            raise AttributeError(
                f"{name} of a PrivacyEngine can't be {'set' if added else 'changed'}: noise and charges are made for "
                "what it was built with; call detach() and build a new engine, with the same ledger=... so that both "
                "count"
            )
        super().__setattr__(name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises PrivacyError: torch's optimizers lose their hooks in a copy."""
        raise PrivacyError(
            "a PrivacyEngine can't be copied or pickled: its optimizer's copy would train without noise; build a new "
            "engine over copies, with the same ledger=... so that both count, or use save() and restore()"
        )
