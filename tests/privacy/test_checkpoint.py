"""Checkpoints on disk: they come back exactly, whole or not at all, and whatever happens to the files is noticed."""

import copy
import errno
import fcntl
import json
import logging
import math
import os
import pickle
import resource
import shutil
import stat
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import safetensors.torch
import torch
from ledgers import in_child

from ghostclip import checkpoint
from ghostclip.checkpoint import files, folder
from ghostclip.errors import PrivacyError

DTYPES = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip


def public(value: float = 1.0) -> dict[str, Any]:
    return {
        "model": {"weight": torch.full((2, 3), value), "count": torch.tensor(3)},
        "optimizer": {
            "state": {0: {"momentum": torch.full((3,), value)}},
            "param_groups": [{"lr": 0.1, "params": [0]}],
        },
        "progress": {"steps": value},
    }


PRIVATE: dict[str, Any] = {"random": torch.arange(5), "sampler": None}


def save(place: Path, value: float) -> None:
    checkpoint.save(place, public(value), PRIVATE)


def value_at(place: Path) -> float:
    """The value that was saved there, all of it seen to belong together."""
    stored = checkpoint.load(place)
    value = stored.public["progress"]["steps"]
    assert same(stored.public, public(value))
    assert same(stored.private, PRIVATE)
    return value


