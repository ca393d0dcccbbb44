"""Reads CopyData frames off a connection, thousands at a time.

libpq hands out one message per call, and each costs a copy, an allocation and a return into the interpreter: at 300,000
messages a second that fills a core. If the connection is plain (no TLS, no GSSAPI encryption), we read its socket
ourselves from the command that starts the stream on: one ``recv`` brings thousands of messages, and
:mod:`pgcdc_assets.protocol.copydata` finds them. Other connections are read by libpq's own calls:
:mod:`pgcdc_assets.source.connect.readers`.
"""

from __future__ import annotations

import os
import socket
from struct import Struct

import numpy as np

from pgcdc_assets.core.encoding import UTF8, Encoding
from pgcdc_assets.errors import PgcdcError, ProtocolError, SourceUnavailable
from pgcdc_assets.protocol.copydata import HEADER, data_messages
from pgcdc_assets.protocol.frames import FrameBlock
from pgcdc_assets.source.connect.failures import ServerError, first_line
from pgcdc_assets.source.connect.readers import FrameReader

_LENGTH = Struct("!I")
_ROOM = 2 << 20
"""Bytes that are read ahead at most, unless one message is larger."""
_KINDS = frozenset(bytes([letter]) for letter in b"dcHWZCENSA")
_ASIDE = frozenset([b"N", b"S", b"A"])
"""Notices, parameters and notifications: they may come at any time, and mean nothing to a stream."""


class SocketReader(FrameReader):
    """Reads the socket of a plain connection that libpq has left idle, and leaves alone until the stream is over."""

    held = 0

    def __init__(self, descriptor: int, endpoint: str, encoding: Encoding = UTF8) -> None:
        self._socket = socket.socket(fileno=os.dup(descriptor))
        self._socket.setblocking(False)
        self._endpoint = endpoint
        self._encoding = encoding
        self._buffer = bytearray(_ROOM)
        self._unsent = bytearray()
        self._closed = self._finished = False

    def command(self, text: str) -> None:
        """Send START_REPLICATION, for which :meth:`begun` says whether the stream has begun, or COPY TO STDOUT. The
        answer to the previous COPY must have been taken to its end."""
        self._write(b"Q", self._encoding.encode(text) + b"\0")

    def begun(self) -> bool:
        """Whether the stream has begun; raises the server's refusal."""
        self.pull()
        while (kind := self._next()) == b"Z":
            # It belongs to a command that was refused before.
            continue
        if kind not in (b"W", None):
            raise ProtocolError(f"message {kind!r} answers the start of a stream", thing=self._endpoint)
        return kind == b"W"

    def pull(self) -> bool:
        self._flush()
        if self.held == len(self._buffer):
            self._buffer += bytes(len(self._buffer))
        try:
            with memoryview(self._buffer) as whole, whole[self.held :] as room:
                size = self._socket.recv_into(room)
        except BlockingIOError:
            return False
        except OSError as error:
            raise SourceUnavailable(error.strerror or type(error).__name__, thing=self._endpoint) from None
        self.held += size
        self._closed = size == 0
        if self._closed and not self.held:
            raise self._gone()
        return size > 0

    def take(self) -> FrameBlock:
        frames = self.data()
        if not len(frames) and self.other() is not None:
            raise SourceUnavailable("the server ended the stream", thing=self._endpoint)
        return frames

    def data(self) -> FrameBlock:
        """The data messages received so far, up to the first message of another kind."""
        starts, ends = data_messages(np.frombuffer(self._buffer, np.uint8, self.held))
        end = int(ends[-1]) if len(ends) else 0
        raw = bytes(memoryview(self._buffer)[:end])
        self._drop(end)
        return FrameBlock(raw, starts + HEADER, ends - starts - HEADER)

    def other(self) -> bytes | None:
        """The kind of the next message, if it is not data and has come; the message is dropped. ``Z`` ends the answer.

        Raises the server's error as a typed exception; the end of the answer still follows.
        """
        kind = self._next()
        if kind is None and self._closed and not self._whole():
            raise self._gone()
        return kind

    def send(self, frame: bytes) -> None:
        self._write(b"d", frame)

    def finish(self) -> bool:
        try:
            if not self._finished:
                self._finished = True
                self._write(b"c", b"")
            while self.pull():
                while (kind := self._next(data=True)) is not None:
                    if kind == b"Z":
                        return True
        except PgcdcError:
            return True
        return False

    def close(self) -> None:
        self._socket.close()

    # Within -------------------------------------------------------------------------------------

    def _whole(self) -> bool:
        """Whether the next message has come to its end."""
        return self.held >= HEADER and self._end() <= self.held

    def _end(self) -> int:
        """The end of the next message, whose header has been received."""
        length: int = _LENGTH.unpack_from(self._buffer, 1)[0]
        return 1 + length

    def _next(self, *, data: bool = False) -> bytes | None:
        """The kind of the next message that is not data (of any message, if ``data``), which is dropped from the
        buffer; None if it has not come.

        Messages that mean nothing to a stream are passed over; an error is raised.
        """
        while self.held >= HEADER:
            kind, end = bytes(self._buffer[:1]), self._end()
            if kind not in _KINDS or end < HEADER:
                raise ProtocolError(f"{kind!r} begins no message of the server", thing=self._endpoint)
            if end > self.held or (kind == b"d" and not data):
                return None
            body = bytes(self._buffer[HEADER:end])
            self._drop(end)
            if kind == b"E":
                raise _server_error(body, self._encoding).typed(self._endpoint)
            if kind not in _ASIDE:
                return kind
        return None

    def _drop(self, count: int) -> None:
        """Forget what has been taken; what is left moves to the front."""
        if not count:
            return  # A large message comes in thousands of pieces, and must not be moved for each of them.
        rest = self.held - count
        if rest:
            self._buffer[:rest] = self._buffer[count : self.held]
        self.held = rest
        if len(self._buffer) > _ROOM >= rest:
            # One message was larger than the buffer: its memory is released.
            del self._buffer[_ROOM:]

    def _write(self, kind: bytes, body: bytes) -> None:
        self._unsent += kind + _LENGTH.pack(len(body) + _LENGTH.size) + body
        self._flush()

    def _flush(self) -> None:
        """Send what the socket takes; the rest is sent by the next call, so that this never waits."""
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError:
            # The peer is gone; the next read raises that, with the reason.
            self._unsent.clear()

    def _gone(self) -> PgcdcError:
        return SourceUnavailable("the server closed the connection", thing=self._endpoint)


def _server_error(body: bytes, encoding: Encoding) -> ServerError:
    """ErrorResponse: fields of one letter and a text, each ended by a zero byte."""
    fields = {field[:1]: encoding.shown(field[1:]) for field in body.split(b"\0") if field}
    return ServerError(fields.get(b"C"), first_line(fields.get(b"M", "")))
