"""Reads CopyData frames from a connection: by libpq over any transport, or directly from the socket.

libpq returns one message per call. Each message costs a copy, an allocation and a return into the interpreter, so
300,000 messages a second use a whole core. On a plain connection (no TLS, no GSSAPI encryption) we read the socket
ourselves, beginning with the answer to START_REPLICATION. One ``recv`` then returns thousands of messages.
"""

from __future__ import annotations

import os
import socket
from abc import ABC, abstractmethod
from struct import Struct

import numpy as np
from psycopg import OperationalError, pq

from pgcdc_assets.core.encoding import UTF8, Encoding
from pgcdc_assets.errors import PgcdcError, ProtocolError, SourceUnavailable
from pgcdc_assets.protocol.frames import HEADER, FrameBlock, data_messages
from pgcdc_assets.source.connect.failures import ServerError, first_line, result_error

_FRAMES = 8192
"""The most messages that one call reads from libpq."""


class FrameSource(ABC):
    """Collects frames as they arrive. No method waits for the server."""

    @property
    @abstractmethod
    def held(self) -> int:
        """Number of bytes that were read and that :meth:`take` has not returned yet."""

    @abstractmethod
    def pull(self) -> bool:
        """Reads arrived bytes. Returns whether there were any. Raises SourceUnavailable if the connection is lost."""

    @abstractmethod
    def take(self) -> FrameBlock:
        """Returns the complete frames that :meth:`pull` has read. If no frame is left and the stream has ended, raises
        the error that ended the stream."""


class FrameReader(FrameSource):
    """Reads the frames of a stream that has begun, and sends frames to the server."""

    @abstractmethod
    def send(self, frame: bytes) -> None:
        """Sends a frame to the server."""

    @abstractmethod
    def finish(self) -> bool:
        """Tells the server, at the first call, that we end the stream. Returns whether the server has ended it too.
        Remaining frames are dropped."""

    @abstractmethod
    def close(self) -> None:
        """Releases the reader's own resources. The code that opened the connection closes it."""


class LibpqReader(FrameReader):
    """Reads frames by libpq, over any transport."""

    held = 0

    def __init__(self, pgconn: pq.abc.PGconn, endpoint: str) -> None:
        self._pgconn = pgconn
        self._endpoint = endpoint
        self._frames: list[memoryview] = []
        self._ended = self._finished = False

    def pull(self) -> bool:
        before = self.held
        try:
            self._read()
        except OperationalError as error:
            raise SourceUnavailable(first_line(str(error)), thing=self._endpoint) from None
        if self._ended and not self.held:
            raise self._ending(SourceUnavailable("the server ended the stream", thing=self._endpoint))
        return self.held > before

    def take(self) -> FrameBlock:
        frames = FrameBlock.of(self._frames)
        self._frames, self.held = [], 0
        return frames

    def send(self, frame: bytes) -> None:
        try:
            self._pgconn.put_copy_data(frame)
            self._pgconn.flush()
        except OperationalError as error:
            # If the server has ended the stream with an error, libpq has left COPY mode and refuses the frame. Then the
            # server's error is raised.
            raise self._ending(SourceUnavailable(first_line(str(error)), thing=self._endpoint)) from None

    def finish(self) -> bool:
        try:
            if not self._finished:
                self._finished = True
                self._pgconn.put_copy_end()
                self._pgconn.flush()
            self._pgconn.consume_input()
            while (size := self._pgconn.get_copy_data(1)[0]) > 0:
                pass
            while size < 0 and self._pgconn.get_result() is not None:
                pass
        except OperationalError:
            return True
        return size < 0

    def close(self) -> None:
        self._frames = []

    def _read(self) -> None:
        get, append, consumed = self._pgconn.get_copy_data, self._frames.append, False
        for _ in range(0 if self._ended else _FRAMES):
            size, data = get(1)
            if size > 0:
                append(data)
                self.held += size
            elif size < 0:
                self._ended = True
                return
            elif consumed:
                return
            else:
                self._pgconn.consume_input()
                consumed = True

    def _ending(self, otherwise: PgcdcError) -> PgcdcError:
        """Returns the server's error at the end of the stream; ``otherwise`` if the server sent no error."""
        try:
            while (result := self._pgconn.get_result()) is not None:
                if result.status == pq.ExecStatus.FATAL_ERROR:
                    return result_error(result, self._pgconn).typed(self._endpoint)
                if result.status != pq.ExecStatus.COMMAND_OK:
                    # The COPY has not ended, so its result is not known.
                    break
        except OperationalError as error:
            return SourceUnavailable(first_line(str(error)), thing=self._endpoint)
        return otherwise


