"""What every test starts from: one thread and fixed seeds."""

import pytest
import torch

from ghostclip.native import library

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """The same random numbers for a test, whichever tests ran before it."""
    torch.random.default_generator.manual_seed(0)


@pytest.fixture(params=["compiled", "tensor operations"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways back through time: the compiled loop and, where there is no compiler, what stands in for it."""
    if request.param == "tensor operations":
        monkeypatch.setattr("ghostclip.nn.recurrence.available", lambda trace: False)
    elif library("time_loop") is None:
        pytest.skip("no C compiler here")
