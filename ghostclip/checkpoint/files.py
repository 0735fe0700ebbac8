"""What is in a checkpoint's folder: a manifest, the tensors, and a private part.

    manifest.json          the digest of the rest of it, format, version; name, size and SHA-256 of every other file;
                           the public state as JSON
    <part>.safetensors     the tensors of a public part of the state ("model", "optimizer", ...)
    private.json, private.safetensors      what must not be published, readable by its owner only

The digests find what accidents do to a file. They are no signature: whoever can write the folder can forge it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ghostclip.checkpoint.folder import place_of, previous_of, read_file, replace_folder
from ghostclip.checkpoint.plain import packed, unpacked
from ghostclip.errors import PrivacyError

__all__ = ["PARTS", "VERSION", "Stored", "load", "save"]

FORMAT, VERSION = "ghostclip checkpoint", 1
MANIFEST, PRIVATE = "manifest.json", "private"
# The public parts that may have tensors.
PARTS = ("model", "optimizer", "clipping")
PRIVATE_FILES = frozenset({f"{PRIVATE}.json", f"{PRIVATE}.safetensors"})
NAMES = PRIVATE_FILES | {MANIFEST} | {f"{part}.safetensors" for part in PARTS}

log = logging.getLogger(__name__)


class _Damaged(PrivacyError):
    """Something happened to the files; an older checkpoint may be whole."""


@dataclass(frozen=True)
class Stored:
    """A checkpoint that was read.

    Attributes:
        place: the folder.
        public, private: the state by part, as it was saved.
    """

    place: Path
    public: dict[str, Any]
    private: dict[str, Any]


def save(
    path: str | os.PathLike[str], public: Mapping[str, Any], private: Mapping[str, Any], *, folder_mode: int = 0o777
) -> None:
    """Writes a checkpoint; returns once it is on the disk. A crash at any time leaves this one or the one before.

    Args:
        path: a folder of that name is made or replaced; the one before is kept as ``<path>.previous``.
        public: {part: state}, states as `packed` takes them, tensors in ``PARTS`` only.
        private: likewise; goes to the private files.
        folder_mode: of the folder, before the umask.

    Raises:
        PrivacyError: a state can't be held, the path holds something else, or safetensors is not installed.
        OSError: it can't be written; the one before is as it was.
    """
    files: dict[str, bytes] = {}
    state = {}
    for part, value in {**public, PRIVATE: dict(private)}.items():
        tensors: dict[str, Tensor] = {}
        state[part] = packed(value, tensors, part)
        if tensors:
            files[f"{part}.safetensors"] = _safetensors().save(tensors)
    files[f"{PRIVATE}.json"] = _canonical(state.pop(PRIVATE))
    known = {name: {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)} for name, data in files.items()}
    manifest = {"format": FORMAT, "version": VERSION, "files": known, "state": state}
    text = json.dumps({"digest": _digest(manifest), "manifest": manifest}, indent=1, allow_nan=False)
    replace_folder(place_of(path), files | {MANIFEST: text.encode()}, PRIVATE_FILES, NAMES, _looks_intact, folder_mode)


def load(path: str | os.PathLike[str]) -> Stored:
    """Reads a checkpoint; where it is damaged or missing, the one before, which the log tells.

    Raises:
        PrivacyError: both are damaged, or it is of another version, or holds what doesn't belong there.
        OSError: none is there, or it can't be read.
    """
    place = place_of(path)
    try:
        return _read(place)
    except _Damaged as error:
        try:
            found = _read(previous_of(place))
        except _Damaged as other:
            if not place.exists() and not previous_of(place).exists():
                raise FileNotFoundError(2, "there is no checkpoint", str(place)) from None
            before = (
                f"the one before is of no use either: {other}"
                if previous_of(place).exists()
                else "there is none before"
            )
            raise PrivacyError(
                f"{error}; {before}. Put a copy of it back, or train anew with the same ledger=..., so that all count"
            ) from None
        log.warning("%s; went back to the one before, %s", error, found.place)
        return found


def _read(place: Path) -> Stored:
    manifest = _manifest(place)
    strange = sorted(set(os.listdir(place)) - {MANIFEST, *manifest["files"]})
    if strange:
        raise PrivacyError(
            f"the checkpoint {place} holds {', '.join(strange[:3])}, which its manifest doesn't know; move away what "
            "isn't part of it"
        )
    files = {name: _checked(place / name, known) for name, known in manifest["files"].items()}
    tensors = {name: _safetensors().load(data) for name, data in files.items() if name.endswith(".safetensors")}
    try:
        state = {**manifest["state"], PRIVATE: json.loads(files[f"{PRIVATE}.json"])}
        public = {part: unpacked(value, tensors.get(f"{part}.safetensors", {})) for part, value in state.items()}
    except (KeyError, ValueError, TypeError) as error:
        raise PrivacyError(f"the checkpoint {place} is not one that GhostClip wrote: {error!r} in its state") from error
    return Stored(place, public, private=public.pop(PRIVATE))


def _manifest(place: Path) -> dict[str, Any]:
    """The manifest, its digest checked and of our version."""
    try:
        found = json.loads(read_file(place / MANIFEST))
        digest, manifest = found["digest"], found["manifest"]
        if digest != _digest(manifest) or manifest["format"] != FORMAT:
            raise ValueError
    except (FileNotFoundError, NotADirectoryError):
        if place.is_file():
            raise PrivacyError(f"{place} is a file; a checkpoint is the folder that engine.save(path) made") from None
        what = "its manifest is missing" if place.exists() else "it is missing"
        raise _Damaged(f"the checkpoint {place} is damaged: {what}") from None
    except (ValueError, TypeError, KeyError, RecursionError):
        raise _Damaged(f"the checkpoint {place} is damaged: its manifest was changed or cut short") from None
    if manifest["version"] != VERSION:
        raise PrivacyError(
            f"the checkpoint {place} is of format version {manifest['version']}, and this GhostClip reads version "
            f"{VERSION}; go on with the GhostClip that wrote it"
        )
    if not set(manifest["files"]) < NAMES:
        raise PrivacyError(f"the checkpoint {place} lists files that no checkpoint has; it was not made by GhostClip")
    return manifest


def _checked(file: Path, known: Mapping[str, Any]) -> bytes:
    """The file's bytes, as the manifest knows them."""
    try:
        data = read_file(file)
    except FileNotFoundError:
        raise _Damaged(f"the checkpoint {file.parent} is damaged: {file.name} is missing") from None
    if len(data) != known["size"]:
        raise _Damaged(
            f"the checkpoint {file.parent} is damaged: {file.name} has {len(data)} of its {known['size']} bytes"
        )
    if hashlib.sha256(data).hexdigest() != known["sha256"]:
        raise _Damaged(f"the checkpoint {file.parent} is damaged: bytes in {file.name} have changed")
    return data


def _looks_intact(place: Path) -> bool:
    """Whether the manifest is whole and every file has its size; contents are looked at when they are needed."""
    try:
        known = _manifest(place)["files"]
        return all((place / name).stat().st_size == file["size"] for name, file in known.items())
    except (PrivacyError, OSError):
        return False


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _digest(manifest: Any) -> str:
    return hashlib.sha256(_canonical(manifest)).hexdigest()


def _safetensors() -> Any:
    """The library; PrivacyError says how to get it."""
    try:
        import safetensors.torch
    except ImportError:
        raise PrivacyError(
            "checkpoints are stored by the library safetensors, which is not installed; run in a checkout: "
            'pip install ".[checkpoint]"'
        ) from None
    return safetensors.torch
