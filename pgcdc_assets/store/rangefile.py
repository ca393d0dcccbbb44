"""A remote file for Parquet's readers: it has a position, and reads byte ranges."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

TAIL: Final = 256 << 10
"""How many bytes at the end are read first, in the request that also returns the file's size. They contain Parquet's
footer, or the whole of a small file."""


class RangeFile:
    """A file object for :class:`pyarrow.PythonFile`."""

    def __init__(self, read: Callable[[int, int], bytes], tail: Callable[[int], tuple[bytes, int]]) -> None:
        """``read(start, size)`` returns bytes. ``tail(size)`` returns the last bytes, and the size of the file."""
        self._read = read
        self._tail, self._size = tail(TAIL)
        self._at = 0
        self.closed = False

    def read(self, size: int | None = None) -> bytes:
        left = self._size - self._at
        taken = left if size is None or size < 0 else min(size, left)
        if taken <= 0:
            return b""
        start, self._at = self._at, self._at + taken
        within = start - (self._size - len(self._tail))
        return self._tail[within : within + taken] if within >= 0 else self._read(start, taken)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def size(self) -> int:
        return self._size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def close(self) -> None:
        self.closed = True
