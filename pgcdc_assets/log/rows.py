"""Turns frames into rows of the log. Each numpy operation handles all frames of a segment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pgcdc_assets.core.arrays import Bools, Ints, in_arrow
from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.log.framerun import HEADER, IS_CHANGE, IS_ROW, FrameRun, Raw, anywhere
from pgcdc_assets.log.relations import Overlay, Relations
from pgcdc_assets.log.transactions import OpenBlock, OpenTransaction
from pgcdc_assets.protocol.layouts import MessageKind
from pgcdc_assets.protocol.messages import LogicalMessage, Origin, Truncate

ABSENT = -1
"""Represents NULL in the integer columns of :class:`Rows`, which have no negative values."""

_INLINE = 12
"""In Arrow's binary view layout, values of at most this many bytes are stored in the view itself."""


@dataclass(frozen=True)
class Rows:
    """Rows of the log as columns. All arrays have one entry per row. ABSENT represents NULL."""

    raw: Raw
    offset: Ints
    length: Ints
    """``offset`` and ``length``: the place of each payload in ``raw``, in bytes."""
    kind: NDArray[np.uint8]
    commit_lsn: Ints
    ordinal: Ints
    xid: Ints
    commit_ts: Ints
    lsn: Ints
    relation_id: Ints
    schema_id: Ints
    """Not defined for rows whose ``relation_id`` is ABSENT."""
    origin: NDArray[np.object_] | None
    """The name of each row's replication origin, or None. The column itself is None if no transaction has an origin."""
    partitions: frozenset[tuple[int, int]] = frozenset()
    """Pairs of OIDs (root, leaf): rows of this leaf partition were sent under the root's OID."""
    subxid: Ints | None = None
    """The xid of each row's subtransaction; None if the rows were made after their transactions' commits."""

    def __len__(self) -> int:
        return len(self.kind)

    def take(self, index: Ints) -> Rows:
        """The rows with these numbers. Shares the payloads' bytes."""
        picked: dict[str, Any] = {}
        for column in fields(self):
            value = getattr(self, column.name)
            picked[column.name] = value[index] if isinstance(value, np.ndarray) else value
        return Rows(**picked)

    def payload(self) -> pa.Array:
        """The messages as an Arrow binary view array over ``raw``. No bytes are copied."""
        octets = np.frombuffer(self.raw, np.uint8)
        views = np.zeros((len(self), 4), dtype=np.int32)
        views[:, 0] = self.length
        prefixes = anywhere(self.raw, np.int32)
        if len(prefixes):
            views[:, 1] = prefixes[np.minimum(self.offset, len(prefixes) - 1)]
        views[:, 3] = self.offset
        short = np.flatnonzero(self.length <= _INLINE)
        if len(short):
            at, last = np.arange(_INLINE), max(len(octets) - 1, 0)
            inline = octets[np.minimum(self.offset[short, None] + at, last)]
            inline = np.where(at < self.length[short, None], inline, 0).astype(np.uint8)
            views[short, 1:] = inline.view(np.int32)
        return pa.Array.from_buffers(pa.binary_view(), len(self), [None, pa.py_buffer(views), pa.py_buffer(self.raw)])


class TransactionEnd(NamedTuple):
    """The end of a complete transaction. Values sort in commit order."""

    commit_lsn: int
    xid: int
    commit_ts: int
    """Microseconds since 1970."""


@dataclass
class Tally:
    """Counts of some rows. A batch's summary row is made from the sum of the tallies of its segments."""

    counts: Counter[tuple[int, str]] = field(default_factory=Counter)
    """Number of rows by relation_id and kind. The relation_id is ABSENT for rows that belong to no relation."""
    schema_ids: set[int] = field(default_factory=set)
    partitions: set[tuple[int, int]] = field(default_factory=set)
    transactions: int = 0
    first: TransactionEnd | None = None
    last: TransactionEnd | None = None
    """``first`` and ``last``: the ends of the transactions that committed first and last."""
    bytes: int = 0

    @property
    def rows(self) -> int:
        return self.counts.total()

    def add(self, other: Tally) -> None:
        """Add the counts of other rows to this tally."""
        self.counts.update(other.counts)
        self.schema_ids |= other.schema_ids
        self.partitions |= other.partitions
        self.transactions += other.transactions
        self.bytes += other.bytes
        self.first = min((end for end in (self.first, other.first) if end), default=None)
        self.last = max((end for end in (self.last, other.last) if end), default=None)


