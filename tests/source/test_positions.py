"""Positions of the source's WAL, as SQL reports them."""

from __future__ import annotations

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.source.slot.positions import RECORD_END
from tests.fix_postgres import Database


def test_a_record_ends_before_the_header_of_the_next_page(database: Database) -> None:
    """After a record that fills a page or file, the insert position is after the next page's header. A flush position
    is never after a page header."""
    with database.connect() as conn:

        def at(query: str) -> Lsn:
            return Lsn.parse(str(conn.execute(query.encode()).fetchall()[0][0]))

        # Many tries of some milliseconds each, because a concurrent autovacuum may write for longer than fifty tries.
        for _ in range(3000):
            before = at(RECORD_END)
            bare = at("SELECT pg_logical_emit_message(false, '', '')") - before
            # This record fills the page to its end, if no other session writes and the rest of the page is large
            # enough.
            room = (-(before + bare)) % 8192 - bare
            if room < 0:
                continue
            conn.execute("SELECT pg_logical_emit_message(false, '', repeat('x', %s))", [room])
            end, inserted = at(RECORD_END), at("SELECT pg_current_wal_insert_lsn()")
            assert end == inserted or (end % 8192 == 0 and inserted - end in (24, 40))
            if end != inserted:
                break
        else:
            raise AssertionError("no record ended with its page")
        conn.execute("SELECT pg_switch_wal()")
        assert at(RECORD_END) % (1 << 20) == 0
