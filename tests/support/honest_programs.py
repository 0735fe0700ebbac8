"""Honest programs out of the tables of the other tests, and at random out of the fuzzer's blocks."""

import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import expert_models
import ragged_models
import torch
from case_types import Case
from cases import CASES
from difficult_programs import EXAMPLES
from law_programs import Program
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[2] / "experiments"))

from fuzzing.subjects import Subject, draw_subject

# Rows of ragged examples in each batch.
SIZES = (
    ragged_models.SIZES, (3, 3, 3, 3), (4, 2, 5), (1, 1, 1, 1), (2, 6, 3, 1),
    (5,), (2, 0, 4), (3, 3, 3, 3), (7, 1, 2, 2), (4, 2),
)  # fmt: skip
# What torch itself, or a helper of the model's, can't compute in bfloat16.
WIDE_ONLY = ("bare complex product", "bare turned by angles", "bare distances", "windows")


def _layer(case: Case) -> Program:
    def losses(model: torch.nn.Module, *inputs: Tensor) -> Tensor:
        return case.losses(model(*inputs))

    return Program(
        str(case), lambda: case.model(dtype=torch.float32), lambda number: case.inputs(4, torch.float32, 11 + number),
        losses, wrap=case.wrap, narrow=case.name not in WIDE_ONLY,
    )  # fmt: skip


def _expert(name: str, time_first: bool) -> Program:
    way = expert_models.WAYS[name]
    return Program(
        f"experts by {name}{' time first' * time_first}", lambda: expert_models.Experts(way, time_first),
        lambda number: (torch.randn(EXAMPLES[number], 5, 4),), expert_models.LOSSES["plain"],
        wrap={"batch_dim": {"below": 1, "head": 1}} if time_first else {},
    )  # fmt: skip


def _ragged(name: str) -> Program:
    case = ragged_models.CASES[name]
    return Program(
        f"ragged {name}", case.build,
        lambda number: (ragged_models.shuffled(ragged_models.graphs(SIZES[number], torch.float32)),),
        ragged_models.losses, index=lambda batch: case.index(batch),
        narrow=name not in WIDE_ONLY,
    )  # fmt: skip


LAYERS = tuple(_layer(case) for case in CASES)
EXPERTS = tuple(_expert(name, time_first) for name in expert_models.WAYS for time_first in (False, True))
RAGGED = tuple(_ragged(name) for name in ragged_models.CASES)
# Whose rows are whose is measured: neither `batch_dim` nor `batch_index` is needed.
WITHOUT_BATCH_DIM = tuple(
    replace(each, name=f"{each.name} without batch_dim", wrap={}) for each in (*LAYERS, *EXPERTS) if each.wrap
)
WITHOUT_BATCH_INDEX = tuple(replace(each, name=f"{each.name} without batch_index", index=None) for each in RAGGED)


def random_subject(seed: int) -> tuple[Subject, int, int]:
    """One of the fuzzer's that may be clipped and has a gradient, a number of examples, and one of positions."""
    choose = random.Random(seed)
    while True:
        torch.manual_seed(choose.randrange(1 << 30))
        subject = draw_subject(choose, nasty=0.0)
        examples, length = choose.choice([2, 3, 4, 5, 8]), choose.choice(subject.lengths)
        losses = subject.losses_of(subject.model, subject.draw(0, examples, length, torch.float32))
        if losses.requires_grad and not subject.refused:
            return subject, examples, length


def random_program(seed: int) -> Program:
    """A random chain of blocks, with one of the fuzzer's losses; a function of the seed alone."""
    subject, examples, length = random_subject(seed)

    def inputs(number: int) -> Sequence[Tensor]:
        return subject.draw(number, examples + number, length, torch.float32)

    def losses(model: torch.nn.Module, *values: Tensor) -> Tensor:
        return subject.losses_of(model, values)

    return Program(subject.recipe, lambda: random_subject(seed)[0].model, inputs, losses, wrap=subject.wrap)
