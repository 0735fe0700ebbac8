"""GhostClipper on models under FSDP2: norms and clipped sums are those of a loop over single examples."""

import re
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, outcome
from sharded import MODELS, QUIET, grads, settled, sharded, share
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ghostclip
from ghostclip import GhostClipper
from ghostclip.clipping import PerLayer

pytestmark = [pytest.mark.filterwarnings(text) for text in QUIET]

NORM = 0.3
build, losses_of, make = MODELS["network"]
SECOND_PASSES = ("reweight", "cached")


def clipped(kind: str, hybrid: bool = False) -> list[Any]:
    """Norms and sums of this rank's examples, by both second passes, wrapped before and after; then twice as much."""
    build, losses_of, make = MODELS[kind]
    found = []
    for second_pass, early, children in product(SECOND_PASSES, (True, False), (True, False)):
        model = ghostclip.wrap(build()) if early else build()
        clipper = GhostClipper(sharded(model, hybrid, children), NORM, second_pass=second_pass)
        norms = clipper.norms(losses_of(model, share(make())))
        result = clipper.backward(losses_of(model, share(make())))
        torch.testing.assert_close(norms, result.norms, rtol=1e-10, atol=0)
        once = grads(model)
        clipper.clip(losses_of, share(make()))
        found.append((norms, once, grads(model)))
    return found


@pytest.mark.parametrize(
    ("size", "hybrid"),
    [(1, False), (2, False), *(pytest.param(4, hybrid, marks=pytest.mark.slow) for hybrid in (False, True))],
)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.one_in(8)
def test_sums_are_those_of_single_examples(kind: str, size: int, hybrid: bool, tmp_path: Path) -> None:
    """Norms and clipped sums by one backward for each example, in one process without this library."""
    build, losses_of, make = MODELS[kind]
    model = build()
    each = oracle.grads_of_single_losses(model, losses_of(model, make()))
    norms, sums = oracle.norms(each), oracle.clipped_sum(each, NORM)
    for rank, outcomes in enumerate(on_ranks(partial(clipped, kind, hybrid), tmp_path, size)):
        for own, once, twice in outcomes:
            torch.testing.assert_close(own, norms[rank::size], rtol=1e-10, atol=0)
            assert once.keys() == twice.keys() == sums.keys()
            for name, total in sums.items():
                assert (once[name] - total).norm() < 1e-10 * total.norm()
                assert (twice[name] - 2 * total).norm() < 1e-10 * total.norm()


def other_uses() -> list[Tensor]:
    """Layer-wise clipping, materialised gradients and `verify`, each on this rank's examples."""
    model = sharded(build())
    clipper = GhostClipper(model, PerLayer(NORM))
    assert clipper.verify(losses_of, share(make())) < 1e-9
    gradients = clipper.per_example_grads(losses_of(model, share(make())))
    clipper.backward(losses_of(model, share(make())))
    return [torch.cat([each.flatten(1) for each in gradients.values()], 1), *grads(model).values()]


def test_layerwise_sums_and_materialised_gradients(tmp_path: Path) -> None:
    clipper = GhostClipper(build(), PerLayer(NORM))
    one = clipper.per_example_grads(losses_of(clipper.model, make()))
    clipper.backward(losses_of(clipper.model, make()))
    for rank, (materialised, *sums) in enumerate(on_ranks(other_uses, tmp_path)):
        every = torch.cat([each.flatten(1) for each in one.values()], 1)
        torch.testing.assert_close(materialised, every[rank::2], rtol=1e-10, atol=1e-14)
        for found, parameter in zip(sums, clipper.model.parameters(), strict=True):
            torch.testing.assert_close(found, parameter.grad, rtol=1e-10, atol=1e-14)


def failing_once() -> tuple[str, dict[str, Tensor], int]:
    """What is raised where one rank's losses are wrong, and the sums of the backward after it."""
    model = sharded(build())
    clipper = GhostClipper(model, NORM)
    losses = losses_of(model, share(make()))
    said = outcome(lambda: clipper.backward(losses.mean() if dist.get_rank() else losses))
    left = len(grads(model))
    clipper.backward(losses_of(model, share(make())))
    return said, grads(model), left


