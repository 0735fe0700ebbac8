"""Random words that nobody can foresee, and random choices of examples made of them: AES-256 in counter mode.

The cipher is OpenSSL's, through the `cryptography` package. A stream serves one release and is dropped: the next one
has a key of its own from the operating system, in whatever process, after whatever fork, and where a virtual machine
was copied if its operating system notices. Memory is not wiped.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from ghostclip.validate import fraction, whole

__all__ = ["KEY_BYTES", "CipherGenerator", "KeyStream"]

KEY_BYTES, BLOCK_BYTES = 32, 16
# Words of a block, and coins thrown together, so that their words stay in the cache.
WORDS, CHUNK = BLOCK_BYTES // 8, 1 << 16


class KeyStream:
    """The key stream of AES-256-CTR (NIST SP 800-38A).

    Args:
        key: 32 bytes; None, as it must be where privacy depends on it, for the operating system's entropy.
        block: where the counter starts.
    """

    def __init__(self, key: bytes | None = None, block: int = 0) -> None:
        counter = modes.CTR(block.to_bytes(BLOCK_BYTES, "big"))
        key = os.urandom(KEY_BYTES) if key is None else key
        self._encrypt = Cipher(algorithms.AES(key), counter).encryptor().update_into

    def words64(self, count: int) -> np.ndarray:
        """The next ``count`` words, uint64."""
        return self._bytes(8 * count).view(np.uint64)

    def words32(self, count: int) -> np.ndarray:
        """The next ``count`` words, uint32."""
        return self._bytes(4 * count).view(np.uint32)

    def _bytes(self, count: int) -> np.ndarray:
        # A buffer must have room for what an incomplete block might add.
        found = np.empty(count + BLOCK_BYTES, np.uint8)
        self._encrypt(bytes(count), found.data)
        return found[:count]


class CipherGenerator:
    """As much of `numpy.random.Generator` as sampling asks for, exact for every probability that is a float.

    numpy's own draws a binomial number by formulas in floating point, from a generator that its output gives away; here
    each example has a coin of its own.

    Args:
        key: 32 random bytes that several processes share, or of a test; None: the operating system's entropy.
    """

    def __init__(self, key: bytes | None = None) -> None:
        self._key = os.urandom(KEY_BYTES) if key is None else key
        self._block = 0
        self._stream = KeyStream(self._key)

    @property
    def bit_generator(self) -> CipherGenerator:
        """What holds `state`, as numpy has it: this object."""
        return self

    @property
    def state(self) -> Mapping[str, Any]:
        """How far the stream has come; without its key. Setting it draws the same again."""
        return {"bit_generator": "AES-256-CTR", "block": self._block}

    @state.setter
    def state(self, state: Mapping[str, Any]) -> None:
        self._block = whole(block=state["block"])
        self._stream = KeyStream(self._key, self._block)

    def binomial(self, n: int, p: float) -> int:
        """How many of ``n`` coins that show heads with probability ``p`` do.

        A coin is a real number in [0, 1) below p: a word says so unless it holds the first 64 digits of p itself.
        """
        p = fraction(p=p)
        if p == 1.0:
            return n
        heads = 0
        for start in range(0, n, CHUNK):
            words = self._words(min(CHUNK, n - start))
            first, rest = divmod(p * 2.0**64, 1.0)
            heads += int((words < np.uint64(first)).sum())
            heads += sum(self._below(rest) for _ in range(int((words == np.uint64(first)).sum())))
        return heads

    def choice(self, a: int, size: int, *, replace: bool = False, shuffle: bool = False) -> np.ndarray:
        """``size`` different numbers below ``a``, every set of them equally likely, in no particular order.

        Raises:
            ValueError: more are asked for than there are, or repeated or shuffled ones, which sampling does not need.
        """
        if replace or shuffle or not 0 <= size <= a:
            raise ValueError(
                f"choice gives distinct numbers in no order, at most {a}; got {size=}, {replace=}, {shuffle=}"
            )
        if size > a // 2:
            return np.setdiff1d(np.arange(a), self._distinct(a, a - size), assume_unique=True)
        return self._distinct(a, size)

    def _distinct(self, below: int, size: int) -> np.ndarray:
        """The first ``size`` different ones of a sequence of independent numbers, uniform below ``below``."""
        found = np.empty(0, np.int64)
        while len(found) < size:
            # Words past the last whole multiple are left out, or small numbers would be favoured.
            words = self._words(size - len(found) + WORDS)
            fair = words[words < np.uint64(2**64 // below * below)] if 2**64 % below else words
            found = np.concatenate([found, (fair % np.uint64(below)).astype(np.int64)])
            _, places = np.unique(found, return_index=True)
            found = found[np.sort(places)]
        return found[:size]

    def _below(self, p: float) -> bool:
        """One coin."""
        while p > 0.0:
            first, p = divmod(p * 2.0**64, 1.0)
            word = int(self._words(1)[0])
            if word != int(first):
                return word < int(first)
        return False

    def _words(self, count: int) -> np.ndarray:
        """The next words, beginning with a whole block."""
        blocks = -(-count // WORDS)
        self._block += blocks
        return self._stream.words64(blocks * WORDS)[:count]
