"""Random chains of the fuzzer's blocks in which examples meet somewhere."""

import random

import torch
from honest_programs import Subject, random_subject
from law_programs import Program
from mixing_programs import EXAMPLES, MIXTURES
from torch import Tensor, nn


class Mixing(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.read = name, torch.zeros(0)

    def forward(self, h: Tensor) -> Tensor:
        self.read = h
        return MIXTURES[self.name](h)


def has_two_owners(mixing: Mixing, model: nn.Module, losses: Tensor) -> bool:
    """Whether a row that the mixture reads has a gradient of two losses, and trained parameters are below it.

    They must get a ten-thousandth of the gradient above: what rounding leaves of numbers that cancel may come out with
    any mark.
    """
    # Rows that are the same for all examples, as behind dead units, mix nothing.
    if not mixing.read.requires_grad or bool((mixing.read == mixing.read[:1]).all()):
        return False
    trained = [p for p in model.parameters() if p.requires_grad]
    grads = [torch.autograd.grad(loss, mixing.read, retain_graph=True, allow_unused=True)[0] for loss in losses]
    if any(grad is None for grad in grads):
        return False
    below = torch.autograd.grad(mixing.read, trained, grads[0], retain_graph=True, allow_unused=True)
    rows = torch.stack(grads).flatten(2).abs().amax(2)  # [losses, rows]
    largest, second = rows.topk(2, dim=0).values
    found, least = [grad for grad in below if grad is not None], 1e-4 * grads[0].abs().max()
    return bool((second > 1e-3 * largest).any()) and any(bool((grad.abs() > least).any()) for grad in found)


def _drawn(seed: int) -> tuple[Subject, Mixing, int]:
    """A chain with a mixture between its blocks, the mixture, and a number of positions."""
    choose = random.Random(seed)
    while True:
        subject, _, length = random_subject(choose.randrange(1 << 30))
        mixing = Mixing(choose.choice(list(MIXTURES)))
        if hasattr(subject.model, "blocks"):
            subject.model.blocks.insert(choose.randint(0, len(subject.model.blocks)), mixing)
            losses = subject.losses_of(subject.model.double(), subject.draw(0, EXAMPLES, length, torch.float64))
            if losses.requires_grad and has_two_owners(mixing, subject.model, losses):
                subject.model.float()
                return subject, mixing, length


def mixed_program(seed: int) -> Program:
    """A random chain in which a row has two owners; a function of the seed alone."""
    subject, mixing, length = _drawn(seed)
    return Program(
        f"{subject.recipe}; {mixing.name}",
        lambda: _drawn(seed)[0].model,
        lambda number: subject.draw(number, EXAMPLES, length, torch.float32),
        lambda model, *values: subject.losses_of(model, values),
        "RR",
        subject.wrap,
    )
