"""Where an operation leaves the examples, as `ghostclip.graph.dimensions` says, is held against its Jacobian."""

import pytest
import torch
from operation_table import OPERATIONS

from ghostclip.graph import moves
from ghostclip.graph import operations as op
from ghostclip.graph.rows import Owned, Rows


def jacobian(function, arguments, slot):
    """[outputs, inputs], and the result."""

    def of_one(argument):
        found = function(*[argument if place == slot else each for place, each in enumerate(arguments)])
        return torch.view_as_real(found) if found.is_complex() else found

    found = torch.autograd.functional.jacobian(of_one, arguments[slot])
    return found.reshape(-1, arguments[slot].numel()), of_one(arguments[slot]).shape


def dimension_kept(found, shape, result, dim):
    """The dimension of the result whose entries depend on one entry of the input's ``dim`` each; None without one."""
    depends = (found.abs() > 1e-12).view(*result, *shape)
    for kept, size in enumerate(result):
        pairs = depends.movedim((kept, len(result) + dim), (0, 1)).reshape(size, shape[dim], -1).any(2)
        own = torch.eye(shape[dim], dtype=torch.bool).repeat_interleave(size // shape[dim], 0)
        if len(own) == size and not bool((pairs & ~own).any()):
            return kept
    return None


def node_of(function, arguments, slot):
    """The operation's node if it has one alone, else None."""
    given = [each.detach().clone().requires_grad_(place == slot) for place, each in enumerate(arguments)]
    node = function(*given).grad_fn
    below = [edge for edge, _ in node.next_functions if edge is not None]
    return node if all(edge.name() == "torch::autograd::AccumulateGrad" for edge in below) else None


@pytest.mark.filterwarnings("ignore:Default grid_sample", "ignore:reduction")
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.one_in(2)
def test_no_operation_is_held_to_keep_examples_apart_that_mixes_or_moves_them(name):
    function, *shapes = OPERATIONS[name]
    arguments = [0.1 + 0.8 * torch.rand(shape, dtype=torch.float64) for shape in shapes]
    for slot, argument in enumerate(arguments):
        node = node_of(function, arguments, slot)
        # One of several operations, or one that is looked at otherwise.
        if node is None or (word := op.word_of(node)) in op.INDEXED | op.SHAPING:
            continue
        found, result = jacobian(function, arguments, slot)
        (edge,) = [edge for edge in node.next_functions if edge[0] is not None]
        for dim in (dim for dim, size in enumerate(argument.shape) if size == 3):
            kept = dimension_kept(found, argument.shape, result, dim)
            for after in (after for after in range(max(1, len(result))) if after != kept):
                owned = {edge: Owned(Rows(dim, "example")), (node, 0): Owned(Rows(after, "example"))}
                assert moves._may_mix(node, word, owned), f"slot {slot}, dimension {dim}, as {after} of the result"
