"""The receiver confirms only commit boundaries that are already durable in the log."""

from __future__ import annotations

import os
import random
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import ZERO, Lsn, LsnRange
from pgcdc_assets.log.reader import ChangeLog
from tests.log.conftest import Source, content, eventually, rows
from tests.log.durable import Disk
from tests.log.inside import RECEIVING, receive_inside
from tests.log.writers import writing


def test_no_confirmation_lies_inside_a_commit_record(source: Source) -> None:
    """A confirmation inside a commit record would lose the transaction (DecodeTXNNeedSkip). A second slot, which
    publishes all tables, provides the commit records."""
    log, twin = source.log(), source.log("twin")
    witness = source.slot("witness")
    source.conn.execute("CREATE PUBLICATION everything FOR ALL TABLES")
    source.conn.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [witness])
    chance, confirmed = random.Random(11), list[Lsn]()
    with writing(source, 2):
        for number in range(8):
            position = log.position()
            eventually(lambda at=position: source.lsn() > at + 8000)  # type: ignore[misc]
            start, stop = chance.choice([record for record in _commit_records(source, witness) if record[0] > position])
            goal = Lsn(start + 8 if number % 2 else start - chance.randrange(1000))
            assert goal < stop
            receiving = replace(RECEIVING, batch_seconds=chance.choice([0, 0.005, 0.05]))
            receive_inside(source, log, goal, confirmed.append, receiving=receiving)
            assert log.position() <= max(goal, position)
    end = source.lsn()
    receive_inside(source, log, end, confirmed.append)
    records = _commit_records(source, witness)
    assert len(records) > 50
    inside = [lsn for lsn in set(confirmed) for start, stop in records if start < lsn < stop]
    assert inside == []
    assert len(set(confirmed)) > 8
    source.receive(twin, end)
    assert content(log) == content(twin)


def _commit_records(source: Source, slot: str) -> list[tuple[int, int]]:
    """[commit_lsn, end_lsn) of every transaction that changed a table."""
    found = source.conn.execute(
        "SELECT data FROM pg_logical_slot_peek_binary_changes(%s, NULL, NULL, 'proto_version', '1',"
        " 'publication_names', 'everything') WHERE get_byte(data, 0) = ascii('C')", [slot],
    ).fetchall()  # fmt: skip
    return [struct.unpack_from(">QQ", data, 2) for (data,) in found]


def test_confirmed_position_survives_a_crash_of_the_machine(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each confirmation, the fsynced part of the lake is a complete log up to the confirmed position."""
    lake = tmp_path / "s"
    lake.mkdir()
    disk = Disk(tmp_path, os.fsync)
    monkeypatch.setattr(os, "fsync", disk.fsync)
    # With segments of this size, segments are written before their batch, and before their transaction has ended.
    receiving = replace(RECEIVING, segment_bytes=1 << 19)
    log, left = source.log(), dict[Lsn, Path]()

    def confirming(flush: Lsn) -> None:
        if flush > max(left, default=ZERO):
            left[flush] = disk.left(tmp_path.parent / f"{tmp_path.name}_crash" / str(int(flush))) / "s"

    for number in range(4):
        receive_inside(source, log, _work(source, number), confirming, receiving=receiving)
    monkeypatch.undo()
    assert len(left) > 4
    assert max(left) == log.position()
    for flush, copy in left.items():
        found = ChangeLog(Layout.of(copy)).open()
        assert found.position() >= flush
        found.verify(LsnRange(found.start, found.position()))
        below = f"commit_lsn < {int(flush)}"
        assert rows(found, below) == rows(log, below)


def _work(source: Source, number: int) -> Lsn:
    """Runs small transactions, a large transaction, and a transaction on unpublished tables."""
    source.transaction(*(f"INSERT INTO a VALUES ({number * 10 + row}, 'x')" for row in range(3)))
    source.run(f"UPDATE a SET v = repeat(md5(id::text), 20000) WHERE id >= {number * 10}")
    return source.run(f"INSERT INTO b VALUES ({number}, 1)", "INSERT INTO foreign_table SELECT 1, 'x'")