def same(left: Any, right: Any) -> bool:
    """Equality of values and types all the way down."""
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and left.tolist() == right.tolist()
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float):
        return repr(left) == repr(right)
    return left == right


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Where checkpoints 1 and 2 were saved one after the other."""
    save(tmp_path / "run.v1", 1.0)
    save(tmp_path / "run.v1", 2.0)
    return tmp_path / "run.v1"


def packed(value: Any) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(checkpoint.packed(value, tensors, "it"), allow_nan=False)
    return checkpoint.unpacked(json.loads(text), tensors)


@pytest.mark.parametrize(
    "value",
    [
        None, True, 0, -(2**130), 0.1, -0.0, math.inf, -math.inf, math.nan, 5e-324, "", "\u00e9\n\"{}", [], (), {},
        [1, (2.0, [None])], {"a": {1: {"b": (True,)}}}, {0: "int", "0": "str"}, OrderedDict(b=1, a=2),
        Counter({3: 2}), torch.tensor(2.5), {"x": torch.zeros(0, 3), 7: [torch.ones(2, 2)[:, 0]]},
        {"float": 1}, {"tensor": "x"}, {"tuple": []}, [["dict", 1]],
    ],
)  # fmt: skip
def test_plain_state_comes_back_exactly(value: Any) -> None:
    assert same(packed(value), value)


def test_tensors_of_every_type_come_back_exactly_and_shared_memory_is_stored_apart(tmp_path: Path) -> None:
    whole = torch.arange(6.0)
    shared = {"a": whole[:4], "b": whole[2:], "c": whole, "again": whole}
    state = {"model": {str(dtype): torch.arange(6).reshape(2, 3).to(dtype) for dtype in DTYPES} | shared}
    before = copy.deepcopy(state)
    checkpoint.save(tmp_path / "x", state, {})
    assert same(checkpoint.load(tmp_path / "x").public, state)
    assert same(state, before)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (object(), r"it is a builtins\.object"),
        ([{"f": len}], r"it\.0\.f is a builtins\.builtin_function"),
        ({1, 2}, r"it is a builtins\.set"),
        (np.zeros(2), r"it is a numpy\.ndarray"),
        (torch.float32, r"it is a torch\.dtype"),
        ({(1, 2): 3}, r"it has the key \(1, 2\)"),
        ({True: 3}, "it has the key True"),
        (torch.zeros(2, dtype=torch.complex64), "it is of type torch.complex64"),
        (torch.zeros(2).to_sparse(), "it is a Tensor of layout torch.sparse_coo"),
    ],
)
def test_what_would_need_code_is_refused_by_name(value: Any, name: str) -> None:
    with pytest.raises(PrivacyError, match=name):
        packed(value)


def test_private_files_are_their_owners_and_others_can_read_the_model(place: Path) -> None:
    modes = {name: stat.S_IMODE((place / name).stat().st_mode) for name in os.listdir(place)}
    assert {name for name, mode in modes.items() if mode == 0o600} == {"private.json", "private.safetensors"}
    assert all(mode & 0o400 for mode in modes.values())
    found = safetensors.torch.load_file(place / "model.safetensors")
    assert same(dict(sorted(found.items())), {"count": torch.tensor(3), "weight": torch.full((2, 3), 2.0)})


def test_nothing_is_unpickled(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in [(pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")]:
        monkeypatch.setattr(module, name, Mock(side_effect=AssertionError("pickle")))
    assert value_at(place) == 2.0


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "cut short": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b" x"),
    "missing": lambda file: file.unlink(),
}
NAMES = sorted(files.NAMES - {"clipping.safetensors"})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    place: Path, name: str, damage: Callable[[Path], Any], caplog: pytest.LogCaptureFixture
) -> None:
    damage(place / name)
    with caplog.at_level(logging.WARNING):
        assert value_at(place) == 1.0
    assert f"the checkpoint {place} is damaged" in caplog.text
    assert f"went back to the one before, {place}.previous" in caplog.text
    damage(checkpoint.previous_of(place) / name)
    with pytest.raises(PrivacyError, match=r"is damaged: .* the one before is of no use either: .*previous is damaged"):
        checkpoint.load(place)
    shutil.rmtree(checkpoint.previous_of(place))
    with pytest.raises(PrivacyError, match=r"is damaged: .*; there is none before. Put a copy of it back"):
        checkpoint.load(place)
    save(place, 3.0)
    assert value_at(place) == 3.0


def test_a_torn_checkpoint_does_not_displace_a_whole_one(place: Path) -> None:
    DAMAGE["cut short"](place / "model.safetensors")
    save(place, 3.0)
    assert (value_at(place), value_at(checkpoint.previous_of(place))) == (3.0, 1.0)


@pytest.mark.parametrize("name", NAMES)
def test_no_flipped_bit_goes_unseen(place: Path, name: str) -> None:
    whole = (place / name).read_bytes()
    for at in range(0, len(whole), 11):
        changed = bytearray(whole)
        changed[at] ^= 1 << at % 8
        (place / name).write_bytes(changed)
        # A change that leaves all values as they are, between two words of JSON, may pass.
        assert value_at(place) in ((1.0, 2.0) if name == "manifest.json" else (1.0,))


def declared(place: Path, **changes: Any) -> None:
    """A manifest that fits its digest and nothing else."""
    manifest = json.loads((place / "manifest.json").read_text())["manifest"] | changes
    (place / "manifest.json").write_text(json.dumps({"digest": files._digest(manifest), "manifest": manifest}))


def linked(file: Path) -> None:
    file.rename(file.parent.parent / "elsewhere")
    file.symlink_to(file.parent.parent / "elsewhere")


def piped(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


SECRET = {"../../secret": {"size": 1, "sha256": ""}}
NO_ACCIDENTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "another version": (lambda place: declared(place, version=2), "is of format version 2, and .* reads version 1"),
    "files of elsewhere": (lambda place: declared(place, files=SECRET), "lists files that no checkpoint has"),
    "a manifest elsewhere": (lambda place: linked(place / "manifest.json"), r"manifest\.json is a symbolic link"),
    "tensors elsewhere": (lambda place: linked(place / "model.safetensors"), r"model\.safetensors is a symbolic link"),
    "a pipe": (lambda place: piped(place / "model.safetensors"), r"model\.safetensors is not a regular file"),
    "a file more": (lambda place: (place / "notes.txt").touch(), r"holds notes\.txt, which its manifest doesn't know"),
}


@pytest.mark.parametrize("name", NO_ACCIDENTS)
def test_what_no_accident_leaves_is_refused(place: Path, name: str) -> None:
    """And the checkpoint before isn't taken in its place."""
    change, message = NO_ACCIDENTS[name]
    change(place)
    with pytest.raises(PrivacyError, match=message):
        checkpoint.load(place)


def test_what_is_in_the_way_is_left_alone(place: Path) -> None:
    (place / "notes.txt").write_text("mine")
    with pytest.raises(PrivacyError, match=r"holds notes\.txt, which is not part of a checkpoint and would be lost"):
        save(place, 3.0)
    (place.parent / "x.previous").mkdir()
    (place.parent / "x.previous" / "thesis.tex").write_text("mine")
    with pytest.raises(PrivacyError, match=r"x\.previous holds thesis\.tex"):
        save(place.parent / "x", 1.0)
    with pytest.raises(PrivacyError, match="in the way of a checkpoint: it is not a folder"):
        save(place / "notes.txt", 1.0)
    with pytest.raises(FileExistsError, match="the checkpoint was not saved: "):  # and nothing was before
        save(place / "notes.txt" / "x", 1.0)
    assert (place / "notes.txt").read_text() == (place.parent / "x.previous" / "thesis.tex").read_text() == "mine"
    assert not (place.parent / "x").exists()


