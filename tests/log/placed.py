"""The reference for protocol versions 2 to 4. It reads one message at a time and says to which transaction and block
each message belongs."""

from __future__ import annotations

from dataclasses import dataclass

from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.protocol.decode import decode_any
from pgcdc_assets.protocol.layouts import BETWEEN, BRACKETS, CARRY_XID, CONTENT, MessageKind
from pgcdc_assets.protocol.messages import AnyMessage, BeginPrepare, LogicalMessage, StreamStart


@dataclass(frozen=True, slots=True)
class Placed:
    """A message and the transaction of the block that contains it, if any. The messages from Begin Prepare to Prepare
    are one block."""

    message: AnyMessage
    top: int | None = None
    """The top transaction's xid. The first and last message of a block have it, too."""
    subxid: int | None = None
    """The xid in the message itself. For a transaction that is sent completely at its PREPARE, that transaction's
    xid."""


class StreamDecoder:
    """Decodes the messages of one connection, in order. ``parallel``: as in :func:`decode_any`."""

    def __init__(self, *, parallel: bool) -> None:
        self._parallel = parallel
        self._opened: MessageKind | None = None
        """The kind of the message that began the open transaction or block."""
        self._top: int | None = None

    def take(self, payload: bytes) -> Placed:
        """Reads the next message. Raises ProtocolError if it is malformed, or if its kind is not allowed here."""
        kind, subxid = payload[0], None
        if self._opened == MessageKind.STREAM_START and kind in CARRY_XID:
            subxid, payload = int.from_bytes(payload[1:5]), payload[:1] + payload[5:]
        message = decode_any(payload, parallel=self._parallel)
        if not self._has_its_place(message, kind):
            raise ProtocolError("stands outside of its place")
        top = message.xid if isinstance(message, StreamStart | BeginPrepare) else self._top
        if self._opened == MessageKind.BEGIN_PREPARE and kind in CARRY_XID:
            subxid = top
        if kind in BRACKETS:
            self._opened, self._top = MessageKind(kind), top
        elif self._opened is not None and kind == BRACKETS[self._opened]:
            self._opened = self._top = None
        return Placed(message, top, subxid)

    def _has_its_place(self, message: AnyMessage, kind: int) -> bool:
        transactional = isinstance(message, LogicalMessage) and message.transactional
        if self._opened is None:
            return kind in BRACKETS or (kind in BETWEEN and not transactional)
        if self._opened == MessageKind.STREAM_START and kind == MessageKind.MESSAGE:
            return transactional
        return kind in CONTENT or kind == BRACKETS[self._opened]
