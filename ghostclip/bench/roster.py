"""CONTENDERS: everything that can be timed, in the order of the tables' columns."""

from __future__ import annotations

from ghostclip.bench.fastdp import FASTDP
from ghostclip.bench.functional import FUNCTIONAL
from ghostclip.bench.jax_steps import JAX
from ghostclip.bench.opacus_modes import OPACUS
from ghostclip.bench.ours import NAIVE, NONPRIVATE, OURS

__all__ = ["CONTENDERS", "PEERS", "USUAL"]

CONTENDERS = {
    contender.name: contender for contender in (*NONPRIVATE, *OURS, *NAIVE, *FUNCTIONAL, *OPACUS, *FASTDP, *JAX)
}
USUAL = tuple(name for name, contender in CONTENDERS.items() if contender.usual)
PEERS = tuple(contender.name for contender in (*NAIVE, *FUNCTIONAL, *OPACUS, *FASTDP, *JAX))
