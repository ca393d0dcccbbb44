"""Writes one history to two logs. In the first log, all rows are written at their commit. In the second log, some rows
are written before their commit, as for transactions received in progress. The files of these early rows have
``CommitFacts`` (commit LSN and time, stored apart from the rows)."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from hypothesis import strategies as st

from pgcdc_assets.core.catalog import Column, Identity, PgType, Table
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.core.names import TableName
from pgcdc_assets.delta.datafile import FileReport
from pgcdc_assets.log.commit import LogWriter
from pgcdc_assets.log.commitfacts import CommitFacts
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.log.relations import Relations
from pgcdc_assets.log.rows import ABSENT, Rows, Tally, tally_of
from pgcdc_assets.log.segment import (
    FACTS,
    SUMMARY,
    Note,
    draft_name,
    read_rows,
    table_of,
    table_of_notes,
    write_segment,
)
from pgcdc_assets.log.summary import summary_of
from pgcdc_assets.protocol.decode import decode
from pgcdc_assets.protocol.messages import Relation
from pgcdc_assets.protocol.shape import RelationFacts
from pgcdc_assets.store import storage
from tests.log.streams import commit, insert, message, relation, truncate

WHO: Final = Identity("7", "db", "slot")
START: Final = Lsn(1000)
STEP: Final = 1000
"""The distance between two transactions in WAL bytes."""
TEXT: Final = PgType(25, "text")
TABLES: Final = {
    number: Table(number, TableName("public", f"t{number}"), (Column(1, "c", TEXT), Column(2, "d", TEXT)))
    for number in (1, 2, 3)
}
COLUMNS: Final = "cd"
"""The names of the column in the Relation messages. Each message has one column: ``c`` in version 0 of a relation, and
``d`` in version 1."""


@dataclass(frozen=True)
class Change:
    kind: str
    """The kind of the message: I (Insert), T (Truncate) or M (logical message)."""
    relation_id: int
    version: int
    sub: int
    """The number of the subtransaction. 0 is the top transaction."""
    text: bytes


@dataclass(frozen=True)
class Transaction:
    changes: tuple[Change, ...]
    aborted: tuple[int, ...] = ()
    """The numbers of the aborted subtransactions."""
    origin: str | None = None
    files: int = 1
    """The number of files into which the transaction's rows are written while it is in progress. With 0, no row is
    written before the commit."""

    def counts(self, change: Change) -> bool:
        # A logical message belongs to the top transaction, so an aborted subtransaction does not remove it.
        return change.kind == "M" or change.sub not in self.aborted

    @property
    def counted(self) -> list[int]:
        return [at for at, change in enumerate(self.changes) if self.counts(change)]


_CHANGE: Final = st.builds(
    Change, st.sampled_from("IIIITM"), st.integers(1, 3), st.integers(0, 1), st.integers(0, 4), st.binary(max_size=8)
)
TRANSACTIONS: Final = st.builds(
    Transaction,
    st.lists(_CHANGE, min_size=1, max_size=10).map(tuple),
    st.sets(st.integers(1, 4)).map(sorted).map(tuple),
    st.sampled_from([None, None, "elsewhere"]),
    st.integers(0, 3),
)
BATCHES: Final = st.lists(st.lists(TRANSACTIONS, min_size=1, max_size=3), min_size=1, max_size=3)


class Twin:
    """Writes one of the two logs, batch by batch."""

    def __init__(self, folder: Path, *, early: bool) -> None:
        """Opens the log of the lake in ``folder``, or creates it. ``early``: whether rows are written before their
        commit."""
        self.log = ChangeLog(Layout.of(folder))
        if not self.log.exists:
            self.log.create(WHO, START, 1)
        self._early = early
        self._writer = LogWriter(self.log.path, WHO)
        self._relations = Relations()
        self._number = 0

    def add(self, transactions: Sequence[Transaction]) -> None:
        """Adds one batch. A transaction of which no rows remain after rollbacks is not written."""
        start, files, groups, tally = self.log.position(), [], [], Tally()
        end = Lsn(START + STEP * (self._number + len(transactions)))
        for transaction in transactions:
            made = _Made(transaction, self._number, self._relations)
            self._number += 1
            if not transaction.counted:
                continue
            for rows in (made.rows(transaction.counted), made.commit()):
                tally.add(tally_of(rows))
            if self._early and transaction.files:
                for part in np.array_split(np.arange(len(transaction.changes)), transaction.files):
                    if len(part):
                        files.append(self._put([table_of(made.early(part.tolist()))], end, made.late))
            else:
                groups.append(table_of(made.rows(transaction.counted)))
            groups.append(table_of(made.commit()))
        if tally.rows:
            records = [self._relations.record(schema_id) for schema_id in sorted(tally.schema_ids)]
            notes = [Note(SUMMARY, json.dumps(summary_of(start, end, 1, tally, records)).encode())]
            for record in records:
                facts = json.dumps(record.facts.to_json()).encode()
                notes.append(Note("R", record.payload, record.relation_id, record.schema_id))
                notes.append(Note(FACTS, facts, record.relation_id, record.schema_id))
            files.append(self._put([table_of_notes(notes), *groups], end))
        self._writer.commit(start, end, 1, files)

    def _put(self, groups: list[Any], end: Lsn, late: CommitFacts | None = None) -> FileReport:
        folder = self.log.path
        return write_segment(storage.draft(folder / draft_name()), groups).put(folder, end, end, late)


class _Made:
    """A transaction with its LSNs and xids. Makes the rows of the transaction for both logs."""

    def __init__(self, transaction: Transaction, number: int, relations: Relations) -> None:
        self._of = transaction
        self._end = START + STEP * (number + 1) - 10
        self._xid = 100 * (number + 1)
        final = {(r, v): _describe(relations, r, v) for r in TABLES for v in (0, 1)}
        # Rows that are written before the commit have provisional schema ids. The ids are shifted for each transaction,
        # so the same id means different shapes in different transactions.
        self._provisional = {shape: (place + number) % len(final) for place, shape in enumerate(final)}
        self._final = final
        self.late = CommitFacts(
            commit_lsn=self._end - 50,
            commit_ts=1_700_000_000_000_000 + number,
            aborted=tuple(self._xid + sub for sub in transaction.aborted),
            schema_ids={self._provisional[shape]: final[shape] for shape in final},
        )

    def rows(self, places: Sequence[int]) -> Rows:
        """The rows as they are written at the transaction's commit."""
        return self._rows(places, self.late.commit_lsn, self.late.commit_ts, self._final)

    def early(self, places: Sequence[int]) -> Rows:
        """The rows as they are written before the transaction's commit."""
        subs = [0 if self._of.changes[at].kind == "M" else self._of.changes[at].sub for at in places]
        subxid = np.array([self._xid + sub for sub in subs], np.int64)
        return self._rows(places, ABSENT, ABSENT, self._provisional, subxid)

    def commit(self) -> Rows:
        payload = commit(self.late.commit_lsn, self._end, 0)
        number = np.array([len(self._of.changes)])
        return self._columns(
            [payload], "C", number, self.late.commit_lsn, self.late.commit_ts, [self._end], [ABSENT], [0]
        )

    def _rows(
        self, places: Sequence[int], commit_lsn: int, commit_ts: int, ids: dict[tuple[int, int], int],
        subxid: Any = None,
    ) -> Rows:  # fmt: skip
        changes = [self._of.changes[at] for at in places]
        lsns = [self.late.commit_lsn - 500 + at for at in places]
        return self._columns(
            [_payload(change, lsn) for change, lsn in zip(changes, lsns, strict=True)],
            "".join(change.kind for change in changes),
            np.array(places, np.int64),
            commit_lsn,
            commit_ts,
            lsns,
            [ABSENT if change.kind == "M" else change.relation_id for change in changes],
            [ids[change.relation_id, change.version] for change in changes],
            subxid,
        )

    def _columns(
        self, payloads: Sequence[bytes], kinds: str, ordinal: Any, commit_lsn: int, commit_ts: int,
        lsns: Sequence[int], relations: Sequence[int], schemas: Sequence[int], subxid: Any = None,
    ) -> Rows:  # fmt: skip
        length = np.array([len(payload) for payload in payloads], np.int64)
        origin = self._of.origin
        return Rows(
            raw=b"".join(payloads),
            offset=np.cumsum(length) - length,
            length=length,
            kind=np.frombuffer(kinds.encode(), np.uint8),
            commit_lsn=np.full(len(payloads), commit_lsn, np.int64),
            ordinal=ordinal,
            xid=np.full(len(payloads), self._xid, np.int64),
            commit_ts=np.full(len(payloads), commit_ts, np.int64),
            lsn=np.array(lsns, np.int64),
            relation_id=np.array(relations, np.int64),
            schema_id=np.array(schemas, np.int64),
            origin=None if origin is None else np.full(len(payloads), origin, object),
            subxid=subxid,
        )


