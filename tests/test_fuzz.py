"""The fuzzer: fixed cases pass, a case is its seed's, planted bugs are found, and what it writes adds up."""

import json

import pytest
from test_experiments import script

fuzz = script("fuzz")

from fuzzing import settings  # noqa: E402
from fuzzing.record import Totals  # noqa: E402

SEEDS = range(40)