def rows_of(run: FrameRun, opening: OpenTransaction | None, relations: Relations) -> Rows:
    """Makes the log's rows from frames, in the order of the stream. ``opening`` is the transaction that is open before
    these frames. The fields of Begin and Origin become columns. Relation and Type messages get no rows here, because
    the batch stores them once. A TRUNCATE becomes one row per table. A transaction without changes has no row."""
    transactions = _Transactions.of(run, opening)
    stored = IS_CHANGE[run.kinds]
    stored[transactions.commits] = transactions.changes_of_commits > 0
    frames, relation_id = _frames(run, stored)
    columns = transactions.columns(frames) | {"lsn": run.starts(frames)}
    for index in np.flatnonzero(run.kinds[frames] == MessageKind.MESSAGE).tolist():
        _detach(run, int(frames[index]), index, columns)
    return _rows(run, frames, relation_id, relations, columns)


def rows_in_progress(run: FrameRun, subxid: Ints, opening: OpenBlock, overlay: Overlay) -> Rows:
    """Makes the log's rows from frames of a transaction in progress: without ``commit_lsn`` and ``commit_ts``, and with
    provisional schema ids. ``subxid`` has an entry per frame. A Commit frame, which ends the transaction, also becomes
    a row."""
    stored = IS_CHANGE[run.kinds] | (run.kinds == MessageKind.COMMIT)
    frames, relation_id = _frames(run, stored)
    number = len(frames)
    absent = np.full(number, ABSENT, dtype=np.int64)
    before: Ints = np.cumsum(IS_CHANGE[run.kinds]) - IS_CHANGE[run.kinds]
    columns = {
        "commit_lsn": absent,
        "ordinal": opening.ordinal + before[frames],
        "xid": np.full(number, opening.xid, dtype=np.int64),
        "commit_ts": absent,
        "lsn": run.starts(frames),
        "origin": None if opening.origin is None else np.full(number, opening.origin, dtype=object),
        "subxid": subxid[frames],
    }
    return _rows(run, frames, relation_id, overlay, columns)


def _rows(
    run: FrameRun, frames: Ints, relation_id: Ints, relations: Relations | Overlay, columns: dict[str, Any]
) -> Rows:  # fmt: skip
    """Makes rows of the messages in ``frames``. ``columns``: the columns that depend on the rows' transactions."""
    return Rows(
        raw=run.raw,
        offset=run.offsets[frames] + HEADER,
        length=run.lengths[frames] - HEADER,
        kind=run.kinds[frames],
        relation_id=relation_id,
        schema_id=_schema_ids(run, frames, relation_id, relations),
        partitions=_partitions(run),
        **columns,
    )


def changed_relations(run: FrameRun) -> set[int]:
    """The ids of the relations whose rows these frames change or truncate."""
    _, relation_id = _frames(run, IS_CHANGE[run.kinds])
    return set(np.unique(relation_id[relation_id != ABSENT]).tolist())


def _frames(run: FrameRun, stored: Bools) -> tuple[Ints, Ints]:
    """Returns each row's frame number, in order, and each row's relation. ``stored``: which frames become rows."""
    relation_of_frame = np.full(len(run), ABSENT, dtype=np.int64)
    row_frames = np.flatnonzero(IS_ROW[run.kinds])
    relation_of_frame[row_frames] = run.relation_ids(row_frames)
    frames = np.flatnonzero(stored)
    return _with_truncates(run, frames, relation_of_frame[frames])


