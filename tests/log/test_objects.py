"""The log in an object store. With the long test set, more tests run in an object store: see ``in_each_place``."""

from __future__ import annotations

from pathlib import Path

from pgcdc_assets.core.layout import Location
from pgcdc_assets.core.lsn import LsnRange
from tests.fix_postgres import Database
from tests.log.conftest import content, source_in


def test_log_in_an_object_store_equals_log_in_a_folder(database: Database, tmp_path: Path, bucket: Location) -> None:
    with source_in(database, tmp_path, bucket) as source:
        stored = source.log("stored")
        source.bucket = None
        local = source.log("local", copy_of=stored)
        for number in range(2):
            source.run(f"INSERT INTO a VALUES ({number}, 'x')", "UPDATE a SET v = v || 1", "TRUNCATE b")
            end = source.lsn()
            for log in (stored, local):
                source.receive(log, end)
                assert source.confirmed(log) == log.position()
        assert content(stored) == content(local) != []
        assert stored.verify(LsnRange(stored.start, stored.position()))
