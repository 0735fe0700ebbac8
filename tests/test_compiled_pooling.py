"""Backward through pooling in a compiled graph: what autograd gives, by operations that inductor calls."""

import pytest
import torch
from torch import nn
from torch.fx import Interpreter
from torch.fx.experimental.proxy_tensor import make_fx

from ghostclip.compiled.region import Region
from ghostclip.native.pooling import leave_pooling_alone

POOLS = {
    "averages side by side": nn.AvgPool2d(2),
    "averages of oblong windows": nn.AvgPool2d((2, 3)),
    "averages with a divisor": nn.AvgPool2d(2, divisor_override=3),
    "averages that leave a border": nn.AvgPool2d(5),
    "averages that overlap": nn.AvgPool2d(3, stride=2, padding=1),
    "averages beyond the border": nn.AvgPool2d(5, padding=2, ceil_mode=True, count_include_pad=False),
    "averages in one dimension": nn.Sequential(nn.Flatten(2), nn.AvgPool1d(4)),
    "maxima side by side": nn.MaxPool2d(2),
    "maxima that overlap": nn.MaxPool2d(3, stride=2, padding=1),
    "maxima of scattered pixels": nn.MaxPool2d(2, dilation=2, ceil_mode=True),
}


class Checked(Interpreter):
    """Runs a graph; operations of ours are held against what they say of themselves."""

    found = 0

    def call_function(self, target, args, kwargs):
        if getattr(target, "namespace", "") == "ghostclip":
            self.found += 1
            torch.library.opcheck(target, args, test_utils=("test_schema", "test_faketensor"))
        return super().call_function(target, args, kwargs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("name", POOLS)
def test_operations_give_what_autograd_gives(name, layout, dtype):
    torch.manual_seed(0)
    images = torch.randn(3, 2, 12, 12, dtype=dtype).contiguous(memory_format=layout)
    above = torch.randn_like(POOLS[name](images))

    def back(images, above):
        images = images.detach().requires_grad_()
        return torch.autograd.grad(POOLS[name](images), images, above)[0]

    graph = make_fx(back)(images, above)
    leave_pooling_alone(graph)
    run = Checked(graph)
    torch.testing.assert_close(
        run.run(images, above), back(images, above), rtol=1e-2 if dtype.itemsize < 4 else 1e-15, atol=0
    )
    assert run.found == 1


@pytest.mark.slow
def test_inductor_takes_them_as_they_are():
    torch.manual_seed(0)
    model = nn.Sequential(nn.MaxPool2d(3, 2, 1), nn.Tanh(), nn.AvgPool2d(2))

    def back(images):
        images = images.detach().requires_grad_()
        return torch.autograd.grad(model(images).square().sum(), images)

    images = torch.randn(2, 3, 12, 12)
    graph = make_fx(back)(images)
    region = Region(graph, [images])
    assert sum(getattr(node.target, "namespace", "") == "ghostclip" for node in graph.graph.nodes) == 2
    torch.testing.assert_close(region(images)[0], back(images)[0])