def _schema_ids(run: FrameRun, frames: Ints, relation_id: Ints, relations: Relations | Overlay) -> Ints:
    known = np.flatnonzero(relation_id != ABSENT)
    schema_id = np.zeros(len(frames), dtype=np.int64)
    schema_id[known] = relations.schema_ids(relation_id[known], run.sequence[frames[known]])
    return schema_id


def tally_of(rows: Rows) -> Tally:
    counts = pc.value_counts(in_arrow(rows.relation_id * 256 + rows.kind)).to_pylist()
    commits = np.flatnonzero(rows.kind == MessageKind.COMMIT)
    tally = Tally(
        counts=Counter({(each["values"] >> 8, chr(each["values"] & 0xFF)): each["counts"] for each in counts}),
        schema_ids=set(pc.unique(in_arrow(rows.schema_id[rows.relation_id != ABSENT])).to_pylist()),
        partitions=set(rows.partitions),
        transactions=len(commits),
        bytes=int(rows.length.sum()),
    )
    if len(commits):
        tally.first, tally.last = _ended(rows, commits[0]), _ended(rows, commits[-1])
    return tally


def tally_of_table(rows: pa.Table, partitions: set[tuple[int, int]]) -> Tally:
    """The tally of rows that were read from a file. ``rows`` must not contain Commit rows. Needs the columns
    relation_id, kind, schema_id and payload."""
    counts = rows.group_by(["relation_id", "kind"]).aggregate([([], "count_all")]).to_pylist()
    return Tally(
        counts=Counter({
            (ABSENT if each["relation_id"] is None else each["relation_id"], each["kind"]): each["count_all"]
            for each in counts
        }),
        schema_ids=set(pc.unique(rows["schema_id"].drop_null()).to_pylist()),
        partitions=partitions,
        bytes=pc.sum(pc.binary_length(rows["payload"])).as_py() or 0,
    )  # fmt: skip


def _ended(rows: Rows, index: int) -> TransactionEnd:
    return TransactionEnd(int(rows.commit_lsn[index]), int(rows.xid[index]), int(rows.commit_ts[index]))


@dataclass(frozen=True)
class _Transactions:
    """The transactions to which some frames belong. Transaction 0 is the transaction that is open before these frames;
    the first Begin starts transaction 1."""

    number: Ints
    """For each frame, the number of its transaction."""
    ordinal: Ints
    """For each frame, how many changes precede it in its transaction."""
    commits: Ints
    """The frame numbers of the Commit messages."""
    changes_of_commits: Ints
    """For each of ``commits``, the number of changes in its transaction."""
    final_lsn: Ints
    commit_ts: Ints
    xid: Ints
    origins: tuple[str | None, ...] | None

    @classmethod
    def of(cls, run: FrameRun, opening: OpenTransaction | None) -> _Transactions:
        brackets = run.brackets
        number = np.cumsum(run.kinds == MessageKind.BEGIN)
        before: Ints = np.cumsum(IS_CHANGE[run.kinds]) - IS_CHANGE[run.kinds]
        base = np.concatenate(([-opening.ordinal if opening else 0], before[brackets.begins]))
        ordinal = before - base[number]
        first = (opening.final_lsn, opening.commit_ts, opening.xid) if opening else (ABSENT,) * 3
        return cls(
            number=number,
            ordinal=ordinal,
            commits=brackets.commits,
            changes_of_commits=ordinal[brackets.commits],
            final_lsn=np.concatenate(([first[0]], brackets.final_lsn)),
            commit_ts=np.concatenate(([first[1]], brackets.commit_ts)),
            xid=np.concatenate(([first[2]], brackets.xid)),
            origins=_origins(run, number, len(brackets.begins) + 1, opening),
        )

    def columns(self, frames: Ints) -> dict[str, Any]:
        number = self.number[frames]
        origin = None if self.origins is None else np.array(self.origins, dtype=object)[number]
        return {
            "commit_lsn": self.final_lsn[number],
            "commit_ts": self.commit_ts[number],
            "xid": self.xid[number],
            "ordinal": self.ordinal[frames],
            "origin": origin,
        }


