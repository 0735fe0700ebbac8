"""Checkpoints on disk: folders of tensors and JSON, there whole or not at all, and read without running code."""

from ghostclip.checkpoint.files import Stored, load, save
from ghostclip.checkpoint.folder import previous_of
from ghostclip.checkpoint.plain import packed, unpacked

__all__ = ["Stored", "load", "packed", "previous_of", "save", "unpacked"]
