"""The sample shop database and its generated traffic."""

from __future__ import annotations

import threading
import time

import psycopg
import pytest
from psycopg import sql

from pgcdc_assets.demo import shop
from pgcdc_assets.demo.generator import Generator
from tests.fix_postgres import Database
from tests.waiting import wait_for

TABLES = ("carts", "customers", "events", "order_lines", "orders", "payments", "products")
SLOT_CONTENT = """
SELECT chr(get_byte(data, 0)), count(*)::int
FROM pg_logical_slot_peek_binary_changes(%s, NULL, NULL, 'proto_version', '1', 'publication_names', 'all_of_it')
GROUP BY 1
"""


def test_shop_is_made_once_with_rows_in_every_table(database: Database) -> None:
    assert shop.ensure(database.conninfo)
    assert not shop.ensure(database.conninfo)
    with database.connect() as conn:
        names = conn.execute("SELECT relname FROM pg_class WHERE relkind IN ('r', 'p') AND NOT relispartition "
                             "AND relnamespace = 'public'::regnamespace ORDER BY relname")  # fmt: skip
        assert tuple(name for (name,) in names) == TABLES
        for table in TABLES:
            found = conn.execute(sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier("public", table))).fetchone()
            assert found is not None
            assert found[0] >= 20
        toasted = conn.execute("SELECT pg_relation_size(reltoastrelid) FROM pg_class WHERE relname = 'products'")
        assert toasted.fetchall()[0][0] > 0


def test_two_concurrent_calls_make_one_shop(database: Database) -> None:
    made: list[bool] = []
    threads = [threading.Thread(target=lambda: made.append(shop.ensure(database.conninfo))) for _ in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == [False, True]


@pytest.mark.long
def test_traffic_has_every_kind_of_change(database: Database) -> None:
    shop.ensure(database.conninfo)
    slot = f"s_{database.name}"
    with database.connect() as conn:
        conn.execute("CREATE PUBLICATION all_of_it FOR ALL TABLES")
        conn.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
        generator = Generator(database.conninfo, rate=400)
        kinds: dict[str, int] = {}

        def enough() -> bool:
            """Whether all kinds of changes were seen. This may take long: while other sessions hold locks, the traffic
            has no imports and truncates."""
            if generator.transactions <= 1000:
                return False
            kinds.update(conn.execute(SLOT_CONTENT, [slot]).fetchall())
            return {"I", "U", "D", "T"} <= kinds.keys() and imported() > 400

        def imported() -> int:
            return int(conn.execute("SELECT count(*) FROM events WHERE kind = 'import'").fetchall()[0][0])

        traffic = threading.Thread(target=generator.run)
        traffic.start()
        try:
            wait_for(enough)
        finally:
            generator.stop()
            traffic.join()
        kinds.update(conn.execute(SLOT_CONTENT, [slot]).fetchall())
        committed = kinds["C"]
        assert 0.9 * generator.transactions <= committed <= generator.transactions
        rows = conn.execute("SELECT data FROM pg_logical_slot_peek_binary_changes(%s, NULL, NULL, 'proto_version', "
                            "'1', 'publication_names', 'all_of_it')", [slot])  # fmt: skip
        updates = [data for (data,) in rows if data[:1] == b"U"]
        assert any(data[5:6] == b"K" for data in updates), "a key changed"
        assert any(data[5:6] == b"O" for data in updates), "a row of the table without a key changed"
        never = conn.execute("SELECT count(*) FROM events WHERE kind = 'never seen'").fetchone()
        assert never == (0,)


def test_generator_stops_at_once_and_raises_the_error_of_a_session(database: Database) -> None:
    shop.ensure(database.conninfo)
    generator = Generator(database.conninfo, rate=0.001)
    threading.Timer(0.3, generator.stop).start()
    started = time.monotonic()
    generator.run()
    assert time.monotonic() - started < 5
    with database.connect() as conn:
        conn.execute("DROP TABLE order_lines CASCADE; DROP TABLE events")
    with pytest.raises(psycopg.errors.UndefinedTable):
        Generator(database.conninfo, rate=500).run()
