"""Messages on changes of structure in the log: whatever the settings say, and however they came."""

from __future__ import annotations

import pytest

from pgcdc_assets.core.ranges import LsnRange
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.log.structurenotes import structure_notes
from pgcdc_assets.log.upkeep import compact
from pgcdc_assets.source.setup.eventtriggers import EventTriggers
from tests.log.conftest import PUBLICATION, Source, rows

ROWS = "INSERT INTO a SELECT g, repeat('x', 200) FROM generate_series({0}, {0} + 1999) g"


def _noted(source: Source) -> ChangeLog:
    log = source.log()
    EventTriggers(log.identity.slot, [PUBLICATION]).make(source.conn)
    return log


def _columns(log: ChangeLog) -> list[list[str]]:
    notes = structure_notes(log, log.batches(log.start))
    assert [note.commit_lsn for note in notes] == sorted(note.commit_lsn for note in notes)
    commits = {row["commit_lsn"]: row["lsn"] for row in rows(log, "kind = 'C'")}
    for note in notes:
        assert note.commit_lsn < note.end_lsn
        assert note.commit_lsn in commits
    return [[column.name for column in note.tables[0].columns] if note.tables else [] for note in notes]


@pytest.mark.parametrize("replication", [True, False])
def test_they_come_with_their_transaction(source: Source, replication: bool) -> None:
    source.replication = replication
    log = _noted(source)
    source.run("ALTER TABLE a ADD w int DEFAULT 5", "INSERT INTO a VALUES (1, 'x', 6)")
    source.transaction("ALTER TABLE a RENAME w TO y", "INSERT INTO a VALUES (2, 'x', 7)", "ALTER TABLE a DROP y")
    source.run(
        "BEGIN; ALTER TABLE a DROP v; ROLLBACK", "ALTER TABLE foreign_table ADD w int", "ALTER TABLE b ADD m int"
    )
    source.receive(log, source.lsn(), messages=())
    assert _columns(log) == [["id", "v", "w"], ["id", "v", "y"], ["id", "v"], ["id", "n", "m"]]
    kinds = [row["kind"] for row in rows(log, "kind IN ('I', 's', 'C', 'M')")]
    assert sorted(kinds) == ["C"] * 4 + ["I"] * 2 + ["s"] * 4
    whole = LsnRange(log.start, log.position())
    assert log.verify(whole)
    assert compact(log, whole) > 0 or len(log.all_segments()) == 1
    assert _columns(log) == [["id", "v", "w"], ["id", "v", "y"], ["id", "v"], ["id", "n", "m"]]


def test_they_come_in_blocks(source: Source) -> None:
    """Those of a savepoint that is rolled back do not."""
    source.conn.execute(f"ALTER DATABASE {source.database.name} SET logical_decoding_work_mem = '64kB'".encode())
    log = _noted(source)
    source.transaction(
        ROWS.format(1), "ALTER TABLE a ADD w int DEFAULT 5", ROWS.format(3000), "SAVEPOINT s", "ALTER TABLE a DROP v",
        "ROLLBACK TO s", ROWS.format(6000), "ALTER TABLE a RENAME w TO y",
    )  # fmt: skip
    source.receive(log, source.lsn(), messages=())
    assert _columns(log) == [["id", "v", "w"], ["id", "v", "y"]]
    assert len(rows(log, "kind = 'I'")) == 6000
    assert log.verify(LsnRange(log.start, log.position()))


def test_without_triggers_none_is_asked_for(source: Source) -> None:
    log = source.log()
    source.run(f"SELECT pg_logical_emit_message(true, 'pgcdc.ddl.{log.identity.slot}', 'x')",
               "INSERT INTO a VALUES (1, 'x')")  # fmt: skip
    source.receive(log, source.lsn(), messages=())
    assert [row["kind"] for row in rows(log)] == ["I", "C"]
