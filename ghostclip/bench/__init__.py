"""Step times of private training beside ordinary training: ``ghostclip bench``."""

from ghostclip.bench.compare import compare, line_up
from ghostclip.bench.contenders import Contender, Prepared
from ghostclip.bench.methods import BASELINE, CONTENDERS, register
from ghostclip.bench.table import markdown
from ghostclip.bench.workloads import WORKLOADS, Workload

__all__ = [
    "BASELINE",
    "CONTENDERS",
    "WORKLOADS",
    "Contender",
    "Prepared",
    "Workload",
    "compare",
    "line_up",
    "markdown",
    "register",
]
