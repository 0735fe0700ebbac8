"""Programs that a stored layout, or marks read carelessly, get wrong: each batch is exact or refused, as it must be."""

import pytest
import torch
from law_programs import SECOND_PASSES, assert_letters
from trap_programs import TRAPS

# In float64 gradients of 1e-38 aren't tiny.
DTYPES = {"float32": torch.float32, "float64": torch.float64}


@pytest.mark.parametrize("program", TRAPS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("second_pass", SECOND_PASSES)
def test_traps(program, dtype, second_pass):
    assert_letters(program, second_pass, dtype)
