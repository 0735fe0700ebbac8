"""What every test starts from: one thread and fixed seeds."""

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """The same random numbers for a test, whichever tests ran before it."""
    torch.random.default_generator.manual_seed(0)
