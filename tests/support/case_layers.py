"""Rows of the table in cases.py: transposed convolutions, bilinear layers, further norms, PReLU, and bags."""

from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch
from case_bags import BAG_CASES
from case_models import Wired, freeze, tie
from case_types import TIME_FIRST, Case, normal


def transposed(dims: int, channels: int, nn: ModuleType, **options: Any) -> torch.nn.Module:
    """A transposed convolution of ``dims`` dimensions to twice the channels, 3 wide by default."""
    return getattr(nn, f"ConvTranspose{dims}d")(channels, 2 * channels, **{"kernel_size": 3} | options)


TRANSPOSED: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (4, {}),
    "1x1 stride": (3, {"kernel_size": 1, "stride": 2}),
    "stride": (3, {"stride": 2}),
    "stride over gaps": (3, {"kernel_size": 2, "stride": 3}),
    "all padding": (4, {"padding": 2}),
    "more padding than kernel": (5, {"kernel_size": 1, "padding": 1}),
    "padding output_padding": (3, {"stride": 3, "padding": 1, "output_padding": 2}),
    "output_padding of a stride": (3, {"dilation": 3, "padding": 1, "output_padding": 1}),
    "output_padding past a stride": (3, {"dilation": 4, "stride": 2, "padding": 3, "output_padding": 3}),
    "depthwise stride no bias": (3, {"groups": 4, "stride": 2, "bias": False}),
    "groups all options": (3, {"groups": 2, "stride": 2, "padding": 1, "output_padding": 1, "dilation": 2}),
}


def _transposed() -> Iterator[Case]:
    for dims in (1, 2, 3):
        for name, (size, options) in TRANSPOSED.items():
            build = partial(transposed, dims, 4, **options)
            yield Case(f"conv_transpose{dims}d {name}", build, (normal(4, *[size] * dims),))
    strided = partial(transposed, 2, 4, stride=2, padding=1)
    sized = lambda nn: Wired(lambda m, x: m.up(x, output_size=[8, 7]), up=strided(nn))  # noqa: E731
    yield Case("conv_transpose2d output_size", sized, (normal(4, 4, 4),))
    last = partial(torch.Tensor.contiguous, memory_format=torch.channels_last)
    yield Case("conv_transpose2d channels_last", strided, (normal(4, 4, 3, lay_out=last),))
    yield Case("conv_transpose2d transposed", strided, (normal(4, 3, 5, lay_out=lambda x: x.mT),))
    expanded = normal(1, 3, 4, lay_out=lambda x: x.expand(-1, 4, -1, -1))
    yield Case("conv_transpose2d expanded", strided, (expanded,))
    yield Case("conv_transpose2d leaf input", strided, (normal(4, 3, 3, requires_grad=True),))
    for part in ("weight", "bias"):
        yield Case(f"conv_transpose2d frozen {part}", lambda nn, p=part: freeze(strided(nn), p), (normal(4, 3, 3),))
    for name, groups in {"": 1, " groups": 2}.items():
        twice = lambda nn, g=groups: nn.Sequential(*[nn.ConvTranspose1d(2, 2, 3, padding=1, groups=g)] * 2)  # noqa: E731
        yield Case(f"conv_transpose1d{name} twice", twice, (normal(2, 5),))
    mixed = lambda nn: nn.Sequential(nn.Conv1d(2, 2, 3), nn.Tanh(), nn.ConvTranspose1d(2, 2, 3, stride=2))  # noqa: E731
    yield Case("conv and conv_transpose tied", lambda nn: tie(mixed(nn), "0", "2"), (normal(2, 6),))
    folded = lambda m, x: m.up(x.flatten(0, 1)).unflatten(0, x.shape[:2])  # noqa: E731
    up = lambda nn: Wired(folded, up=nn.ConvTranspose1d(2, 3, 2, stride=2))  # noqa: E731
    yield Case("conv_transpose1d folded", up, (normal(3, 2, 4),))
    decoder = lambda nn: nn.Sequential(  # noqa: E731
        nn.ConvTranspose2d(3, 4, 2, stride=2),
        nn.ReLU(inplace=True),
        nn.ConvTranspose2d(4, 2, 3, padding=1),
        nn.Sigmoid(),
    )
    yield Case("conv_transpose2d decoder in place", decoder, (normal(3, 3, 3),))