def _origins(
    run: FrameRun, number: Ints, transactions: int, opening: OpenTransaction | None
) -> tuple[str | None, ...] | None:
    """The origin of each transaction, from its Origin message. Returns None if no transaction has an origin."""
    found = run.at(MessageKind.ORIGIN).tolist()
    carried = opening.origin if opening else None
    if not found and carried is None:
        return None
    names: list[str | None] = [carried] + [None] * (transactions - 1)
    for index in found:
        message = run.message(index)
        assert isinstance(message, Origin)
        names[int(number[index])] = message.name
    return tuple(names)


def _with_truncates(run: FrameRun, frames: Ints, relation_id: Ints) -> tuple[Ints, Ints]:
    """Repeats the frame of each TRUNCATE, once for each table that the TRUNCATE names."""
    truncates = np.flatnonzero(run.kinds[frames] == MessageKind.TRUNCATE).tolist()
    if not truncates:
        return frames, relation_id
    tables: dict[int, Sequence[int]] = {}
    for index in truncates:
        message = run.message(int(frames[index]))
        assert isinstance(message, Truncate)
        tables[index] = message.relation_ids
    times = np.ones(len(frames), dtype=np.int64)
    times[truncates] = [len(tables[index]) for index in truncates]
    starts = np.cumsum(times) - times
    frames, relation_id = np.repeat(frames, times), np.repeat(relation_id, times)
    for index in truncates:
        relation_id[starts[index] : starts[index] + times[index]] = tables[index]
    return frames, relation_id


def _partitions(run: FrameRun) -> frozenset[tuple[int, int]]:
    """The (root, leaf) OIDs of partitions whose rows are published via the root. Before the first row of a leaf on a
    connection, the server sends the Relation messages of root and leaf. The leaf's is directly before the row, and the
    row has the root's OID."""
    described = run.at(MessageKind.RELATION)
    before = described[described + 1 < len(run)]
    # A Relation message whose row the settings exclude stays in ``run``. The next frame in ``run`` may then be a row of
    # another table, but the numbers of the two frames in the stream are not consecutive.
    followed = run.sequence[before + 1] - run.sequence[before] == 1
    before = before[followed & IS_ROW[run.kinds[before + 1]]]
    pairs = zip(run.relation_ids(before + 1).tolist(), run.relation_ids(before).tolist(), strict=True)
    return frozenset((root, leaf) for root, leaf in [*pairs, *_partition_at_end(run, described)] if root != leaf)


def _partition_at_end(run: FrameRun, described: Ints) -> list[tuple[int, int]]:
    """The OIDs of root and leaf, if the frames end with the leaf's Relation message. The row, and with it the root's
    OID, is in later frames. But the Relation message before the leaf's is the root's, with only Type messages between.
    ``described``: the numbers of the frames with Relation messages."""
    if len(described) < 2 or described[-1] != len(run) - 1:
        return []
    first, last = described[-2:].tolist()
    consecutive = run.sequence[last] - run.sequence[first] == last - first
    if not consecutive or (run.kinds[first + 1 : last] != MessageKind.TYPE).any():
        return []
    root, leaf = run.relation_ids(described[-2:]).tolist()
    return [(root, leaf)]


def _detach(run: FrameRun, frame: int, index: int, columns: dict[str, Any]) -> None:
    """If the logical message is not transactional, its row belongs to no transaction: sets the row's transaction fields
    to ABSENT, and its LSN to the LSN in the message."""
    message = run.message(frame)
    if not isinstance(message, LogicalMessage):
        raise ProtocolError("message M cannot be decoded as a logical message", lsn=run.lsn(frame))
    if message.transactional:
        return
    for name in ("commit_lsn", "commit_ts", "xid", "ordinal"):
        columns[name][index] = ABSENT
    if columns["origin"] is not None:
        columns["origin"][index] = None
    columns["lsn"][index] = int(message.lsn)
