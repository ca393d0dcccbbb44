"""The feed of logical messages: a Delta table, ordered by ``(order_lsn, ordinal)``.

``order_lsn`` is the ``commit_lsn`` of the message's transaction. For a message outside of a transaction, ``order_lsn``
is the end of the message's WAL record, minus one. So ``order_lsn < B`` decides for both kinds whether a message is
below a boundary B.

The Delta commit that adds files also records, in two app transactions, the range that the feed covers without a gap.
For a part of the log without messages, there is no Delta commit. In this case only the newest consistent point records
up to which LSN the feed is complete.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import Schema

from pgcdc_assets.core.catalog import Identity
from pgcdc_assets.core.encoding import UTF8, Encoding
from pgcdc_assets.core.faultpoints import FaultPoint, passed
from pgcdc_assets.core.layout import Layout, Location
from pgcdc_assets.core.lsn import ZERO, Lsn, LsnRange
from pgcdc_assets.delta.datafile import DataFile, FileReport, dataset
from pgcdc_assets.delta.definition import create_table
from pgcdc_assets.delta.log import Added, DeltaLog
from pgcdc_assets.errors import FeedGap, LakeError
from pgcdc_assets.feed.table import FEED_PROPERTIES, DeltaFeed
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.log.segment import read_slices
from pgcdc_assets.log.span import LogSpan
from pgcdc_assets.protocol.text.strings import reread

ORDER_LSN: Final = "order_lsn"
SCHEMA: Final = pa.schema(
    [
        (ORDER_LSN, pa.int64()),
        ("ordinal", pa.int32()),
        ("prefix", pa.string()),
        ("content", pa.binary()),
        ("lsn", pa.int64()),
        ("transactional", pa.bool_()),
        ("xid", pa.int64()),
        ("commit_lsn", pa.int64()),
        ("commit_ts", pa.timestamp("us", "UTC")),
        ("origin", pa.string()),
    ]
)
"""``lsn`` is the end of the message's WAL record. ``xid``, ``commit_lsn``, ``commit_ts`` and ``origin`` describe the
message's transaction, and are NULL for a message outside of a transaction."""

SLICE_BYTES: Final = 8 << 20
_COLUMNS: Final = ["kind", "commit_lsn", "tx_ordinal", "xid", "commit_ts", "origin", "payload"]
_HEAD: Final = struct.Struct("!xBQ")
_LENGTH: Final = 4
"""Size in bytes of the length field between a message's prefix and its content."""


@dataclass(frozen=True)
class MessagesTaken:
    """The number of messages that the feed took from a span of the log, and the bytes of their content."""

    count: int = 0
    bytes: int = 0


