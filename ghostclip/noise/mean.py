"""A private mean of features, released before a training: rows cut to a norm, summed, with Gaussian noise once.

Example: 1,000 rows of unit norm, ``bound=1.0`` and ``noise_multiplier=8.0``. Each entry of the sum gets noise of
standard deviation 8, so each entry of the mean has 0.008.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import torch
from torch import Tensor

from ghostclip.events import Event, JointGaussian, SampledGaussian
from ghostclip.noise import noise_source
from ghostclip.validate import nonnegative, positive

__all__ = ["PREFIX", "PrivateMean", "private_mean"]

# Of names, by which these charges are told from those of steps.
PREFIX = "before-"
# Rows that are cut and summed at a time, in float64.
CHUNK = 8192
# By which rows are cut shorter than the bound: more than norms and sums of a million rows may be off in float64.
ROUNDING = 1e-9
# Of bounds: rows of which all squares leave float64, whose norms come out as 0, are shorter, and others longer.
LEAST, MOST = 1e-100, 1e100


@dataclass(frozen=True, eq=False)
class PrivateMean:
    """A released mean, which `PrivacyEngine` charges when it is given as ``before=[released]``.

    Attributes:
        mean: [d], in the type of the features; float32 for narrower ones.
        variance: [d], >= 0, where it was asked for; None otherwise.
        event: the release, for accountants. Noise that isn't private counts as none.
        planned: the same with the noise that was added, whatever its generator.
        name: random; a ledger that has a charge under it is not charged for this release again.
        noise: "standard", "hardened" or "test".
        generator: where the random numbers come from, in words.
    """

    mean: Tensor
    variance: Tensor | None
    event: Event
    planned: Event
    name: str
    noise: str
    generator: str

    def __repr__(self) -> str:
        return f"PrivateMean(of {len(self.mean)} features, event={self.event!r}, noise={self.noise!r})"


@torch.no_grad()
def private_mean(
    features: Tensor,
    bound: float = 1.0,
    noise_multiplier: float = 8.0,
    *,
    variance_noise_multiplier: float | None = None,
    noise: str = "standard",
    seed: int | None = None,
    neighboring: str = "add_or_remove_one",
) -> PrivateMean:
    """The mean of the rows of ``features``, each cut to norm ``bound``, with Gaussian noise.

    m = (sum_i min(1, b / |f_i|) f_i + s b N(0, I)) / N. One row moves the sum by at most b, so this is one Gaussian
    mechanism of noise multiplier s (Dwork and Roth 2014, appendix A). N is public, as it is in a sampling rate.
    A row that is not finite contributes zero. The features must be computed row by row, by what is public.

    With ``variance_noise_multiplier`` t the squares are released as well, with noise t b^2 N(0, I): the squared entries
    of a row of norm b have a norm of at most b^2. variance = max(0, squares / N - m^2).

    Args:
        features: [N, d], floating point, one row for each example; N >= 1.
        bound: b, in the unit of the features; from 1e-100 to 1e100. A wrong one costs accuracy, never privacy.
        noise_multiplier: s, standard deviation of the noise over ``bound``; finite, >= 0. 0 gives no privacy.
        variance_noise_multiplier: t, the same over ``bound ** 2``; None: no variance is released.
        noise, seed: as for `PrivacyEngine`. ``noise="test"`` is charged as none.
        neighboring: as for `PrivacyEngine`; the engine that charges it must have the same.

    Raises:
        ValueError, TypeError: an argument is out of range; the message names it.
    """
    _check_features(features)
    bound, stds = positive(bound=bound), [nonnegative(noise_multiplier=noise_multiplier)]
    if variance_noise_multiplier is not None:
        stds.append(nonnegative(variance_noise_multiplier=variance_noise_multiplier))
    if not LEAST <= bound <= MOST:
        raise ValueError(
            f"bound must be at least {LEAST} and at most {MOST}: squares of such features leave float64; got {bound}"
        )
    source = noise_source(noise, seed)
    planned = _event(stds, neighboring)
    sums = [torch.zeros(features.shape[1], dtype=torch.float64, device=features.device) for _ in stds]
    for rows in features.split(CHUNK):
        cut = _cut(rows, bound)
        for power, total in enumerate(sums, 1):
            total += cut.pow(power).sum(0)
    means = [
        source.release([total], std * bound**power, len(features))[0]
        for power, (total, std) in enumerate(zip(sums, stds, strict=True), 1)
    ]
    kind = features.dtype if features.dtype == torch.float64 else torch.float32
    return PrivateMean(
        mean=means[0].to(kind),
        variance=(means[1] - means[0].square()).clamp(min=0.0).to(kind) if len(means) > 1 else None,
        event=planned if source.private else _event([0.0] * len(stds), neighboring),
        planned=planned,
        name=f"{PREFIX}{secrets.token_hex(16)}",
        noise=source.mode,
        generator=source.generator_on(features.device),
    )


def _check_features(features: Tensor) -> None:
    """Raises TypeError or ValueError unless they are rows of real numbers."""
    if not isinstance(features, Tensor):
        raise TypeError(f"features must be a tensor [N, d]; got {type(features).__name__}")
    if features.is_nested or features.is_meta or features.layout != torch.strided:
        kind = "nested" if features.is_nested else "meta" if features.is_meta else str(features.layout)
        raise TypeError(
            f"features must be a dense tensor [N, d] that has its values; got a {kind} one. Of a sparse one give its "
            "to_dense(), of a nested one its rows by torch.stack"
        )
    if not features.is_floating_point():
        raise TypeError(f"features must be of a floating point type; got {features.dtype}")
    if features.dim() != 2 or not features.numel():
        raise ValueError(
            f"features must be [N, d] with N >= 1 and d >= 1, one row an example (flatten the rest); got "
            f"{list(features.shape)}"
        )


def _event(stds: list[float], neighboring: str) -> Event:
    """What releases of all rows with these noise multipliers are charged as, together."""
    events = tuple(SampledGaussian(1.0, std, relation=neighboring) for std in stds)
    return events[0] if len(events) == 1 else JointGaussian(events)


def _cut(rows: Tensor, bound: float) -> Tensor:
    """Rows [n, d] in float64, cut to norm ``bound``; zeros where a norm is not finite."""
    rows = rows.detach().double()
    norms = rows.norm(dim=1, keepdim=True)
    weights = (bound * (1.0 - ROUNDING) / norms).clamp(max=1.0)  # a norm of 0 gives inf, which is cut to 1
    return torch.where(norms.isfinite(), rows * weights, 0.0)
