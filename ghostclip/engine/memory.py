"""How much memory this process may use, and how much a piece of work takes at the most."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

__all__ = ["MemoryMeter", "in_words"]

# Of a limit that is the machine's: the rest is for other processes, and for memory in pieces too small to be used.
SHARE = 0.9
PROCESS = Path("/proc/self")
CGROUPS = Path("/sys/fs/cgroup")


class MemoryMeter:
    """Where tensors lie: of a CUDA device as torch's allocator counts it; on Linux what of this process is resident.

    ``limit`` is how many bytes may be used there in all; None: most of what the machine or the GPU has free, and of
    what the process's control groups allow. Raises ValueError where memory can't be measured.
    """

    def __init__(self, device: torch.device, limit: int | None) -> None:
        self._device = device if device.type == "cuda" else None
        if device.type not in ("cuda", "cpu"):
            raise ValueError(f'max_physical_batch_size="auto" can\'t measure memory of a device of {device.type}')
        if device.type == "cpu" and not (PROCESS / "status").exists():
            raise ValueError(
                'max_physical_batch_size="auto" measures memory on Linux and on CUDA devices only; give a number here'
            )
        self.limit = int(SHARE * self._available()) if limit is None else limit

    def _available(self) -> int:
        """Bytes in use here, and those that nobody uses."""
        if self._device is not None:
            return torch.cuda.mem_get_info(self._device)[0] + torch.cuda.memory_reserved(self._device)
        return min(self.now() + _bytes_in(Path("/proc/meminfo"), "MemAvailable"), *_limits_of_groups())

    def now(self) -> int:
        """Bytes in use."""
        if self._device is not None:
            return torch.cuda.memory_allocated(self._device)
        return _bytes_in(PROCESS / "status", "VmRSS")

    def peak_of(self, work: Callable[[], None]) -> int:
        """Bytes in use at the most during ``work``, those from before included.

        Where Linux's mark can't be set back, one from before may be the highest.
        """
        if self._device is not None:
            torch.cuda.reset_peak_memory_stats(self._device)
            work()
            return torch.cuda.max_memory_allocated(self._device)
        with suppress(OSError):
            (PROCESS / "clear_refs").write_text("5")
        work()
        return max(_bytes_in(PROCESS / "status", "VmHWM"), self.now())


def in_words(size: float) -> str:
    """Bytes, in the unit that suits them."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def _bytes_in(file: Path, name: str) -> int:
    """A line such as ``VmRSS:  1024 kB`` of a file of Linux, in bytes; as much as there can be where it isn't there."""
    for line in file.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    return sys.maxsize


def _limits_of_groups() -> list[int]:
    """What the control groups of this process allow, from its own up to the outermost; as much as there can be."""
    found = [sys.maxsize]
    with suppress(OSError, ValueError):
        for line in (PROCESS / "cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if kinds and "memory" not in kinds.split(","):
                continue
            root = CGROUPS / "memory" if kinds else CGROUPS
            name = "memory.limit_in_bytes" if kinds else "memory.max"
            folder = root / path.strip("/")
            for group in (folder, *folder.parents):
                found += _number_in(group / name)
                if group == root:
                    break
    return found


def _number_in(file: Path) -> list[int]:
    """The number in a file; none where it isn't there, or says that there is no limit."""
    with suppress(OSError, ValueError):
        return [int(file.read_text())]
    return []