def _bilinear() -> Iterator[Case]:
    """Bilinear: either of its inputs the wider one, any number of positions."""
    for name, sizes in {"": (3, 4, 5), " wide out": (2, 2, 9), " one out": (6, 5, 1), " 1 to 1": (1, 1, 1)}.items():
        for shape in ((), (6,), (2, 3)):
            specs = normal(*shape, sizes[0]), normal(*shape, sizes[1])
            yield Case(f"bilinear{name} {len(shape) + 2}-D {shape}", lambda nn, s=sizes: nn.Bilinear(*s), specs)
    pair = normal(3), normal(4)
    yield Case("bilinear 3-D no bias", lambda nn: nn.Bilinear(3, 4, 2, bias=False), (normal(5, 3), normal(5, 4)))
    for part in ("weight", "bias"):
        yield Case(f"bilinear frozen {part}", lambda nn, p=part: freeze(nn.Bilinear(3, 4, 2), p), pair)
    leaf = normal(5, 3, requires_grad=True), normal(5, 4, lay_out=lambda x: x.mT.contiguous().mT)
    yield Case("bilinear leaf input", lambda nn: nn.Bilinear(3, 4, 2), leaf)
    same = normal(5), normal(5)
    twice = lambda nn: Wired(lambda m, x, y: m.b(torch.tanh(m.b(x, y)), y), b=nn.Bilinear(5, 5, 5))  # noqa: E731
    yield Case("bilinear twice", twice, same)
    own = lambda nn: Wired(lambda m, x: m.b(x, x).relu_(), b=nn.Bilinear(5, 5, 4))  # noqa: E731
    yield Case("bilinear one input in place", own, (normal(5),))
    time_first = normal(6, 3, batch_dim=1), normal(6, 4, batch_dim=1)
    build = lambda nn: nn.Bilinear(3, 4, 2)  # noqa: E731
    yield Case("bilinear time first", build, time_first, **TIME_FIRST)


def _normalization() -> Iterator[Case]:
    """RMSNorm; InstanceNorm1d, InstanceNorm2d, InstanceNorm3d; GroupNorm and LayerNorm where cases.py has none."""
    for name, options in {"": {}, " eps": {"eps": 0.1}}.items():
        yield Case(f"rmsnorm{name}", lambda nn, o=options: nn.RMSNorm(5, **o), (normal(6, 5),))
    yield Case("rmsnorm whole example", lambda nn: nn.RMSNorm((3, 5)), (normal(3, 5),))
    plain = lambda nn: nn.Sequential(nn.Linear(4, 5), nn.RMSNorm(5, elementwise_affine=False))  # noqa: E731
    yield Case("rmsnorm no affine", plain, (normal(6, 4),))
    yield Case("rmsnorm leaf input", lambda nn: nn.RMSNorm(5), (normal(6, 5, requires_grad=True),))
    yield Case("rmsnorm transposed", lambda nn: nn.RMSNorm(5), (normal(5, 6, lay_out=lambda x: x.mT),))
    yield Case("rmsnorm twice in place", lambda nn: nn.Sequential(*[nn.RMSNorm(5), nn.ReLU(True)] * 2), (normal(5),))
    twice = lambda nn: (lambda norm: nn.Sequential(norm, nn.Tanh(), norm))(nn.RMSNorm(5))  # noqa: E731
    yield Case("rmsnorm twice", twice, (normal(6, 5),))
    for name in ("LayerNorm", "RMSNorm"):
        norm = lambda nn, n=name: getattr(nn, n)(5)  # noqa: E731
        yield Case(f"{name.lower()} time first", norm, (normal(6, 5, batch_dim=1),), **TIME_FIRST)
        chain = lambda nn, n=name: nn.Sequential(nn.Linear(5, 5), getattr(nn, n)(5))  # noqa: E731
        yield Case(f"{name.lower()} frozen", lambda nn, c=chain: freeze(c(nn), "1.weight"), (normal(5),))
    for dims in (1, 2, 3):
        norm = lambda nn, d=dims, **o: getattr(nn, f"InstanceNorm{d}d")(3, **{"affine": True} | o)  # noqa: E731
        images = normal(3, *(4, 3, 2)[:dims])
        yield Case(f"instancenorm{dims}d", norm, (images,))
        yield Case(f"instancenorm{dims}d eps", partial(norm, eps=0.1), (images,))
        yield Case(f"instancenorm{dims}d frozen weight", lambda nn, f=norm: freeze(f(nn), "weight"), (images,))
        yield Case(f"instancenorm{dims}d frozen bias", lambda nn, f=norm: freeze(f(nn), "bias"), (images,))
        yield Case(f"instancenorm{dims}d leaf input", norm, (normal(3, *images.shape[1:], requires_grad=True),))
        yield Case(f"instancenorm{dims}d twice in place", lambda nn, f=norm: nn.Sequential(*[f(nn), nn.ReLU(True)] * 2),
                   (images,))  # fmt: skip
        between = lambda nn, d=dims, f=norm: nn.Sequential(  # noqa: E731
            getattr(nn, f"Conv{d}d")(3, 3, 1), f(nn, affine=False), getattr(nn, f"Conv{d}d")(3, 2, 1)
        )
        yield Case(f"instancenorm{dims}d no affine", between, (images,))
        tracking = partial(norm, track_running_stats=True)
        yield Case(f"instancenorm{dims}d of statistics in eval mode", lambda nn, f=tracking: _settled(f(nn)), (images,))
    last = partial(torch.Tensor.contiguous, memory_format=torch.channels_last)
    yield Case("instancenorm2d channels_last", lambda nn: nn.InstanceNorm2d(3, affine=True),
               (normal(3, 4, 5, lay_out=last),))  # fmt: skip
    # A GroupNorm of a channels_last input that needs no gradient ends torch's CPU backward (2.13) with a segmentation
    # fault, so a convolution goes before it.
    behind = lambda nn: nn.Sequential(nn.Conv2d(3, 4, 2), nn.GroupNorm(2, 4))  # noqa: E731
    yield Case("groupnorm channels_last", behind, (normal(3, 4, 5, lay_out=last),))
    yield Case("groupnorm 5-D", lambda nn: nn.GroupNorm(2, 4), (normal(4, 2, 3, 2),))
    yield Case("groupnorm frozen weight", lambda nn: freeze(nn.GroupNorm(2, 4), "weight"), (normal(4, 3),))


