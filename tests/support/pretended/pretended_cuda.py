"""A pytest plugin (``-p pretended_cuda``, before torch is imported): CUDA is there, pretended by the processor.

cuda.cpp has what it is; here it is loaded, and those functions of `torch.cuda` that would ask a driver are replaced.

    python tests/support/pretended/build.py /tmp/cuda.so
    PRETENDED_CUDA=/tmp/cuda.so PYTHONPATH=tests/support/pretended python -m pytest -p pretended_cuda tests/gpu

With PRETENDED_DEFAULT=1 tensors are made there unless something else is said, so that tests for any device run on it.
"""

import copy
import ctypes
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

assert "torch" not in sys.modules, "torch asks for its devices once, when it is imported"
_found = importlib.util.find_spec("torch")
assert _found is not None
assert _found.origin is not None
for _name in ("libc10.so", "libtorch_cpu.so"):
    ctypes.CDLL(str(Path(_found.origin).parent / "lib" / _name), mode=ctypes.RTLD_GLOBAL)
_library = ctypes.CDLL(os.environ["PRETENDED_CUDA"])

import torch  # noqa: E402

__all__ = ["waits"]


def waits() -> int:
    """How often the host would have waited for the device since this was asked last."""
    return int(_library.ghostclip_waits())


def _nothing(*_: Any) -> None:
    pass


_ANSWERS = {
    "_lazy_init": _nothing,
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "is_bf16_supported": lambda *_, **__: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "get_device_name": lambda *_: "pretended",
    "synchronize": _nothing,
    "empty_cache": _nothing,
    "reset_peak_memory_stats": _nothing,
    "memory_allocated": lambda *_: 0,
    "max_memory_allocated": lambda *_: 1,
    "get_rng_state": lambda *_: torch.get_rng_state(),
    "set_rng_state": lambda state, *_: torch.set_rng_state(state),
    "get_rng_state_all": lambda: [torch.get_rng_state()],
}
for _name, _answer in _ANSWERS.items():
    setattr(torch.cuda, _name, _answer)
torch.backends.cudnn.is_acceptable = lambda tensor: False

if os.environ.get("PRETENDED_DEFAULT") == "1":
    torch.set_default_device("cuda")

_DEEPCOPIES = {kind: kind.__deepcopy__ for kind in (torch.Tensor, torch.nn.Parameter)}


def _copied(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """torch copies a storage by its device, which it must have been built for."""
    if tensor.device.type != "cuda":
        return _DEEPCOPIES.get(type(tensor), _DEEPCOPIES[torch.Tensor])(tensor, memo)
    if id(tensor) not in memo:
        twin = tensor.detach().clone()
        if isinstance(tensor, torch.nn.Parameter):
            twin = torch.nn.Parameter(twin, tensor.requires_grad)
        memo[id(tensor)] = twin.requires_grad_(tensor.requires_grad)
        twin.grad = copy.deepcopy(tensor.grad, memo)
    return memo[id(tensor)]


for _kind in _DEEPCOPIES:
    _kind.__deepcopy__ = _copied
