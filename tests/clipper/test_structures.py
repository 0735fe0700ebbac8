"""The structure of a graph holds every number that its operations save and that doesn't grow with the batch.

Numbers that graph/nodes.py reads as torch saves them have a row of each kind below; those that it
changes have all of theirs.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
import torch.nn.functional as F
from case_models import Wired
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import ghostclip
from ghostclip import GhostClipper, UnsupportedModelError
from ghostclip.graph import layouts
from ghostclip.graph.nodes import FACTORS, inputs_first, signature_of
from ghostclip.graph.parameter_names import ParameterNames
from ghostclip.graph.reader import read_graph

EXAMPLES, WIDTH, LENGTH = 4, 12, 12


class Structures:
    """Structures of graphs of one model, a layer and one operation behind it, by (examples, length, arguments)."""

    def __init__(self, form: Callable[..., Tensor]) -> None:
        wiring = lambda m, x, *more: form(m.first(x), *more).abs().flatten()  # noqa: E731
        self.model = ghostclip.wrap(Wired(wiring, first=nn.Linear(WIDTH, WIDTH)))
        self.names = ParameterNames(self.model)

    def __call__(self, examples: int, length: int, *more: Any) -> int:
        return read_graph(self.model(torch.randn(examples, length, WIDTH), *more), self.names).structure


def image(h: Tensor) -> Tensor:
    """[B, T, 12] as [B, T, 3, 4]."""
    return h.unflatten(2, (3, 4))


# (operation on [B, T, 12] with one argument, two arguments).
OPERATIONS: dict[str, tuple[Callable[[Tensor, Any], Tensor], Any, Any]] = {
    "rot90 k": (lambda h, k: h[:, :12].rot90(k, (1, 2)), 1, 3),
    "roll shifts": (lambda h, by: h.roll(by, 2), 1, 2),
    "roll by two that Python hashes alike": (lambda h, by: h.roll(by, 2), 4, -4),
    "roll by minus one and two": (lambda h, by: h.roll(by, 2), -1, -2),
    "as_strided_scatter": (lambda h, at: h.as_strided_scatter(h[:, 0, :1], (len(h), 1), (144, 1), at), 0, 1),
    "narrow_copy start": (lambda h, start: torch.narrow_copy(h, 2, start, 3), 1, 2),
    "narrow_copy length": (lambda h, length: torch.narrow_copy(h, 2, 1, length), 2, 3),
    "diagonal offset": (lambda h, offset: image(h).diagonal(offset, 2, 3), 0, -1),
    "scatter_reduce": (lambda h, way: h.scatter_reduce(2, torch.zeros(1, 1, 1, dtype=torch.int64), h, way), "sum",
                       "amax"),
    "accumulated index_put": (lambda h, more: h.index_put((torch.tensor(0),), h[0], accumulate=more), False, True),
    "pad": (lambda h, pad: F.pad(h, pad), (1, 0), (0, 1)),
    "avg_pool of what is padded": (lambda h, counted: F.avg_pool2d(image(h), 3, 1, 1, count_include_pad=counted),
                                   False, True),
    "select index": (lambda h, index: h.select(2, index), 0, 1),
    "select from the end": (lambda h, index: h.select(2, index), -1, 7),
    "slice start": (lambda h, start: h[:, :, start:], 1, 2),
    "slice end": (lambda h, end: h[:, :, :end], 3, 4),
    "slice end from the end": (lambda h, end: h[:, :, :end], -1, 7),
    "slice step": (lambda h, step: h[:, :, ::step], 1, 2),
    "slice empty or whole": (lambda h, start: torch.ops.aten.slice(h, 2, start), 0, 12),
    "slice_scatter start": (lambda h, start: h.slice_scatter(h[:, :, :2], 2, start, start + 2), 0, 1),
    "slice_scatter step": (lambda h, step: h.slice_scatter(h[:, :, :2], 2, 0, 2 * step, step), 1, 2),
    "split dim": (lambda h, dim: h.split(2, dim)[0], 1, 2),
    "split_with_sizes": (lambda h, sizes: h.split(sizes, 2)[0], [4, 8], [8, 4]),
    "unbind": (lambda h, dim: h[:, :3, :3].unbind(dim)[0], 1, 2),
    "view with ones": (lambda h, shape: h[:, 0].reshape(len(h), *shape), (1, 12), (12, 1)),
    "expand": (lambda h, dim: h.select(dim, 0).unsqueeze(dim).expand(-1, h.shape[1], 12), 1, 2),
    "repeat": (lambda h, times: h.repeat(1, *times), (2, 1), (1, 2)),
    "enlarged": (lambda h, by: F.interpolate(h.mT, scale_factor=by), 2, 3),
    "affine_grid": (lambda h, at: F.affine_grid(h[:, :2, :3], [len(h), 1, 2, 3], at), False, True),
    "sum": (lambda h, dim: h.sum(dim), 1, 2),
    "group_norm": (lambda h, groups: F.group_norm(h.mT, groups), 2, 3),
    "causal attention": (lambda h, causal: F.scaled_dot_product_attention(*[h.unsqueeze(1)] * 3, is_causal=causal),
                         False, True),
    "permute": (lambda h, dims: h.permute(dims), (0, 1, 2), (0, 2, 1)),
    "squeeze": (lambda h, dim: h[:, :1, :1].squeeze(dim), 1, 2),
    "which part": (lambda h, part: h.chunk(2, 2)[part], 0, 1),
    "order of inputs": (lambda h, order: torch.cat([h.tanh(), h.exp()][::order], 2), 1, -1),
    "which input": (lambda h, place: (lambda both: both[0] * both[1] + both[place])([h.tanh(), h.tanh()]), 0, 1),
    "cosine loss": (lambda h, reduction: F.mse_loss(h, h.detach(), reduction=reduction).reshape(-1), "sum", "none"),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_has_another_structure_with_another_argument_alone(name: str) -> None:
    """Not with another number of examples."""
    form, one, other = OPERATIONS[name]
    structure = Structures(form)
    (own,) = {structure(examples, LENGTH, one) for examples in (2, 3, EXAMPLES, 8)}
    assert own != structure(EXAMPLES, LENGTH, other)


# Forwards of [B, T, 12] that do the same at every length.
ANY_LENGTH: dict[str, Callable[[Tensor], Tensor]] = {
    "end before the last": lambda h: h[:, : h.shape[1] - 1],
    "end counted from the end": lambda h: h[:, :-2],
    "start counted from the end": lambda h: h[:, -6:],
    "end written in both ways": lambda h: h[:, : -1 if h.shape[1] % 2 else h.shape[1] - 1],
    "narrow_copy": lambda h: torch.narrow_copy(h, 1, h.shape[1] - 2, 2),
    "slice_scatter": lambda h: h.slice_scatter(h[:, 1:], 1, 0, h.shape[1] - 1),
    "expand": lambda h: h[:, :1].expand(h.shape),
    "enlarged": lambda h: F.interpolate(h.mT, scale_factor=2),
    "group_norm": lambda h: F.group_norm(h.mT, 3),
    "a factor": lambda h: torch.add(h, h, alpha=h.shape[1]).clamp(max=h.shape[1]) / h.shape[1],
}


@pytest.mark.parametrize("name", ANY_LENGTH)
def test_texts_of_another_length_have_the_same_structure(name: str) -> None:
    structure = Structures(ANY_LENGTH[name])
    assert len({structure(EXAMPLES, length) for length in (5, 6, 9, 12)}) == 1


def test_a_view_in_another_order_has_another_structure() -> None:
    structure = Structures(lambda h, *stride: h.mul(2).as_strided((4, 12, 12), (*stride, 1)))
    assert len({structure(EXAMPLES, LENGTH, *stride) for stride in ((144, 12), (12, 48), (12, 12))}) == 3


def test_a_view_of_first_rows_has_another_structure_for_longer_texts() -> None:
    """Those of four texts of two words are of other examples where texts have three."""
    structure = Structures(lambda h: h.as_strided((len(h), 2, WIDTH), (2 * WIDTH, WIDTH, 1)))
    assert structure(EXAMPLES, 2) != structure(EXAMPLES, 3)


def test_windows_that_begin_later_in_each_example_have_a_structure_for_each_batch_size() -> None:
    """Those of two examples are their own; the last of thirteen would begin in another example."""
    structure = Structures(lambda h: h.as_strided((len(h), 12), (LENGTH * WIDTH + 1, 1)))
    assert structure(2, LENGTH) != structure(3, LENGTH)


def cut_at_random(m: Any, x: Tensor, cut: int, turn: bool = False) -> Tensor:
    h = m.first(x).tanh()
    h = torch.cat([h[:, :cut].exp(), h[:, cut:] * 2], 1)
    return m.last(h + turn * h.roll(1, 0)).square().flatten(1).sum(1)


def two(form: Callable[..., Tensor]) -> nn.Module:
    """Two layers, for a forward that is given."""
    return Wired(form, first=nn.Linear(6, 6), last=nn.Linear(6, 6))


def test_two_layers_of_one_kind_are_told_apart() -> None:
    orders = {True: ("first", "last"), False: ("last", "first")}

    def in_turn(m: Any, x: Tensor, turn: bool) -> Tensor:
        first, last = orders[turn]
        return m.get_submodule(last)(m.get_submodule(first)(x)).square().sum(1)

    model = ghostclip.wrap(two(in_turn))
    names = ParameterNames(model)
    found = [read_graph(model(torch.randn(4, 6), turn), names).structure for turn in (False, True, False)]
    assert found[0] == found[2] != found[1]


def test_no_more_is_remembered_than_structures_of_the_last_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward that cuts at random makes a new graph in most steps; what was forgotten is measured anew."""
    monkeypatch.setattr(layouts, "REMEMBERED", 3)
    model = two(cut_at_random).double()
    clipper = GhostClipper(model)
    for cut in [*range(9), *range(9)]:
        losses = model(torch.randn(EXAMPLES, 9, 6).double(), cut)
        expected = oracle.norms_by_single_losses(model, losses)
        torch.testing.assert_close(clipper.norms(losses), expected)
        assert len(clipper.passes._layouts._structures) <= 4
    with pytest.raises(UnsupportedModelError, match="mix"):
        clipper.norms(model(torch.randn(EXAMPLES, 9, 6).double(), 3, True))