def _settled(norm: torch.nn.Module) -> torch.nn.Module:
    """The norm in eval mode, with statistics that are not those of no data."""
    norm.running_mean += torch.tensor([0.5, -1.0, 0.0])
    norm.running_var *= torch.tensor([0.5, 2.0, 3.0])
    return norm.eval()


def _prelu() -> Iterator[Case]:
    """PReLU: one slope for all, or one a channel."""
    for shape in ((4,), (4, 5), (4, 3, 2), (4, 2, 3, 2)):
        for slopes in (1, 4):
            build = lambda nn, n=slopes: nn.PReLU(n)  # noqa: E731
            yield Case(f"prelu {slopes} {len(shape) + 1}-D", build, (normal(*shape),))
    yield Case("prelu 1 of 1", lambda nn: nn.PReLU(), (normal(1),))
    yield Case("prelu leaf input", lambda nn: nn.PReLU(4), (normal(4, 3, requires_grad=True),))
    yield Case("prelu transposed", lambda nn: nn.PReLU(4), (normal(3, 4, lay_out=lambda x: x.mT),))
    last = partial(torch.Tensor.contiguous, memory_format=torch.channels_last)
    yield Case("prelu channels_last", lambda nn: nn.PReLU(4), (normal(4, 3, 3, lay_out=last),))
    yield Case("prelu time first", lambda nn: nn.PReLU(), (normal(6, 5, batch_dim=1),), **TIME_FIRST)
    shared = lambda nn: (lambda act: nn.Sequential(nn.Linear(5, 5), act, nn.Linear(5, 5), act))(nn.PReLU())  # noqa: E731
    yield Case("prelu twice", shared, (normal(5),))
    yield Case("prelu frozen", lambda nn: freeze(shared(nn), "1"), (normal(5),))
    network = lambda nn: nn.Sequential(  # noqa: E731
        nn.Conv2d(2, 3, 3), nn.InstanceNorm2d(3, affine=True), nn.PReLU(3), nn.ConvTranspose2d(3, 2, 2, stride=2)
    )
    yield Case("prelu among images", network, (normal(2, 5, 5),))


LAYER_CASES = [*_transposed(), *_bilinear(), *BAG_CASES, *_normalization(), *_prelu()]
