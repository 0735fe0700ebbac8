"""Accelerate and Fabric around a loop of one's own: it trains exactly as without them; the rest is refused."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import private_runs as runs
import pytest
import torch
from ranks import on_ranks, told
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ghostclip import PrivacyEngine, PrivacyError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:OMP_NUM_THREADS/MKL_NUM_THREADS unset"),
]

MAX_NORM = 0.3


class Loop(NamedTuple):
    """What a library makes of a model and its optimizer, the engine, the library, and its clipping of gradients."""

    model: Any
    optimizer: Any
    engine: PrivacyEngine
    tool: Any = None
    clip: Callable[[], Any] = lambda: None


def parts(dtype: torch.dtype, noise_multiplier: float) -> tuple[Any, Any, Any, dict[str, Any]]:
    model = runs.network(dtype)
    torch.manual_seed(0)
    options = {"batch_size": 8, "max_physical_batch_size": 3, "clipping": MAX_NORM, "noise": "test", "seed": 3}
    options["noise_multiplier"] = noise_multiplier
    return model, torch.optim.SGD(model.parameters(), lr=0.5), runs.data(dtype=dtype), options


def by_accelerate(dtype=torch.float64, noise=0.0, mixed=False, engine_first=False, skip=1) -> Loop:
    accelerate = pytest.importorskip("accelerate")
    told()
    precision = "bf16" if mixed else None
    tool = accelerate.Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=skip)
    model, optimizer, data, options = parts(dtype, noise)
    if engine_first:
        engine = PrivacyEngine(model, optimizer, data, **options)
    model, optimizer = tool.prepare(model, optimizer)
    if not engine_first:
        engine = PrivacyEngine(model, optimizer, data, **options)
    clip = lambda: tool.clip_grad_norm_(model.parameters(), 1e-3)  # noqa: E731
    return Loop(model, optimizer, engine, tool, clip)


def by_fabric(dtype=torch.float64, noise=0.0, mixed=False) -> Loop:
    lightning = pytest.importorskip("lightning")
    from lightning.fabric.plugins import DoublePrecision
    from lightning.fabric.plugins.environments import LightningEnvironment

    from ghostclip.integrations.lightning import setup_fabric

    class Float64(DoublePrecision):
        """Leaves outputs in float64, which Fabric rounds to float32: the slow loop is in float64 too."""

        def convert_output(self, data: Any) -> Any:
            return data

    plugins: list[Any] = [Float64()] if dtype == torch.float64 else []
    settings: dict[str, Any] = {"devices": 1}
    if told():
        settings = {"devices": 2, "strategy": "ddp"}
        plugins.append(LightningEnvironment())
    precision = "bf16-mixed" if mixed else None
    fabric = lightning.Fabric(accelerator="cpu", plugins=plugins, precision=precision, **settings)
    fabric.launch()
    model, optimizer, data, options = parts(dtype, noise)
    model, optimizer, engine = setup_fabric(fabric, model, optimizer, data, **options)
    clip = lambda: fabric.clip_gradients(model, optimizer, max_norm=1e-3)  # noqa: E731
    return Loop(model, optimizer, engine, fabric, clip)


every_tool = pytest.mark.parametrize("build", [by_accelerate, by_fabric])


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    """Accelerate keeps its settings for the whole process."""
    yield
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()


def epoch(loop: Loop, losses_of: Any = runs.losses_of) -> list[list[Any]]:
    """The physical batches of each step of the loop that users write."""
    seen: list[list[Any]] = []
    for batch in loop.engine.batches():
        seen.append([])
        for examples in batch.physical():
            seen[-1].append(examples)
            loop.engine.backward(losses_of(loop.model, examples))
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    return seen


@pytest.mark.parametrize(
    "build", [by_accelerate, lambda: by_accelerate(engine_first=True), by_fabric], ids=["after", "before", "fabric"]
)
def test_a_loop_is_the_hand_written_one(build: Callable[[], Loop]) -> None:
    """And so are the steps of engine.step."""
    loop, stepped, reference = build(), build(), runs.network(torch.float64)
    for batches in epoch(loop):
        for p, total in zip(reference.parameters(), runs.clipped_sum(reference, batches, MAX_NORM), strict=True):
            p.data -= 0.5 * total / 8
    assert loop.engine.steps_taken == 3
    runs.train(stepped.engine)
    for each in (loop, stepped):
        torch.testing.assert_close(runs.weights(each.model), runs.weights(reference), rtol=1e-9, atol=1e-12)


def in_bfloat16(model: nn.Module, examples: Any) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(examples[0])
    return nn.functional.cross_entropy(outputs.float(), examples[1], reduction="none")


def test_accelerate_s_bfloat16_is_that_of_torch_to_the_bit() -> None:
    loop = by_accelerate(torch.float32, 1.0, mixed=True)
    epoch(loop)
    model, optimizer, data, options = parts(torch.float32, 1.0)
    epoch(Loop(model, optimizer, PrivacyEngine(model, optimizer, data, **options)), in_bfloat16)
    assert torch.equal(runs.weights(loop.model), runs.weights(model))


@every_tool
def test_a_run_in_bfloat16_goes_on_from_its_checkpoint(build: Callable[..., Loop], tmp_path: Any) -> None:
    loop = build(torch.float32, 1.0, mixed=True)
    runs.train(loop.engine, 1)
    loop.engine.save(tmp_path / "run")
    runs.train(loop.engine, 2)
    expected = runs.weights(loop.model)
    loop.engine.restore(tmp_path / "run")
    runs.train(loop.engine, 2)
    assert torch.equal(runs.weights(loop.model), expected)


@every_tool
def test_the_library_s_own_backward_is_refused(build: Callable[..., Loop]) -> None:
    loop = build(torch.float32)
    examples = next(next(runs.nonempty(loop.engine)).physical())
    loop.tool.backward(runs.losses_of(loop.model, examples).mean())
    losses = runs.losses_of(loop.model, examples)
    with pytest.raises(PrivacyError):
        loop.engine.backward(losses)


@every_tool
def test_the_library_s_clipping_finds_nothing(build: Callable[..., Loop]) -> None:
    loop = build(torch.float32)
    for examples in next(runs.nonempty(loop.engine)).physical():
        loop.engine.backward(runs.losses_of(loop.model, examples))
        assert loop.clip() == 0
    loop.optimizer.step()
    assert float(runs.grads(loop.model).norm()) > 1e-2


def weights_after(build: Callable[..., Loop], **options: Any) -> Any:
    """Weights after an epoch of this process's share, or the refusal."""
    loop = build(**options)
    try:
        epoch(loop)
    except PrivacyError as error:
        return str(error)
    return runs.weights(loop.model)