def test_no_saved_tensor_is_unpacked() -> None:
    """Under activation checkpointing that would compute it again."""

    def unpack(_: Any) -> Tensor:
        raise AssertionError("a saved tensor was read")

    with saved_tensors_hooks(lambda tensor: tensor, unpack):
        for form, argument, _ in OPERATIONS.values():
            h = torch.randn(EXAMPLES, LENGTH, WIDTH, requires_grad=True)
            for node in inputs_first(form(h * h, argument).grad_fn):
                if (signature := signature_of(type(node))) is not None:
                    signature(node)


def types_of_arguments() -> dict[str, set[str]]:
    """{name of a number that nodes save: its types in the signatures of torch's operations}."""
    types: dict[tuple[str, str], set[str]] = defaultdict(set)
    for schema in torch._C._jit_get_all_schemas():
        operation = schema.name.partition("::")[2].replace("_", "").lower()
        for argument in schema.arguments:
            types[operation, argument.name].add(str(argument.type))
    found: dict[str, set[str]] = defaultdict(set)
    for kind, node in vars(torch._C._functions).items():
        operation = re.sub(r"Backward(AutogradNestedTensor)?\d+(_copy)?$", "", kind).lower()
        for name in dir(node):
            if name.startswith("_saved_") and not hasattr(node, f"_raw{name}"):
                found[name] |= types[operation, name.removeprefix("_saved_")]
    return found


FLOATS = {"float", "number", "Optional[float]", "Optional[number]", "List[number]"}


def test_the_factors_are_the_numbers_that_may_be_floats() -> None:
    """Of this version of torch. ``upper`` is a bool of triangular matrices, too."""
    types = types_of_arguments()
    floats = {name for name, own in types.items() if own & FLOATS}
    assert len(types) > 100
    assert floats - FACTORS == {"_saved_upper"}
    assert {name for name in FACTORS if types[name] & {"bool", "str", "List[int]", "Optional[List[int]]"}} == set()
