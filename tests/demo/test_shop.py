"""The sample shop database and its generated traffic."""

from __future__ import annotations

import threading
import time

import psycopg
import pytest
from psycopg import sql

from pgcdc_assets.demo import shop
from pgcdc_assets.demo.shop import Generator
from tests.fix_postgres import Database

TABLES = ("carts", "customers", "events", "order_lines", "orders", "payments", "products")


def test_sample_shop_is_created_once_with_rows_in_every_table(database: Database) -> None:
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


def test_two_concurrent_calls_create_only_one_sample_shop(database: Database) -> None:
    made: list[bool] = []
    threads = [threading.Thread(target=lambda: made.append(shop.ensure(database.conninfo))) for _ in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == [False, True]


def test_generator_stops_at_once_on_request_and_raises_the_error_of_its_session(database: Database) -> None:
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
