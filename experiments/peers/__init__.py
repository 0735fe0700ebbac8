"""Other libraries' private steps as contenders of `ghostclip.bench`, and their models as workloads; ``python -m
experiments.peers`` times them.

Another library goes its own way to the clipped sum, in the mode its users would choose; noise and optimizer are those
of all the others, so that what is compared is clipping. (JAX, whose users compile the whole step, draws its noise and
updates inside of it.) A library that isn't installed is reported as missing.
"""

from __future__ import annotations

from .fastdp import FASTDP
from .fastgc import FASTGC
from .fine_tuned import WORKLOADS
from .functional import FUNCTIONAL
from .jax_steps import JAX
from .opacus_modes import OPACUS
from .opake import OPAKE

__all__ = ["CONTENDERS", "WORKLOADS"]

CONTENDERS = (*FUNCTIONAL, *OPACUS, *FASTDP, *FASTGC, *JAX, *OPAKE)