def _payload(change: Change, lsn: int) -> bytes:
    if change.kind == "I":
        return insert(change.relation_id, change.text.hex().encode())
    return truncate([change.relation_id]) if change.kind == "T" else message(lsn, change.text, transactional=True)


def _describe(relations: Relations, relation_id: int, version: int) -> int:
    payload = relation(relation_id, f"t{relation_id}", COLUMNS[version])
    found = decode(payload, Lsn(0))
    assert isinstance(found, Relation)
    return relations.see(found, payload, RelationFacts(TABLES[relation_id]), version).schema_id


def twins(folder: Path, batches: Sequence[Sequence[Transaction]]) -> tuple[ChangeLog, ChangeLog]:
    """Two logs of the same history: one with all rows written at their commit, one with some rows written earlier."""
    pair = Twin(folder / "plain", early=False), Twin(folder / "early", early=True)
    for transactions in batches:
        for twin in pair:
            twin.add(transactions)
    return pair[0].log, pair[1].log


def whole(log: ChangeLog) -> LsnRange:
    return LsnRange(log.start, log.position())


def spans(log: ChangeLog) -> list[LsnRange]:
    """Some LSN ranges that begin and end between transactions. Each range contains one transaction, or all transactions
    from one transaction to the end of the log."""
    edges = [Lsn(edge) for edge in range(log.start, log.position() + 1, STEP)]
    alone = [LsnRange(low, high) for low, high in itertools.pairwise(edges)]
    return alone + [LsnRange(low, edges[-1]) for low in edges[:-2]]


def rows_in(log: ChangeLog, columns: list[str] | None = None, filters: Any = None) -> list[tuple[Any, ...]]:
    """All rows of the log, sorted in a way that does not depend on the files."""
    tables = [read_rows(segment.file, columns, filters) for segment in log.all_segments()]
    return sorted((tuple(row.values()) for table in tables for row in table.to_pylist()), key=str)
