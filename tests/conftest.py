"""What every test starts from: one thread and fixed seeds."""

import gc
import logging
import math
import zlib
from collections.abc import Iterator

import pytest
import torch
import torch.utils.data

from ghostclip.native import library
from ghostclip.nn.declared import DECLARED
from ghostclip.nn.rnn.identity_input import possible

torch.set_num_threads(1)
# Workers of a data loader that the garbage collector finds are waited for, each for 5 seconds: tests leave many behind.
torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.5


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks as slow all but one in n of the cases of a test marked ``one_in(n)``, those kept drawn by their names."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("one_in"):
            cases.setdefault(item.nodeid.split("[")[0], []).append(item)
    for own in cases.values():
        kept = math.ceil(len(own) / own[0].get_closest_marker("one_in").args[0])
        for item in sorted(own, key=lambda each: zlib.crc32(each.name.encode()))[kept:]:
            item.add_marker("slow")


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """Tests that need a GPU are counted in the last line, not shown one by one."""
    if report.skipped and any(reason in str(report.longrepr) for reason in ("no CUDA device", "without CUDA")):
        return "need a GPU", "", "NEEDS A GPU"
    return None


def pytest_collection_finish() -> None:
    """Garbage is not looked for among the tests themselves: looking took a tenth of the time of all."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """The same random numbers for a test, whichever tests ran before it."""
    torch.random.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def same_log_level() -> Iterator[None]:
    """Scripts that tests run set the logger's level for their process."""
    log = logging.getLogger("ghostclip")
    before = log.level
    yield
    log.setLevel(before)


@pytest.fixture
def coarse_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every epsilon is from a coarser grid of privacy losses: a little larger, in a tenth of the time."""
    monkeypatch.setattr("ghostclip.accounting.losses.PLD_INTERVAL", 2e-3)


@pytest.fixture(params=["compiled", "tensor operations", pytest.param("identity input", marks=pytest.mark.slow)])
def every_backward(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All backward passes through time: the compiled loop, tensor operations without a compiler, and cuDNN's."""
    if request.param != "compiled":
        monkeypatch.setattr("ghostclip.nn.rnn.kernels.has_compiled_loop", lambda trace: False)
        if request.param == "identity input":
            monkeypatch.setattr("ghostclip.nn.rnn.kernels.serves", possible)
    elif library("time_loop") is None:
        pytest.skip("no C compiler here")


@pytest.fixture
def declarations() -> Iterator[None]:
    """`ghostclip.same_as` holds for the process; here, for a test."""
    before = dict(DECLARED)
    DECLARED.clear()
    yield
    DECLARED.clear()
    DECLARED.update(before)
