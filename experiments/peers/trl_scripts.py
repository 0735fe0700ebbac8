"""SFT and DPO by TRL, by GhostClip and by opake: what a user writes, line for line.

opake's configs have TRL's names, but for `for_opake`. Its ``SFTConfig.from_trl`` refuses configs of TRL 1.16 for fields
that it doesn't know. Its accounting needs a rule that Python 3.13 has and Python 3.11.7 and 3.12.1 don't;
`opake_imports` adds it.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["LIBRARIES", "SCRIPTS", "Given", "changed_lines", "opake_imports"]

TRL, GHOSTCLIP, OPAKE = LIBRARIES = ("TRL", "GhostClip", "opake")


@dataclasses.dataclass(frozen=True)
class Given:
    """What all scripts get.

    Attributes:
        model, reference, data, words: reference is for DPO; words is the tokenizer.
        options: of TRL's config.
        noise, clip, delta, target: of private training; target is the largest epsilon, None for none.
        prepare: called with the trainer before it trains.
    """

    model: Any
    data: Any
    words: Any
    options: dict[str, Any]
    reference: Any = None
    noise: float = 1.0
    clip: float = 1.0
    delta: float = 1e-3
    target: float | None = None
    prepare: Callable[[Any], None] = lambda trainer: None


# fmt: off
def sft_by_trl(given):
    from trl import SFTConfig, SFTTrainer
    args = SFTConfig(**given.options)
    trainer = SFTTrainer(given.model, args, train_dataset=given.data, processing_class=given.words)
    given.prepare(trainer)
    trainer.train()
    return trainer


def sft_by_ghostclip(given):
    from trl import SFTConfig

    from ghostclip.integrations.trl import PrivacyArguments, PrivateSFTTrainer
    args = SFTConfig(**given.options)
    trainer = PrivateSFTTrainer(given.model, args, train_dataset=given.data, processing_class=given.words,
                                privacy=PrivacyArguments(noise_multiplier=given.noise, clipping=given.clip,
                                                         target_delta=given.delta, max_epsilon=given.target))
    given.prepare(trainer)
    trainer.train()
    return trainer


def sft_by_opake(given):
    from opake.transformers.trl import SFTConfig, SFTTrainer
    args = SFTConfig(**for_opake(given.options), privacy_noise_multiplier=given.noise, clipping_norm=given.clip,
                     privacy_target_delta=given.delta, privacy_target_epsilon=given.target,
                     privacy_accounting=given.noise > 0)
    trainer = SFTTrainer(given.model, args, train_dataset=given.data, processing_class=given.words)
    given.prepare(trainer)
    trainer.train()
    return trainer


def dpo_by_trl(given):
    from trl import DPOConfig, DPOTrainer
    args = DPOConfig(**given.options)
    trainer = DPOTrainer(given.model, given.reference, args, train_dataset=given.data, processing_class=given.words)
    given.prepare(trainer)
    trainer.train()
    return trainer


def dpo_by_ghostclip(given):
    from trl import DPOConfig

    from ghostclip.integrations.trl import PrivacyArguments, PrivateDPOTrainer
    args = DPOConfig(**given.options)
    trainer = PrivateDPOTrainer(given.model, given.reference, args, train_dataset=given.data,
                                processing_class=given.words,
                                privacy=PrivacyArguments(noise_multiplier=given.noise, clipping=given.clip,
                                                         target_delta=given.delta, max_epsilon=given.target))
    given.prepare(trainer)
    trainer.train()
    return trainer


def dpo_by_opake(given):
    from opake.transformers.trl import DPOConfig, DPOTrainer
    args = DPOConfig(**for_opake(given.options), privacy_noise_multiplier=given.noise, clipping_norm=given.clip,
                     privacy_target_delta=given.delta, privacy_target_epsilon=given.target,
                     privacy_accounting=given.noise > 0)
    trainer = DPOTrainer(given.model, given.reference, args, train_dataset=given.data, processing_class=given.words)
    given.prepare(trainer)
    trainer.train()
    return trainer
# fmt: on


SCRIPTS: dict[str, dict[str, Callable[[Given], Any]]] = {
    "SFT": {TRL: sft_by_trl, GHOSTCLIP: sft_by_ghostclip, OPAKE: sft_by_opake},
    "DPO": {TRL: dpo_by_trl, GHOSTCLIP: dpo_by_ghostclip, OPAKE: dpo_by_opake},
}


def changed_lines(task: str, library: str) -> int:
    """Statements of a script that TRL's hasn't."""
    plain, private = (_statements(SCRIPTS[task][name]) for name in (TRL, library))
    return sum(line.startswith("+ ") for line in difflib.ndiff(plain, private))


def _statements(script: Callable[[Given], Any]) -> list[str]:
    """One string for each statement of a script."""
    (function,) = ast.parse(inspect.getsource(script)).body
    assert isinstance(function, ast.FunctionDef)
    return [ast.unparse(statement) for statement in function.body]


def for_opake(options: dict[str, Any]) -> dict[str, Any]:
    """Options of TRL's config by opake's names: clipping takes the place of ``max_grad_norm``."""
    options = {name: value for name, value in options.items() if name != "max_grad_norm"}
    return {"lr_scheduler" if name == "lr_scheduler_type" else name: value for name, value in options.items()}


def opake_imports() -> None:
    """The rule of Python 3.13's dataclasses: a base class without ``__slots__`` has the slot ``__weakref__``."""
    own: Callable[[type], Iterator[str]] = dataclasses._get_slots  # type: ignore[attr-defined]

    def slots(cls: type) -> Iterator[str]:
        if "__slots__" in cls.__dict__:
            yield from own(cls)
        elif cls.__weakrefoffset__:
            yield "__weakref__"

    dataclasses._get_slots = slots  # type: ignore[attr-defined]