def test_where_none_is(place: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        checkpoint.load(place.parent / "none")
    with pytest.raises(ValueError, match="path must name a folder"):
        checkpoint.load("")
    with pytest.raises(TypeError, match="path must be a str or a Path; got 3 of type int"):
        save(3, 1.0)  # type: ignore[arg-type]
    with pytest.raises(PrivacyError, match=r"model.safetensors is a file; a checkpoint is the folder"):
        checkpoint.load(place / "model.safetensors")
    save(place / "new" / "deep" / "x", 1.0)
    assert value_at(place / "new" / "deep" / "x") == 1.0


def test_a_link_to_a_checkpoint_is_followed(place: Path) -> None:
    link = place.parent / "latest"
    link.symlink_to(place)
    save(link, 3.0)
    assert link.is_symlink()
    assert (value_at(link), value_at(place), value_at(checkpoint.previous_of(place))) == (3.0, 3.0, 2.0)


def save_with(place: Path, value: float, at: int, instead: Callable[[], Any]) -> int:
    """Saves with something else before one of the system calls; returns how many there were."""
    count = 0

    def counted(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == at:
            instead()
        return call(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("open", "fsync", "rename"):
            patch.setattr(folder.os, name, partial(counted, getattr(os, name)))
        save(place, value)
    return count


def each_call_of_a_save(place: Path) -> Iterator[int]:
    """Numbers of its system calls, at each of which checkpoint 2 is in place; whatever happens, it or 3 is there."""
    count = save_with(place, 2.0, 0, lambda: None)
    assert count > 15
    for at in range(1, count + 1):
        yield at
        assert value_at(place) in (2.0, 3.0)
        save(place, 2.0)
        assert value_at(place) == 2.0
        assert not Path(f"{place}.partial").exists()


def test_a_full_disk_at_any_call_leaves_what_was_there(place: Path) -> None:
    def fail() -> None:
        raise OSError(errno.ENOSPC, "no space")

    errors = []
    for at in each_call_of_a_save(place):
        try:
            save_with(place, 3.0, at, fail)
        except OSError as error:
            errors.append(error)
        else:  # the one call that may fail in silence reads the old checkpoint, which a complete new one replaces then
            assert value_at(place) == 3.0
        assert not Path(f"{place}.partial").exists()
    assert len(errors) == at - 1
    assert {error.errno for error in errors} <= {errno.ENOSPC, errno.ENOTEMPTY}
    assert {error.filename for error in errors} == {str(place)}
    assert all("what was saved before is still there" in str(error) for error in errors)


def test_a_limit_in_the_middle_of_a_file(place: Path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
    try:
        with pytest.raises(OSError, match="what was saved before is still there"):
            save(place, 3.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert value_at(place) == 2.0
    assert not Path(f"{place}.partial").exists()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_kill_at_any_call_leaves_one_or_the_other(place: Path) -> None:
    found = set()
    for at in each_call_of_a_save(place):
        assert in_child(lambda at=at: save_with(place, 3.0, at, lambda: os._exit(9))) == 9
        found.add(value_at(place))
    assert found == {2.0, 3.0}


def test_ctrl_c_at_any_call_leaves_one_or_the_other(place: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    for at in each_call_of_a_save(place):
        with pytest.raises(KeyboardInterrupt):
            save_with(place, 3.0, at, interrupt)


def test_two_processes_do_not_write_at_once(place: Path) -> None:
    partial_folder = Path(f"{place}.partial")
    partial_folder.mkdir()
    descriptor = os.open(partial_folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(PrivacyError, match=r"another process is saving a checkpoint at .*run\.v1; give each run its"):
        save(place, 3.0)
    os.close(descriptor)
    assert value_at(place) == 2.0
    assert partial_folder.exists()


def test_a_missing_library_is_named_in_one_line(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.delitem(sys.modules, "safetensors.torch", raising=False)
    for call in (lambda: save(place, 3.0), lambda: checkpoint.load(place)):
        with pytest.raises(PrivacyError, match=r'^[^\n]*pip install "\.\[checkpoint\]"$'):
            call()
