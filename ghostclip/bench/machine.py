"""What a figure was taken on: processor, cores, versions, and how busy the machine was."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import torch

from ghostclip.native import kernels

__all__ = ["busy_warning", "commit", "describe", "in_words"]

QUIET = 0.5  # a load average above this, before the benchmark itself starts, means that something else is running


def describe(device: str = "cpu") -> dict[str, str | int | float]:
    """The machine as plain values for a JSON file; nothing in it names the machine or its user.

    Args:
        device: "cpu" or "cuda", where the figures are taken.
    """
    info = Path("/proc/cpuinfo")
    model = re.search(r"^model name\s*: (.*)", info.read_text(), re.MULTILINE) if info.exists() else None
    found: dict[str, str | int | float] = {
        "cpu": model[1].strip() if model else platform.processor() or platform.machine(),
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_average": _load(),
        "device": device,
        "kernels": kernels(),
    }
    if device.startswith("cuda"):
        found["gpu"] = torch.cuda.get_device_name(device)
    return found


def in_words(machine: dict[str, str | int | float]) -> str:
    """One line that names the machine under a table."""
    place = f"{machine['gpu']}, " if "gpu" in machine else ""
    kernels = f", C kernels {machine['kernels']}" if "kernels" in machine else ""
    return (
        f"{place}{machine['cpu']}, {machine['cores']} cores, {machine['threads']} used, torch {machine['torch']}, "
        f"load average {machine['load_average']} before the start{kernels}"
    )


def commit() -> str | None:
    """The commit of the checkout that this package runs from; "-dirty" follows where its code differs; None without."""
    root, git = Path(__file__).resolve().parents[2], shutil.which("git")
    if git is None or not (root / ".git").exists():
        return None
    asked = [[git, "-C", str(root), *words.split()] for words in ("rev-parse --short=7 HEAD", "diff HEAD -- ghostclip")]
    name, changes = (subprocess.run(words, capture_output=True, text=True, check=False).stdout for words in asked)
    return f"{name.strip()}{'-dirty' if changes else ''}" or None


def busy_warning() -> str | None:
    """A line to print when other programs are running, None when the machine is quiet."""
    if _load() <= QUIET:
        return None
    return (
        f"warning: the load average is {_load()}, so other programs are running; milliseconds will be too high, and "
        "ratios less certain. Wait for a quiet machine before quoting figures."
    )


def _load() -> float:
    """Runnable programs over the last minute, on average; 0.0 where the system doesn't say."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else 0.0