class MessageFeed(DeltaFeed):
    """The message feed of one lake. Its Delta table does not exist before :meth:`begin`."""

    order = ORDER_LSN

    def __init__(self, layout: Layout, identity: Identity, encoding: Encoding = UTF8) -> None:
        """``encoding``: the encoding of the source database. It is needed only to derive messages from the log."""
        path = layout.messages
        super().__init__(
            path, layout.root, DeltaLog(path), identity.app_id("messages_since"), identity.app_id("messages")
        )
        self._encoding = encoding
        self._empty_to = ZERO
        """The log contains no message between the end of ``covered`` and this LSN."""

    @property
    def exists(self) -> bool:
        return self._delta is not None and self._end_id in self._delta.positions

    @property
    def version(self) -> int:
        return -1 if self._delta is None else self._delta.number

    @property
    def complete_to(self) -> Lsn:
        """The LSN up to which the feed contains every message that was requested from the source by the setting
        ``messages``."""
        return max(self.covered.end, self._empty_to)

    def known_to(self, lsn: Lsn) -> None:
        """Remembers, in this object only, that the feed is complete to ``lsn``, because a consistent point says so. The
        feed's Delta table does not say so if there were no new messages."""
        if self.exists:
            self._empty_to = max(self._empty_to, lsn)

    def begin(self, at: Lsn, log_start: Lsn) -> None:
        """Creates the Delta table if it does not exist. The feed then begins at ``at``. An existing feed may end below
        ``log_start``: retention deleted a part of the log while no messages were requested. Such a feed then covers
        nothing below ``log_start``, but its files stay."""
        if not self.exists:
            if self._delta is None:
                create_table(self.path, Schema.from_arrow(SCHEMA), FEED_PROPERTIES, {}, self._root)
                self._delta = self._log.newest()
            assert self._delta is not None
            # If the table exists without positions of this slot, its files belong to another slot. Remove them.
            self._write(self._delta.files, [], LsnRange(at, at))
        elif self.complete_to < log_start:
            self._write([], [], LsnRange(log_start, log_start))
        self.settle()

    def advance(self, log: LogSpan, upto: Lsn) -> MessagesTaken:
        """Adds the log's messages up to ``upto``. The log must be complete to ``upto``. The messages are durable when
        this method returns."""
        if upto <= self.complete_to:
            return MessagesTaken()
        files, taken = derived(self.path, log.part(LsnRange(self.complete_to, upto)), self._encoding)
        if files:
            self._write([], files, LsnRange(self.covered.start, upto))
            self.settle()
        self._empty_to = max(self._empty_to, upto)
        return taken

    def derive_again(self, log: ChangeLog, span: LsnRange) -> MessagesTaken:
        """Derives the messages of ``span`` from the log again, and replaces them in the feed. Only whole files can be
        replaced, so messages outside of ``span`` may be derived again, too. If a replaced file has messages below the
        log's start, they are lost, and the feed then begins at the log's start."""
        covered = self.covered
        span = LsnRange(max(span.start, covered.start), max(min(span.end, covered.end), covered.start))
        if span.start >= span.end:
            return MessagesTaken()
        wider, gone = self._replaced(span)
        begin = max(wider.start, log.start)
        files, taken = derived(self.path, LogSpan(log, LsnRange(begin, wider.end)), self._encoding)
        if files or gone:
            start = covered.start if begin == wider.start else max(covered.start, begin)
            self._write(gone, files, LsnRange(start, covered.end))
            self.settle()
        return taken

    def rows(self, span: LsnRange, wanted: pc.Expression) -> pa.Table:
        """Returns the messages of the span for which ``wanted`` is true, in no particular order."""
        files = [self.path / file.path for file, _, _ in self._bounds(span)]
        return dataset(files, SCHEMA).to_table(filter=wanted)

    def compact(self) -> int:
        """Merges small files with consecutive messages. Returns by how many files the feed became smaller."""

        def merged(group: list[Added]) -> list[FileReport]:
            return _written(self.path, [dataset([self.path / file.path for file in group], SCHEMA).to_table()])

        return self._compacted(self.covered.end, merged)

    def _write(
        self, gone: Sequence[Added], files: Sequence[FileReport], covered: LsnRange, *, changes: bool = True
    ) -> None:
        passed(FaultPoint.FEED_COMMITTING)
        super()._write(gone, files, covered, changes=changes)
        passed(FaultPoint.FEED_COMMITTED)


def derived(
    folder: Location, span: LogSpan, encoding: Encoding = UTF8
) -> tuple[list[FileReport], MessagesTaken]:  # fmt: skip
    """Writes the log's messages of a span to files, which the caller must add to the feed by a Delta commit. Raises
    LakeError if the number of messages differs from the receiver's count."""
    if not any(batch.others.get("M") for batch in span.batches):
        return [], MessagesTaken()
    count = size = 0

    def counted() -> Iterator[pa.Table]:
        nonlocal count, size
        for rows in _messages(span, encoding):
            count += rows.num_rows
            size += pc.sum(pc.binary_length(rows["content"])).as_py() or 0
            yield rows

    files = _written(folder, counted())
    held = _held(span)
    if held is not None and held != count:
        raise LakeError(
            f"the log has {held} messages in {span.lsns}, but {count} were written to the feed", thing="messages"
        )
    return files, MessagesTaken(count, size)


def _held(span: LogSpan) -> int | None:
    """Returns the receiver's count of messages in the span. The receiver counts per batch, so the result is None if
    only a part of a batch with messages is in the span."""
    total = 0
    for batch in span.batches:
        count = batch.others.get("M", 0)
        if count and not span.lsns.start <= batch.start <= batch.end <= span.lsns.end:
            return None
        total += count
    return total


