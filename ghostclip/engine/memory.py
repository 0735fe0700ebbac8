"""How much memory this process may use, and how much a piece of work takes at the most."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

__all__ = ["DeviceMemory", "HostMemory", "MemoryMeter", "in_words", "memory_of"]

# Of a limit that is the machine's: the rest is for other processes, and for memory in pieces too small to be used.
SHARE = 0.9
PROCESS = Path("/proc/self")
CGROUPS = Path("/sys/fs/cgroup")


class MemoryMeter:
    """Where tensors lie.

    Attributes:
        limit: bytes that this process may use there in all.
    """

    limit: int

    def now(self) -> int:
        """Bytes in use."""
        raise NotImplementedError

    def peak_of(self, work: Callable[[], None]) -> int:
        """Bytes in use at the most during ``work``, those from before included."""
        raise NotImplementedError


class DeviceMemory(MemoryMeter):
    """Of a CUDA device, as torch's allocator counts it.

    Args:
        device: one of CUDA.
        limit: bytes; None: most of what other processes leave.
    """

    def __init__(self, device: torch.device, limit: int | None = None) -> None:
        self._device = device
        if limit is None:
            free, _ = torch.cuda.mem_get_info(device)
            limit = int(SHARE * (free + torch.cuda.memory_reserved(device)))
        self.limit = limit

    def now(self) -> int:
        """See `MemoryMeter.now`."""
        return torch.cuda.memory_allocated(self._device)

    def peak_of(self, work: Callable[[], None]) -> int:
        """See `MemoryMeter.peak_of`."""
        torch.cuda.reset_peak_memory_stats(self._device)
        work()
        return torch.cuda.max_memory_allocated(self._device)


class HostMemory(MemoryMeter):
    """Of a Linux machine: what of this process is resident.

    Args:
        limit: bytes; None: most of what the machine has free, and of what the process's control group allows.
    """

    def __init__(self, limit: int | None = None) -> None:
        if not (PROCESS / "status").exists():
            raise ValueError(
                'max_physical_batch_size="auto" measures memory on Linux and on CUDA devices only; give a number here'
            )
        self.limit = int(SHARE * min(self._left_by_others(), *_limits_of_groups())) if limit is None else limit

    def _left_by_others(self) -> int:
        return self.now() + _kilobytes(Path("/proc/meminfo"), "MemAvailable")

    def now(self) -> int:
        """See `MemoryMeter.now`."""
        return _kilobytes(PROCESS / "status", "VmRSS")

    def peak_of(self, work: Callable[[], None]) -> int:
        """See `MemoryMeter.peak_of`. Where the kernel's mark can't be set back, one from before may be the highest."""
        with suppress(OSError):
            (PROCESS / "clear_refs").write_text("5")
        work()
        return max(_kilobytes(PROCESS / "status", "VmHWM"), self.now())


def memory_of(device: torch.device, limit: int | None) -> MemoryMeter:
    """The memory of a device, of which ``limit`` bytes may be used.

    Raises:
        ValueError: its memory can't be measured.
    """
    if device.type == "cuda":
        return DeviceMemory(device, limit)
    if device.type != "cpu":
        raise ValueError(f'max_physical_batch_size="auto" can\'t measure memory of a device of {device.type}')
    return HostMemory(limit)


def in_words(size: float) -> str:
    """Bytes, in the unit that suits them."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def _kilobytes(file: Path, name: str) -> int:
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
