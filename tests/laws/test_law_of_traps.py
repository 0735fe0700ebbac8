"""Programs that a stored layout, or marks read carelessly, get wrong: each batch is exact or refused, as it must be."""

import pytest
import torch
from law_checks import assert_letters
from trap_programs import TRAPS

DTYPES = {"float32": torch.float32, "float64": torch.float64}


@pytest.mark.parametrize("program", TRAPS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_traps(program, dtype):
    assert_letters(program, dtype)
