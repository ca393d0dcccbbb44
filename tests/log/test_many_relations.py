"""A transaction changes so many tables that a catalog read for each single table would take too long."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.source.connect.connection import SourceConnection
from tests.log.conftest import Source, content, rows
from tests.log.inside import RECEIVING, receive_inside


def tables(source: Source, count: int) -> None:
    """Creates the tables in transactions of 100 tables, because each new table holds a lock."""
    for first in range(0, count, 100):
        source.run(f"""DO $$ BEGIN FOR n IN {first}..{min(first + 100, count) - 1} LOOP
            EXECUTE format('CREATE TABLE many_%s (id int PRIMARY KEY, v text)', n);
            EXECUTE format('ALTER PUBLICATION p ADD TABLE many_%s', n);
        END LOOP; END $$""")
    source.run("CREATE TABLE parted (id int PRIMARY KEY, v text) PARTITION BY LIST (id)")
    source.run(f"""DO $$ BEGIN FOR n IN 0..{count // 100} LOOP
        EXECUTE format('CREATE TABLE leaf_%s PARTITION OF parted FOR VALUES IN (%s)', n, n);
    END LOOP; END $$""", "ALTER PUBLICATION p ADD TABLE parted")  # fmt: skip


def fill(source: Source, count: int) -> Lsn:
    """Inserts a row into each table, all in one transaction."""
    return source.run(f"""DO $$ BEGIN FOR n IN 0..{count - 1} LOOP
        EXECUTE format('INSERT INTO many_%s VALUES (%s, ''x'')', n, n);
        IF n % 100 = 0 THEN INSERT INTO parted VALUES (n / 100, 'x'); END IF;
    END LOOP; END $$""")


@pytest.mark.long
def test_catalog_is_read_for_many_relations_at_a_time(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    tables(source, 300)
    log = source.log()
    end = fill(source, 300)
    asked: list[str] = []
    execute = SourceConnection.execute

    def counted(conn: SourceConnection, query: object, *args: object, **more: object) -> object:
        asked.append(str(query))
        return execute(conn, query, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(SourceConnection, "execute", counted)
    receive_inside(source, log, end, lambda lsn: None)
    assert sum("pg_attribute" in query for query in asked) < 30
    assert len(asked) < 150
    assert len(rows(log, "kind = 'I'")) == 303


def test_log_is_the_same_if_the_catalog_is_read_for_each_relation_alone(source: Source) -> None:
    tables(source, 40)
    log, twin = source.log(), source.log("twin")
    end = fill(source, 40)
    receive_inside(source, log, end, lambda lsn: None)
    receive_inside(source, twin, end, lambda lsn: None, receiving=replace(RECEIVING, relations_at_once=1))
    assert content(log) == content(twin)
