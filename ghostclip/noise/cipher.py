"""Random words that nobody can foresee: AES-256 in counter mode, its key from the operating system.

The cipher is OpenSSL's, through the `cryptography` package. A stream serves one release and is dropped: the next one
has a key of its own, in whatever process, after whatever fork, and where a virtual machine was copied if its operating
system notices. Memory is not wiped.
"""

from __future__ import annotations

import os

import numpy as np

__all__ = ["BLOCK_BYTES", "KEY_BYTES", "KeyStream"]

KEY_BYTES, BLOCK_BYTES = 32, 16


class KeyStream:
    """The key stream of AES-256-CTR (NIST SP 800-38A).

    Args:
        key: 32 bytes; None, as it must be where privacy depends on it, for the operating system's entropy.
        block: where the counter starts.

    Raises:
        ModuleNotFoundError: the `cryptography` package is not installed.
    """

    def __init__(self, key: bytes | None = None, block: int = 0) -> None:
        try:
            from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                'noise="hardened" needs the cryptography package, which is not installed; run: '
                'pip install "ghostclip[hardened]"',
                name=error.name,
            ) from error
        counter = modes.CTR(block.to_bytes(BLOCK_BYTES, "big"))
        key = os.urandom(KEY_BYTES) if key is None else key
        self._encrypt = Cipher(algorithms.AES(key), counter).encryptor().update_into

    def words(self, count: int) -> np.ndarray:
        """The next ``count`` words, uint64."""
        return self._bytes(8 * count).view(np.uint64)

    def halves(self, count: int) -> np.ndarray:
        """The next ``count`` words, uint32."""
        return self._bytes(4 * count).view(np.uint32)

    def _bytes(self, count: int) -> np.ndarray:
        # A buffer must have room for what an incomplete block might add.
        found = np.empty(count + BLOCK_BYTES, np.uint8)
        self._encrypt(bytes(count), found.data)
        return found[:count]
