"""Hooks that FSDP2 registers on tensors in each forward, told apart from a user's, which could mix examples.

A tensor's hook may replace the gradient that passes, so a batch in which a user registered one is measured. FSDP2's own
only ask for a layer's values before its backward. torch numbers all hooks of a process: 5 before a forward, 8 after it,
and FSDP2's were numbers 5 to 7, so none is a user's.
"""

from __future__ import annotations

from typing import Any

from torch.utils.hooks import RemovableHandle

__all__ = ["HOOKS_OF_FSDP2", "hooked_since", "note_hooks"]

# Numbers of hooks that FSDP2 registered since values were last gathered.
HOOKS_OF_FSDP2: list[int] = []


def hooked_since(number: int) -> bool:
    """Whether a hook was registered in this process since there were so many, besides FSDP2's own."""
    return RemovableHandle.next_id - number != sum([own >= number for own in HOOKS_OF_FSDP2])


def note_hooks(state: Any, output: Any) -> Any:
    """FSDP2's `_register_pre_backward_hook`, whose hooks ask for values and leave gradients as they are."""
    first = RemovableHandle.next_id
    output = type(state)._register_pre_backward_hook(state, output)
    HOOKS_OF_FSDP2.extend(range(first, RemovableHandle.next_id))
    return output
