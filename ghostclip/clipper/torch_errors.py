"""torch's errors about a graph, said in our words."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from ghostclip.errors import StaleInputError

__all__ = ["in_our_words"]


class in_our_words(AbstractContextManager[Any]):
    """torch's errors about changed or freed tensors, said in ours: a context."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *where: Any) -> None:
        if not isinstance(error, RuntimeError):
            return
        text = str(error)
        if "modified by an inplace operation" in text:
            raise StaleInputError(
                "a tensor that the per-example gradients need was modified in place after a layer had used it; "
                f"clone it before the change. torch says: {text.splitlines()[0]}"
            ) from error
        if "backward through the graph a second time" in text or "freed" in text:
            raise StaleInputError(
                "the graph of these losses was freed by an earlier norms(), backward() or .backward(); run the forward "
                "again, or pass retain_graph=True to the earlier call"
            ) from error
