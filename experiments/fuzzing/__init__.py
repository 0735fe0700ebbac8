"""Random differential tests: batches against the loop over single examples, neighbouring pairs in the engine."""

import sys
from pathlib import Path

# Layer cases, adversaries and the interpreter of graphs are the tests' own.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))