def test_a_rank_that_fails_takes_the_others_with_it(tmp_path: Path) -> None:
    model = build()
    expected = oracle.clipped_sum(oracle.grads_of_single_losses(model, losses_of(model, make())), NORM)
    (first, *_), (second, *_) = found = on_ranks(failing_once, tmp_path)
    assert first.startswith("PrivacyError: no sum was formed, because another rank failed")
    assert second.startswith("LossShapeError: losses must have shape exactly [B]")
    for _, sums, left in found:
        assert left == 0
        for name, total in expected.items():
            torch.testing.assert_close(sums[name], total, rtol=1e-10, atol=1e-14)


def backward_after(change: Callable[[nn.Module], Any]) -> Callable[[nn.Module], None]:
    """A clipper's backward on a sharded model, something having been done to it before the forward."""

    def work(model: nn.Module) -> None:
        clipper = GhostClipper(sharded(model), NORM)
        change(settled(model))
        rows, labels = share(make())
        clipper.backward(losses_of(model, [rows.to(next(model.parameters()).dtype), labels]))

    return work


def plain_backward(model: nn.Module, synchronised: bool = True) -> None:
    model.set_requires_gradient_sync(synchronised)  # type: ignore[operator]
    losses_of(model, share(make())).mean().backward()


def a_part_of_what_ran(model: nn.Module) -> None:
    losses_of(sharded(model), share(make()))
    GhostClipper(model[0])  # type: ignore[index]


def over_tensor_parallelism(model: nn.Module) -> None:
    mesh = torch.distributed.init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    GhostClipper(fully_shard(model, mesh=mesh["data"]))


REFUSED: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "mixed precision": (
        lambda model: GhostClipper(sharded(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))),
        "UnsupportedModelError: .*MixedPrecisionPolicy with param_dtype",
    ),
    "offload": (
        lambda model: GhostClipper(sharded(model, offload_policy=CPUOffloadPolicy(pin_memory=False))),
        "UnsupportedModelError: .*was given CPUOffloadPolicy",
    ),
    "ignored": (
        lambda model: GhostClipper(sharded(model, children=False, ignored_params={model[2].bias})),
        "UnsupportedModelError: .*2.bias: fully_shard left it out",
    ),
    "tensor parallelism": (over_tensor_parallelism, "UnsupportedModelError: .*tensor parallelism"),
    "layer": (lambda model: GhostClipper(sharded(model)[2]), "UnsupportedModelError: .*is a DTensor"),
    "part": (a_part_of_what_ran, "UnsupportedModelError: .*it is a part of a model that fully_shard was called on"),
    "compiled": (
        lambda model: sharded(GhostClipper(model).model) and GhostClipper(model).compile(),
        "ValueError: compile and fully_shard don't go together",
    ),
    "plain backward": (backward_after(plain_backward), "GradientLeakError: the gradient of '0.weight' was filled"),
    "plain backward, unsharded": (
        backward_after(partial(plain_backward, synchronised=False)),
        "GradientLeakError: the gradient of '0.weight', unsharded, was filled",
    ),
    "hook": (
        backward_after(lambda model: model[0].weight.register_post_accumulate_grad_hook(print)),  # type: ignore
        "UnsupportedModelError: 0.weight is sharded and has a hook",
    ),
    "narrow": (
        lambda model: backward_after(lambda _: None)(model.bfloat16()),
        "UnsupportedModelError: 0.weight is torch.bfloat16, in which sums of several",
    ),
}


def all_refused() -> dict[str, str]:
    return {name: outcome(partial(work, build())) for name, (work, _) in REFUSED.items()}


def test_what_would_not_be_exact_is_refused(tmp_path: Path) -> None:
    for found in on_ranks(all_refused, tmp_path):
        for name, (_, message) in REFUSED.items():
            assert re.match(message, found[name], re.DOTALL), f"{name}: {found[name]}"
