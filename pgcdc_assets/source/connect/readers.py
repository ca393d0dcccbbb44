"""Reads frames from a connection by libpq, over any transport. Defines the interface of all readers.

libpq returns one message per call. Each message costs a copy, an allocation and a return into the interpreter. At
300,000 messages a second this uses a whole core. :mod:`pgcdc_assets.source.connect.socketreader` is faster.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from psycopg import OperationalError, pq

from pgcdc_assets.errors import PgcdcError, SourceUnavailable
from pgcdc_assets.protocol.frames import FrameBlock
from pgcdc_assets.source.connect.failures import first_line, result_error

_FRAMES = 8192
"""The highest number of messages that one call takes from libpq."""


class FrameSource(ABC):
    """Frames as they arrive. No method waits."""

    @property
    @abstractmethod
    def held(self) -> int:
        """Bytes that have been read and not yet taken."""

    @abstractmethod
    def pull(self) -> bool:
        """Reads the bytes that have arrived. Returns whether there were any. Raises SourceUnavailable if the connection
        is lost."""

    @abstractmethod
    def take(self) -> FrameBlock:
        """Returns the complete frames that have been read.

        If the stream has ended, raises the reason once all its frames have been taken.
        """


class FrameReader(FrameSource):
    """Reads the frames of a stream that has begun, and sends the few frames of the other direction."""

    @abstractmethod
    def send(self, frame: bytes) -> None:
        """Sends a frame to the server."""

    @abstractmethod
    def finish(self) -> bool:
        """Ends our side of the stream, at the first call. Returns whether the server has ended its side too."""

    @abstractmethod
    def close(self) -> None:
        """Releases the reader's own resources. The connection is closed by the code that opened it."""


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
            raise self._error()
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
            # If the server has ended the stream with an error, libpq has left COPY mode.
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

    def _error(self) -> PgcdcError:
        return self._ending(SourceUnavailable("the server ended the stream", thing=self._endpoint))

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