_LENGTH = Struct("!I")
_ROOM = 2 << 20
"""The most bytes that are read ahead, unless one message is larger."""
_KINDS = frozenset(bytes([letter]) for letter in b"dcHWZCENSA")
_ASIDE = frozenset([b"N", b"S", b"A"])
"""Notices, parameters and notifications. These messages may arrive at any time, and a stream ignores them."""


class SocketReader(FrameReader):
    """Reads the socket of a plain connection. libpq must be idle when this reader is made, and must not use the
    connection during the stream."""

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
        """Sends START_REPLICATION (call :meth:`begun` until it returns True) or COPY TO STDOUT. Before a further COPY,
        the answer to the previous COPY must have been read to its end."""
        self._write(b"Q", self._encoding.encode(text) + b"\0")

    def begun(self) -> bool:
        """Whether the stream has begun. Raises the server's error if the server refuses the stream."""
        self.pull()
        while (kind := self._next()) == b"Z":
            # This ReadyForQuery message ends an earlier command, which was refused.
            continue
        if kind not in (b"W", None):
            raise ProtocolError(f"sent a message of type {kind!r} instead of starting the stream", thing=self._endpoint)
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
        """Returns the data messages that have arrived, up to the first message of another kind."""
        starts, ends = data_messages(np.frombuffer(self._buffer, np.uint8, self.held))
        end = int(ends[-1]) if len(ends) else 0
        raw = bytes(memoryview(self._buffer)[:end])
        self._drop(end)
        return FrameBlock(raw, starts + HEADER, ends - starts - HEADER)

    def other(self) -> bytes | None:
        """Reads the next message and returns its kind; None if the message is data or has not arrived. ``Z``
        (ReadyForQuery) ends the answer to a command. If the message is an error of the server, raises this error. The
        server sends ``Z`` after an error too."""
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

    # Helper methods -----------------------------------------------------------------------------

    def _whole(self) -> bool:
        return self.held >= HEADER and self._end() <= self.held

    def _end(self) -> int:
        """Returns the end of the next message in the buffer. Its header must have arrived."""
        length: int = _LENGTH.unpack_from(self._buffer, 1)[0]
        return 1 + length

    def _next(self, *, data: bool = False) -> bytes | None:
        """Removes the next message from the buffer and returns its kind. Returns None, and removes nothing, if no whole
        message has arrived, or if it is a data message and ``data`` is False. Skips messages that a stream ignores.
        Raises the server's error."""
        while self.held >= HEADER:
            kind, end = bytes(self._buffer[:1]), self._end()
            if kind not in _KINDS or end < HEADER:
                raise ProtocolError(f"sent an invalid message, which begins with {kind!r}", thing=self._endpoint)
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
        """Drops the first ``count`` bytes of the buffer and moves the other bytes to the front."""
        if not count:
            return  # A large message arrives in thousands of parts, and must not be moved for each part.
        rest = self.held - count
        if rest:
            self._buffer[:rest] = self._buffer[count : self.held]
        self.held = rest
        if len(self._buffer) > _ROOM >= rest:
            # The buffer grew for one large message. This memory is released.
            del self._buffer[_ROOM:]

    def _write(self, kind: bytes, body: bytes) -> None:
        self._unsent += kind + _LENGTH.pack(len(body) + _LENGTH.size) + body
        self._flush()

    def _flush(self) -> None:
        """Sends as much as the socket accepts, without waiting. The next call sends the rest."""
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError:
            # The peer is gone. The next read raises the error, with its reason.
            self._unsent.clear()

    def _gone(self) -> PgcdcError:
        return SourceUnavailable("the server closed the connection", thing=self._endpoint)


def _server_error(body: bytes, encoding: Encoding) -> ServerError:
    """Parses an ErrorResponse. Each field is a letter and a text, and ends with a zero byte."""
    fields = {field[:1]: encoding.shown(field[1:]) for field in body.split(b"\0") if field}
    return ServerError(fields.get(b"C"), first_line(fields.get(b"M", "")))
