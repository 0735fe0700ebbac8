"""Every decision of the package forced at random: options, strategies whatever they cost, and sizes that decide.

No decision may change a result beyond rounding, so each is taken by a random number instead of a clock or a size. The
planner is given random costs; `KNOBS` lists the constants and questions by which other decisions are made, and values
for them under which the small models here get where else only large ones would.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from graphs import interpret

from ghostclip import native
from ghostclip.planner import Planner

from .policies import KINDS

__all__ = ["DTYPES", "KNOBS", "Setting", "draw_setting", "forced", "missing_knobs"]

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}

Values = tuple[Any, ...]
# "module:name" -> values besides its own. Names that belong together are set together.
KNOBS: dict[str, dict[str, Values]] = {
    "all strategies": {"planner:HOPELESS": (float("inf"),)},
    "small": {"clipper.first_pass:SMALL_SHARE": (0.0, 10.0)},
    "no host sync": {
        f"{module}:may_sync": (lambda device: False,)
        for module in ("norms.outer", "clipper.first_pass", "clipper.second_pass")
    },
    "chunks": {"norms.outer:CHUNK_BYTES": (1, 200)},
    "blocks": {"norms.outer:BLOCK_ROWS": (1, 2)},
    "long rows": {"norms.term:LONG": (4, 16)},
    "states": {"nn.rnn.recurrence:SMALL": (0, 100)},
    "no time loop": {"nn.rnn.kernels:has_compiled_loop": (lambda trace: False,)},
}  # fmt: skip
CACHED_ANSWERS = (native.library, native.calls.function)


@dataclass
class Setting:
    """One way to clip.

    Attributes:
        call: "backward"; "retained": norms with the graph kept, then backward; or "clip".
        knobs: {group of KNOBS: which of its values}.
        costs: seed of the random costs.
    """

    dtype: str = "float32"
    policy: str = "flat"
    second_pass: str = "auto"
    norm_strategy: str = "auto"
    memory_budget: int | None = None
    loss_scale: float = 1.0
    compile: bool = False
    call: str = "backward"
    autocast: bool = False
    deterministic: bool = False
    native: bool = True
    accumulate: bool = False
    costs: int = 0
    knobs: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        plain = Setting()
        shown = {k: v for k, v in vars(self).items() if k not in ("costs", "knobs") and v != getattr(plain, k)}
        shown |= {"knobs": ", ".join(f"{group} {place}" for group, place in self.knobs.items())}
        return ", ".join(f"{name} {value}" for name, value in shown.items())

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of the parameters."""
        return DTYPES[self.dtype]

    def options(self) -> dict[str, Any]:
        """For GhostClipper."""
        names = ("second_pass", "norm_strategy", "memory_budget", "loss_scale", "compile")
        return {name: getattr(self, name) for name in names}


def draw_setting(choose: random.Random, compilable: bool) -> Setting:
    """Any combination; what excludes each other is left out."""
    dtype = choose.choices(list(DTYPES), [10, 6, 2, 2])[0]
    found = Setting(
        dtype=dtype,
        policy=choose.choice(KINDS),
        second_pass=choose.choice(["reweight", "cached", "auto"]),
        norm_strategy=choose.choice(["auto", "auto", "gram", "direct"]),
        memory_budget=choose.choice([None, None, None, 1, 1000, 1 << 30]),
        call=choose.choice(["backward", "backward", "retained", "clip"]) if compilable else "backward",
        autocast=dtype == "float32" and choose.random() < 0.05,
        deterministic=choose.random() < 0.05,
        native=choose.random() < 0.85,
        accumulate=choose.random() < 0.15,
        costs=choose.randrange(1 << 30),
    )
    if found.policy != "adaptive" and compilable and choose.random() < 0.05:
        found.compile, found.call = True, "clip"
    elif choose.random() < 0.1:
        found.loss_scale = choose.choice([1024.0, 2.0**-4])
    found.knobs = {group: choose.randrange(2) for group in KNOBS if choose.random() < 0.3}
    return found


@contextmanager
def forced(setting: Setting) -> Iterator[None]:
    """Inside, decisions are the setting's; graphs are interpreted, and used though that isn't faster."""
    rng = random.Random(setting.costs)
    with ExitStack() as stack:
        for group, place in setting.knobs.items():
            for name, values in KNOBS[group].items():
                if (found := _found(name)) is not None:
                    stack.enter_context(mock.patch.object(*found, values[place % len(values)]))
        planner = partial(Planner, measure=_random_costs(rng))
        stack.enter_context(mock.patch("ghostclip.clipper.clipper.Planner", planner))
        if not setting.native:
            stack.enter_context(_tensor_operations())
        if setting.compile:
            interpret(stack.enter_context(pytest.MonkeyPatch.context()))
        if setting.deterministic:
            torch.use_deterministic_algorithms(True)
            stack.callback(torch.use_deterministic_algorithms, False)
        yield


def missing_knobs() -> list[str]:
    """Names in KNOBS that are not in the package any more."""
    return [name for knobs in KNOBS.values() for name in knobs if _found(name) is None]


def _found(knob: str) -> tuple[Any, str] | None:
    module, _, name = knob.partition(":")
    try:
        owner = importlib.import_module(f"ghostclip.{module}")
    except ModuleNotFoundError:
        return None
    return (owner, name) if hasattr(owner, name) else None


def _random_costs(rng: random.Random) -> Callable[..., float]:
    def measure(run: Callable[[], object], device: torch.device, best: float = float("inf")) -> float:
        if rng.random() < 0.3:
            run()
        return rng.random()

    return measure


@contextmanager
def _tensor_operations() -> Iterator[None]:
    """Without compiled kernels, as where there is no compiler."""
    with mock.patch.dict("os.environ", {"GHOSTCLIP_COMPILE": "0"}):
        for each in CACHED_ANSWERS:
            each.cache_clear()
        yield
    for each in CACHED_ANSWERS:
        each.cache_clear()