@every_tool
def test_two_processes_are_one(build: Callable[..., Loop], tmp_path: Any) -> None:
    first, second = on_ranks(lambda: weights_after(build), tmp_path)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, weights_after(build), rtol=1e-9, atol=1e-12)


def test_two_processes_need_prepare_first(tmp_path: Any) -> None:
    for said in on_ranks(lambda: weights_after(by_accelerate, engine_first=True), tmp_path):
        assert "give the engine that wrapper as model=" in said


def test_a_schedule_of_accelerate_moves_once_a_step() -> None:
    loop = by_accelerate()
    schedule = loop.tool.prepare(torch.optim.lr_scheduler.StepLR(loop.optimizer.optimizer, 1, gamma=0.5))
    runs.train(loop.engine, after=schedule.step)
    assert schedule.get_last_lr() == [0.5**4]


def test_steps_that_accelerate_skips_are_refused() -> None:
    loop = by_accelerate(skip=2)

    def train() -> None:
        for batch in loop.engine.batches():
            with loop.tool.accumulate(loop.model):
                runs.gather(loop.engine, batch)
                loop.optimizer.step()
                loop.optimizer.zero_grad()

    with pytest.raises(PrivacyError, match="had no step"):
        train()


def test_a_loader_that_accelerate_prepared_is_refused() -> None:
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    loader, model = accelerator.prepare(DataLoader(runs.data(), batch_size=8, shuffle=True)), runs.network()
    with pytest.raises(PrivacyError, match="pass a plain DataLoader"):
        PrivacyEngine(model, torch.optim.SGD(model.parameters(), lr=0.5), loader, noise_multiplier=1.0)
