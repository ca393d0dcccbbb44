"""The log contains every message once, byte for byte, at the right place in the order."""

from __future__ import annotations

from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.protocol.decode import decode
from pgcdc_assets.protocol.messages import Insert, Update
from pgcdc_assets.source.connect.pluginoptions import Origins
from tests.log.conftest import Source, in_each_place, rows

pytestmark = in_each_place


def test_rows_of_several_transactions_and_tables_are_stored_in_order(source: Source) -> None:
    log = source.log()
    source.transaction("INSERT INTO a SELECT g, 'x' FROM generate_series(1, 3) g", "INSERT INTO b VALUES (1, 2.50)")
    end = source.transaction("UPDATE a SET v = 'y' WHERE id = 2", "DELETE FROM b", "INSERT INTO b VALUES (9, 9)")
    source.receive(log, end)
    found = [(row["kind"], row["tx_ordinal"]) for row in rows(log)]
    assert found == [(k, i) for i, k in enumerate("IIIIC")] + [(k, i) for i, k in enumerate("UDIC")]
    changes = [decode(row["payload"], Lsn(row["lsn"])) for row in rows(log, "kind IN ('I', 'U')")]
    assert isinstance(changes[0], Insert)
    assert changes[0].new == ("1", "x")
    assert isinstance(changes[4], Update)
    assert changes[4].new == ("2", "y")
    assert len({row["commit_lsn"] for row in rows(log)}) == 2
    assert all(row["xid"] and row["commit_ts"] for row in rows(log))


def test_batch_lists_the_partitions_that_are_published_via_their_root(source: Source) -> None:
    """The batch also lists a partition that was created and dropped between two catalog checks."""
    source.run("CREATE TABLE r (id int PRIMARY KEY) PARTITION BY RANGE (id)",
               "CREATE TABLE branch PARTITION OF r FOR VALUES FROM (0) TO (10) PARTITION BY RANGE (id)",
               "CREATE TABLE leaf PARTITION OF branch FOR VALUES FROM (0) TO (10)", "ALTER PUBLICATION p ADD TABLE r",
               "ALTER PUBLICATION p SET (publish_via_partition_root = true)")  # fmt: skip
    log = source.log()
    source.run("TRUNCATE a, b, r")
    source.transaction("INSERT INTO a VALUES (1, 'x')", "INSERT INTO b VALUES (1, 1)", "INSERT INTO r VALUES (1), (2)")
    source.run("CREATE TABLE gone PARTITION OF r FOR VALUES FROM (10) TO (20)")
    found = source.conn.execute("SELECT relname, oid FROM pg_class WHERE relname IN ('r', 'leaf', 'gone')").fetchall()
    oid = dict(found)
    end = source.run("INSERT INTO r VALUES (11)", "DROP TABLE gone", "UPDATE r SET id = 3 WHERE id = 2")
    source.receive(log, end)
    told = {root: set(leaves) for batch in log.batches(log.start) for root, leaves in batch.partitions.items()}
    assert told == {oid["r"]: {oid["leaf"], oid["gone"]}}


def test_batch_lists_no_partitions_if_the_settings_exclude_the_rows_after_a_relation_message(source: Source) -> None:
    """The receiver itself excludes replicated transactions with PostgreSQL 14 and 15, and with ``two_phase``. It keeps
    their Relation messages, because the server sends each only once per connection."""
    two_phase, name = source.conn.info.server_version >= 160000, source.slot("o")
    log = source.log(two_phase=two_phase)
    source.run(
        f"SELECT pg_replication_origin_create('{name}')", f"SELECT pg_replication_origin_session_setup('{name}')"
    )
    source.run("INSERT INTO a VALUES (1, 'replicated')", "SELECT pg_replication_origin_session_reset()")
    end = source.run("INSERT INTO b VALUES (1, 1)", "INSERT INTO a VALUES (2, 'own')")
    source.receive(log, end, origin=Origins.NONE, two_phase=two_phase)
    source.run(f"SELECT pg_replication_origin_drop('{name}')")
    assert [row["kind"] for row in rows(log)] == ["I", "C", "I", "C"]
    assert [batch.partitions for batch in log.batches(log.start) if batch.partitions] == []


def test_rows_before_and_after_an_alter_have_different_schema_ids(source: Source) -> None:
    log = source.log()
    end = source.transaction(
        "INSERT INTO a VALUES (1, 'x')", "ALTER TABLE a ADD COLUMN more date", "INSERT INTO a VALUES (2, 'y', now())"
    )
    source.receive(log, end)
    first, second = rows(log, "kind = 'I'")
    assert first["schema_id"] != second["schema_id"]
    shapes = log.shapes(LsnRange(log.start, log.position()))
    assert [column.name for column in shapes[first["schema_id"]].columns] == ["id", "v"]
    assert [column.name for column in shapes[second["schema_id"]].columns] == ["id", "v", "more"]


def test_type_messages_are_stored_with_their_relation(source: Source) -> None:
    source.run("CREATE TYPE mood AS ENUM ('sad', 'ok')", "ALTER TABLE a ADD COLUMN m mood")
    log = source.log()
    end = source.run("INSERT INTO a VALUES (1, 'x', 'ok')")
    source.receive(log, end)
    assert [b"mood" in row["payload"] for row in rows(log, "kind = 'Y'")] == [True]
