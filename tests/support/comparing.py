"""How the tests compare with the oracle: relative errors, and each case's answers by the loop, computed once."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import oracle
import pytest
import torch
from case_types import Case, project
from cases import case
from torch import Tensor

import ghostclip

# The relative errors the project promises.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
every_pass = pytest.mark.parametrize("second_pass", ["reweight", "cached"])


@functools.cache
def _truth(name: str, batch: int) -> dict[str, Tensor]:
    row = case(name)
    return oracle.per_example_grads(row.model(), row.losses, row.inputs(batch), row.batch_dims)


def truth(row: Case, batch: int = 4) -> dict[str, Tensor]:
    """Per-example gradients by the loop, in float64; {parameter name: [B, *shape]}."""
    return _truth(row.name, batch)


def typical_norm(grads: dict[str, Tensor]) -> float:
    """A max norm that clips about half of the examples."""
    return float(oracle.norms(grads).median()) or 1.0


def ready(
    row: Case, dtype: torch.dtype = torch.float64, batch: int = 4, clipping: float = 1.0, **options: object
) -> tuple[torch.nn.Module, ghostclip.GhostClipper, Tensor]:
    """The case's model wrapped, a clipper for it, and the losses of one batch."""
    model = ghostclip.wrap(row.model(dtype=dtype), **row.wrap)
    clipper = ghostclip.GhostClipper(model, clipping=clipping, **options)
    return model, clipper, row.losses(model(*row.inputs(batch, dtype)))


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    """p.grad of every trainable parameter, zeros where there is none."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in trained.items()}


def assert_close(
    found: Tensor, expected: Tensor, tolerance: float, scale: Tensor | float = 0.0, what: str = ""
) -> None:
    """Same shape, and each entry within ``tolerance`` of the larger of its expected value and ``scale``."""
    assert found.shape == expected.shape, f"{what}: shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
    found, expected = found.detach().double(), expected.detach().double()
    allowed = tolerance * torch.maximum(expected.abs(), torch.as_tensor(scale, dtype=torch.float64))
    wrong = ~((found - expected).abs() <= allowed)
    assert not wrong.any(), f"{what}: found {found[wrong].tolist()[:4]}, expected {expected[wrong].tolist()[:4]}"


def assert_dicts_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Same keys in the same order; each tensor's error, as a norm, within ``tolerance`` of its norm.

    Where a tensor is small beside the whole gradient, its error is held against a thousandth of the whole.
    """
    assert list(found) == list(expected)
    sizes = {name: float(value.detach().double().norm()) for name, value in expected.items()}
    whole = max(sizes.values(), default=0.0)
    for name, value in expected.items():
        assert found[name].shape == value.shape, f"{name}: {tuple(found[name].shape)} is not {tuple(value.shape)}"
        error = float((found[name].detach().double() - value.detach().double()).norm())
        assert error <= tolerance * max(sizes[name], 1e-3 * whole), f"{name}: off by {error:.3g}"


def assert_exact_by_losses(clipper: ghostclip.GhostClipper, losses: Tensor, tolerance: float = 1e-10) -> None:
    """Norms and the clipped sum equal the loop's over single losses of the same forward."""
    expected = oracle.grads_of_single_losses(clipper.model, losses)
    clipper.model.zero_grad()
    assert_close(clipper.backward(losses).norms, oracle.norms(expected), tolerance, what="norms")
    assert_dicts_close(gradients(clipper.model), oracle.clipped_sum(expected, clipper.sensitivity), tolerance)


def exact_or_refused(
    model: torch.nn.Module,
    inputs: Sequence[Tensor],
    batch_dims: Sequence[int | None] | None = None,
    loss_fn: Callable[..., Tensor] = project,
    **wrap: Any,
) -> ghostclip.GhostClipError | None:
    """The refusal, where the model is refused by one of our errors; None where it is clipped as the loop clips it."""
    expected = oracle.per_example_grads(model, loss_fn, inputs, batch_dims)
    try:
        clipper = ghostclip.GhostClipper(ghostclip.wrap(model, **wrap), clipping=0.1)
        clipper.backward(loss_fn(model(*inputs)))
    except ghostclip.GhostClipError as refusal:
        return refusal
    assert_dicts_close(gradients(model), oracle.clipped_sum(expected, 0.1), 1e-10)
    return None


def batch(*shape, seed=1):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def assert_exact(model, *inputs, batch_dims=None, losses=project, **options):
    """Norms, per-example gradients and clipped sums are the loop's."""
    expected = oracle.per_example_grads(model, losses, inputs, batch_dims)
    clipper = ghostclip.GhostClipper(ghostclip.wrap(model), **options)
    found = losses(model(*inputs))
    assert_dicts_close(clipper.per_example_grads(found, retain_graph=True), expected, 1e-10)
    result = clipper.backward(found)
    assert_close(result.norms, oracle.norms(expected), 1e-10)
    assert_dicts_close(gradients(model), oracle.clipped_sum(expected, clipper.sensitivity), 1e-10)
    return clipper


def assert_compiled_exact(model, x, losses_of, **options):
    """Three calls of clip, of which the last run as one graph, add the loop's clipped sum; ``losses_of(outputs)``."""
    expected = oracle.per_example_grads(model, losses_of, (x,))
    clipper = ghostclip.GhostClipper(model, 0.5, compile=True, **options)
    for _ in range(3):
        model.zero_grad()
        clipper.clip(lambda model, batch: losses_of(model(batch)), x)
    assert_dicts_close(gradients(model), oracle.clipped_sum(expected, 0.5), 1e-10)
    assert (clipper.compiled.graphs, clipper.compiled.refusals) == (1, [])