def _messages(span: LogSpan, encoding: Encoding) -> Iterator[pa.Table]:
    for segment in span.log.segments_of([batch for batch in span.batches if batch.others.get("M")]):
        for rows in read_slices(segment.file, _COLUMNS, SLICE_BYTES):
            messages = rows.filter(pc.equal(rows["kind"], "M"))
            if messages.num_rows:
                found, lsns = _decoded(messages, encoding), span.lsns
                at = found[ORDER_LSN]
                yield found.filter(pc.and_(pc.greater_equal(at, int(lsns.start)), pc.less(at, int(lsns.end))))


def _decoded(rows: pa.Table, encoding: Encoding) -> pa.Table:
    flags, lsns, prefixes, contents = [], [], [], []
    for payload in rows["payload"].to_pylist():
        flag, lsn = _HEAD.unpack_from(payload)
        end = payload.index(b"\0", _HEAD.size)
        flags.append(bool(flag & 1))
        lsns.append(lsn)
        prefixes.append(encoding.shown(payload[_HEAD.size : end]))
        contents.append(payload[end + 1 + _LENGTH :])
    lsn = pa.array(lsns, pa.int64())
    data: dict[str, Any] = {
        ORDER_LSN: pc.coalesce(rows["commit_lsn"], pc.subtract(lsn, 1)),
        "ordinal": pc.fill_null(rows["tx_ordinal"], 0),
        "prefix": pa.array(prefixes, pa.string()),
        "content": pa.array(contents, pa.binary()),
        "lsn": lsn,
        "transactional": pa.array(flags, pa.bool_()),
        **{name: rows[name] for name in ("xid", "commit_lsn", "commit_ts")},
        "origin": reread(rows["origin"], encoding),
    }
    return pa.table([data[name] for name in SCHEMA.names], schema=SCHEMA)


def _written(folder: Location, parts: Sequence[pa.Table] | Iterator[pa.Table]) -> list[FileReport]:
    with DataFile(folder, SCHEMA) as file:
        for rows in parts:
            ordered = rows.sort_by([(ORDER_LSN, "ascending"), ("ordinal", "ascending")])
            file.write([column.combine_chunks() for column in ordered.columns])
        report = file.finish()
    return [] if report is None else [report]


def read_messages(layout: Layout, span: LsnRange, stood: Lsn, commits: Sequence[int] | None = None) -> pa.Table:
    """Returns the messages of the span in order, from the newest version of the feed. ``stood``: the end of the feed
    when the point was published, as the point recorded it. ``commits``: only the messages of the transactions with
    these ``commit_lsn``.

    Raises LakeError if the feed ends below ``stood``, or cannot be read. Without ``commits``, raises FeedGap if the
    feed lacks messages of the span. A span that starts at zero asks only for the messages that are left."""
    feed, thing = MessageFeed(layout, ChangeLog(layout).identity), f"feed {layout.messages}"
    if not feed.exists:
        raise LakeError("does not exist", thing=thing)
    start, end = feed.covered.start, feed.covered.end
    if end < stood:
        raise LakeError(f"ends at {end}, but a consistent point says that it is complete to {stood}", thing=thing)
    if commits is None and ZERO < span.start < min(start, span.end):
        raise FeedGap(
            f"lacks the messages between {span.start} and {start}", thing=thing, lsn=span.start,
            do="retention deleted them, or they were not requested; read all messages that are left with `messages()`",
        )  # fmt: skip
    at = pc.field(ORDER_LSN)
    wanted = (at >= int(span.start)) & (at < int(span.end))
    if commits is not None:
        wanted &= pc.field("commit_lsn").isin(pa.array(commits, pa.int64()))
    try:
        rows = feed.rows(span, wanted)
    except (OSError, pa.ArrowException) as error:
        raise LakeError(f"cannot be read: {type(error).__name__}", thing=thing) from None
    return rows.sort_by([(ORDER_LSN, "ascending"), ("ordinal", "ascending")])
