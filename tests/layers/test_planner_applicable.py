"""A strategy that raises while it is measured is not applicable: the others do its work, and `explain` says so."""

import pytest
import torch

from ghostclip.norms.convolution import ConvGrads, Geometry
from ghostclip.norms.term import Strategy
from ghostclip.planner import Planner


def convolution_term():
    torch.manual_seed(0)
    images, grads = torch.randn(3, 2, 4, 4, dtype=torch.float64), torch.randn(3, 4, 5, 5, dtype=torch.float64)
    return ConvGrads(images, grads, torch.Size((4, 2, 2, 2)), Geometry((1, 1), (1, 1), (1, 1), 1))


def with_broken(monkeypatch, term, errors):
    """Candidates of the term's kind, of which those named raise these errors; returns how often each was run."""
    found, runs = type(term).candidates, dict.fromkeys(errors, 0)

    def broken(name):
        def run(term, keep=False):
            runs[name] += 1
            raise errors[name]

        return run

    def candidates(self):
        made = found(self)
        for name in errors:
            made[name] = Strategy(made[name].family, broken(name), made[name].flops, made[name].keeps)
        return made

    monkeypatch.setattr(type(term), "candidates", candidates)
    return runs


@pytest.fixture(params=[False, True], ids=["measured", "deterministic"])
def deterministic(request):
    torch.use_deterministic_algorithms(request.param)
    yield
    torch.use_deterministic_algorithms(False)


ERRORS = [RuntimeError("no kernel\nfor this"), MemoryError("none"), torch.OutOfMemoryError("none"), ValueError()]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("strategy", ["auto", "gram", "direct"])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.usefixtures("deterministic")
@pytest.mark.one_in(4)
def test_any_strategy_may_raise(error, strategy, keep, monkeypatch):
    names = list(convolution_term().candidates())
    expected = convolution_term().per_example().flatten(1).square().sum(1)
    for count in range(len(names)):
        term, planner = convolution_term(), Planner(strategy)
        with monkeypatch.context() as patched:
            runs = with_broken(patched, term, dict.fromkeys(names[:count], error))
            for _ in range(2):
                answer, choice = planner.answer(term, keep)
                torch.testing.assert_close(answer.squared_norms, expected, rtol=1e-11, atol=0)
            assert choice.name in names[count:]
            assert set(choice.raised) == {name for name in runs if runs[name]}
            assert max(runs.values(), default=0) <= 1  # remembered
            assert set(choice.raised.values()) <= {f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}


@pytest.mark.usefixtures("deterministic")
def test_where_all_raise_the_first_error_goes_on_and_nothing_is_remembered(monkeypatch):
    term, planner = convolution_term(), Planner()
    with_broken(monkeypatch, term, {name: MemoryError(name) for name in term.candidates()})
    for _ in range(2):
        with pytest.raises(MemoryError):
            planner.answer(term, False)
    assert not planner.choices


def test_ctrl_c_in_a_measurement_goes_on(monkeypatch):
    term, planner = convolution_term(), Planner()
    with_broken(monkeypatch, term, {"patches": KeyboardInterrupt()})
    with pytest.raises(KeyboardInterrupt):
        planner.answer(term, False)
    assert not planner.choices
