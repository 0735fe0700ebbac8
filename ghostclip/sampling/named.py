"""The sampling scheme by the name that users give it, with the arguments that belong to it."""

from __future__ import annotations

from ghostclip.events import RELATIONS, SAMPLINGS
from ghostclip.sampling.cyclic import Cyclic, CyclicPoisson
from ghostclip.sampling.schemes import Poisson, Scheme, Truncated, WithoutReplacement
from ghostclip.validate import one_of, positive_int

__all__ = ["scheme_named"]


def scheme_named(
    sampling: str,
    population: int,
    batch_size: int,
    *,
    neighboring: str = "add_or_remove_one",
    unit: str = "example",
    max_batch_size: int | None = None,
    bands: int = 1,
) -> Scheme:
    """The scheme for the engine's arguments; with one band cyclic Poisson sampling is Poisson sampling.

    Raises:
        ValueError, TypeError: an argument is out of range, or given where it has no meaning.
    """
    one_of(SAMPLINGS, sampling=sampling)
    relation = one_of(RELATIONS, neighboring=neighboring)
    if sampling == "truncated":
        if max_batch_size is None:
            raise ValueError(
                'max_batch_size must be given with sampling="truncated" (max_physical_batch_size is the default): '
                "the most examples in a batch; got None"
            )
        if positive_int(max_batch_size=max_batch_size) < batch_size:
            raise ValueError(
                f"max_batch_size must be at least batch_size = {batch_size}, the expected number before a cut; got "
                f"{max_batch_size!r}"
            )
        return Truncated(population, batch_size, relation, unit, positive_int(max_batch_size=max_batch_size))
    if max_batch_size is not None:
        raise ValueError(f'max_batch_size must be left out unless sampling="truncated"; got {max_batch_size!r}')
    if sampling == "cyclic":
        return Cyclic(population, batch_size, relation, unit, max(1, round(population / batch_size)))
    if sampling == "cyclic_poisson" and bands > 1:
        return CyclicPoisson(population, batch_size, relation, unit, bands)
    kind = WithoutReplacement if sampling == "without_replacement" else Poisson
    return kind(population, batch_size, relation, unit)
