"""Reads the parent's orders, which are lines on a pipe."""

from __future__ import annotations

import os
import select

from pgcdc_assets.log.receive.messages import Order


class Orders:
    """Lines on a pipe, read without waiting."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN | select.POLLHUP)
        self._buffer = b""
        self.ended = False
        """Whether the pipe has ended, because the other side is gone."""

    def first_line(self) -> bytes:
        """The first line; waits for it."""
        while b"\n" not in self._buffer and not self.ended:
            self._read()
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def take(self) -> list[Order]:
        while not self.ended and self._poll.poll(0):
            self._read()
        *whole, self._buffer = self._buffer.split(b"\n")
        return [Order.from_line(line) for line in whole if line.strip()]

    def _read(self) -> None:
        piece = os.read(self._descriptor, 65536)
        self._buffer += piece
        self.ended = self.ended or not piece
