"""Everything that can go wrong, as types, and how memory that ran out is told; messages are written where facts are."""

__all__ = [
    "BudgetExceededError",
    "ExamplesMixError",
    "GhostClipError",
    "GradientLeakError",
    "LedgerError",
    "LossShapeError",
    "PrivacyError",
    "RowsMovedError",
    "StaleInputError",
    "UnsupportedModelError",
    "VerificationError",
    "is_out_of_memory",
]


class GhostClipError(Exception):
    """Base of every error GhostClip raises on purpose (bad argument values are plain ValueError or TypeError)."""


class UnsupportedModelError(GhostClipError):
    """The model, or the way a layer was used, can't be clipped exactly; the message names module and remedy.

    Args:
        message: what is wrong, and what to do.
        name: of the module or parameter it is about, where one stands for it.
        place: in the graph, a gradient node or a layer's use; `ghostclip.check` finds the line of code by it.
    """

    def __init__(self, message: str = "", *, name: str = "", place: object = None) -> None:
        super().__init__(message)
        self.name, self.place = name, place

    def __reduce__(self) -> tuple[type, tuple[str, ...]]:
        return type(self), self.args  # a graph can't go to another process


class LossShapeError(GhostClipError, ValueError):
    """The losses are not one number per example, shape exactly [B]."""


class StaleInputError(GhostClipError):
    """A tensor the gradient formula needs was modified in place, or its graph was freed, since the forward pass."""


class VerificationError(GhostClipError):
    """Ghost norms or clipped sums differ from the slow obvious loop."""


class ExamplesMixError(UnsupportedModelError, VerificationError):
    """The loss of an example, or what the model keeps, depends on other examples, so that no example is bounded."""


class RowsMovedError(UnsupportedModelError):
    """A batch's rows don't belong to the examples that earlier batches like it showed; nothing was clipped.

    Ownership is measured in the next such batch, which may be exact.

    Args:
        message: what is wrong, and what to do.
        graph_stays: whether the passes can be made again over the same graph.
    """

    def __init__(self, message: str = "", *, graph_stays: bool = False) -> None:
        super().__init__(message)
        self.graph_stays = graph_stays


class PrivacyError(GhostClipError):
    """The call would break the privacy guarantee or its accounting; nothing was released."""


class GradientLeakError(PrivacyError):
    """A ``p.grad`` holds something that per-example clipping did not put there."""


class BudgetExceededError(PrivacyError):
    """The next step would spend more privacy than was agreed."""


class LedgerError(PrivacyError):
    """The file of spent privacy is missing, damaged, or belongs to another run."""


# How the CPU's allocator and the GPU's libraries say it, in RuntimeErrors of no type of their own.
_OUT_OF_MEMORY = ("not enough memory", "can't allocate memory", "out of memory", "ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that memory ran out."""
    import torch  # the command line names errors before it needs torch

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)
