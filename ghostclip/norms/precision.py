"""Full float32 for the products that norms and sums are made of, whatever precision torch may use elsewhere.

``torch.set_float32_matmul_precision`` and newer settings let torch round the factors of float32 products: to
TensorFloat-32 (ten bits) on GPUs, to bfloat16 (seven bits) on CPUs that have units for it. The norm of rows that were
rounded is not that of the rows which are summed, so a share could exceed the bound by a thousandth. The model's own
forward and backward, which give the rows, keep what was set. Norms and sums need no convolution and no recurrence.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch

__all__ = ["full_precision", "is_narrow"]

# Since torch 2.9 each kind of device has a setting of its own. The older one sets all; it can't be read if they differ.
_read: Any = getattr(torch._C, "_get_fp32_precision_getter", None)
_write: Any = getattr(torch._C, "_set_fp32_precision_setter", None)
_BACKENDS = ("cuda", "mkldnn")
_UNCHANGED = nullcontext()

# The settings are the process's, and each GPU's backward has a thread: the first one inside changes them, the last one
# puts them back.
_LOCK = threading.Lock()
_inside = 0
_before: tuple[str | None, dict[str, str]] | None = None


def full_precision(device: torch.device) -> AbstractContextManager[None]:
    """Inside, products of float32 matrices on such devices take their factors as they are."""
    # Whoever changes the settings is counted in ``_inside`` before.
    return _set_to_full(device) if is_narrow(device) or _inside else _UNCHANGED


@contextmanager
def _set_to_full(device: torch.device) -> Iterator[None]:
    global _inside, _before
    with _LOCK:
        _inside += 1
        if _inside == 1 and is_narrow(device):
            _before = _settings()
            torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        with _LOCK:
            _inside -= 1
            if not _inside and _before is not None:
                _put_back(*_before)
                _before = None


def is_narrow(device: torch.device) -> bool:
    """Whether products of float32 matrices on such devices may round their factors to something narrower."""
    if _read is None:
        return torch.get_float32_matmul_precision() != "highest"
    return _read("cuda" if device.type == "cuda" else "mkldnn", "matmul") not in ("ieee", "none")


def _settings() -> tuple[str | None, dict[str, str]]:
    """The older setting, None where it can't be read, and the newer ones of each kind of device."""
    older = None
    with suppress(RuntimeError):
        older = torch.get_float32_matmul_precision()
    return older, {} if _read is None else {backend: _read(backend, "matmul") for backend in _BACKENDS}


def _put_back(older: str | None, newer: dict[str, str]) -> None:
    if older is not None:
        torch.set_float32_matmul_precision(older)
    for backend, value in newer.items():
        if _read(backend, "matmul") != value:
            _write(backend, "matmul", "none")  # it may have had its value from a setting for more operations
            if _read(backend, "matmul") != value:
                _write(backend, "matmul", value)
