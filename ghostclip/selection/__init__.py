"""The best of a random number of private runs, charged once for all of them.

Example: 10 runs expected, 3 candidates. K = 7 is drawn, and then the settings of 7 runs, say candidates 2, 0, 2, 1, 1,
0 and 2. The run of the largest score is returned. The ledger gets one charge, before the first run.
"""

from ghostclip.selection.scores import NoisyScore
from ghostclip.selection.search import Best, select

__all__ = ["Best", "NoisyScore", "select"]
