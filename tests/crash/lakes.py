"""A source with tables of every kind, concurrent writers and a journal, and a lake with mirrors of these tables."""

from __future__ import annotations

import random
import re
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import psycopg

from pgcdc_assets.core.layout import Layout, Location
from pgcdc_assets.core.lsn import ZERO, Lsn
from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.points.states import TableStates
from pgcdc_assets.store import storage
from pgcdc_assets.structure.record import TableState
from tests.crash.faults import Faults, Tally
from tests.crash.proxy import Proxy
from tests.crash.workload import Draw, Script, Writers, in_transaction, prepared
from tests.fix_postgres import Database
from tests.journal import Journal, published
from tests.oracle import assert_equal

TABLES = ("public.t", "public.u", "public.part", "public.bag", "public.entry", "public.wiped")
WIDE = "public.wide"
"""The table that gets new columns. The journal does not record this table, because the journal's triggers do not
survive new columns."""
CHANGING = ("t", "u", "part", "bag", "entry")
_TABLE = re.compile(r"^(?:INSERT INTO|UPDATE|DELETE FROM) (\w+)")
_MAKE = """
CREATE TABLE t (id int PRIMARY KEY, v text, big text);
ALTER TABLE t ALTER big SET STORAGE EXTERNAL;
CREATE TABLE u (a int, b int, v numeric(10,2), PRIMARY KEY (a, b));
CREATE TABLE part (region text, id int, v text, PRIMARY KEY (region, id)) PARTITION BY LIST (region);
CREATE TABLE part_n PARTITION OF part FOR VALUES IN ('n');
CREATE TABLE part_s PARTITION OF part FOR VALUES IN ('s');
CREATE TABLE bag (k int, v text);
ALTER TABLE bag REPLICA IDENTITY FULL;
CREATE TABLE entry (id bigserial PRIMARY KEY, note text);
CREATE TABLE wiped (id int PRIMARY KEY, v text);
CREATE TABLE wide (id int PRIMARY KEY);
INSERT INTO t SELECT g, 'v' || g, repeat(md5(g::text), 80) FROM generate_series(1, 60) g;
INSERT INTO u SELECT g, g % 3, g / 4.0 FROM generate_series(1, 60) g;
INSERT INTO part SELECT CASE g % 2 WHEN 0 THEN 'n' ELSE 's' END, g, 'v' FROM generate_series(1, 60) g;
INSERT INTO bag SELECT g % 7, 'copy' FROM generate_series(1, 40) g;
INSERT INTO entry (note) SELECT 'first' FROM generate_series(1, 20);
INSERT INTO wiped SELECT g, 'v' FROM generate_series(1, 20) g;
CREATE SCHEMA elsewhere;
CREATE TABLE elsewhere.foreign_table (v text);
"""


def changes(chance: random.Random, tables: Container[str]) -> Script:
    """One to four random statements that insert, update or delete rows of these tables."""
    at = chance.randrange(80)
    all_kinds = [
        f"UPDATE t SET v = v || '!' WHERE id BETWEEN {at} AND {at + 4}",
        f"INSERT INTO t VALUES ({at}, 'new', repeat('x{at}', 1500)) ON CONFLICT (id) DO UPDATE SET v = 'again'",
        f"UPDATE t SET id = id + 1000 WHERE id = {at}",
        f"DELETE FROM t WHERE id = {at}",
        f"INSERT INTO u VALUES ({at}, {at % 3}, 1) ON CONFLICT (a, b) DO UPDATE SET v = u.v + 1",
        f"DELETE FROM u WHERE a = {at}",
        f"INSERT INTO part VALUES ('n', {at}, 'new') ON CONFLICT (region, id) DO UPDATE SET v = 'again'",
        f"UPDATE part SET region = 's' WHERE id = {at} AND NOT EXISTS (SELECT FROM part_s WHERE id = {at})",
        f"DELETE FROM part WHERE id = {at}",
        f"INSERT INTO bag VALUES ({at % 7}, 'copy'), ({at % 7}, 'copy'), ({at % 7}, NULL)",
        f"UPDATE bag SET v = 'set {at}' WHERE k = {at % 7} AND v = 'copy'",
        f"DELETE FROM bag WHERE ctid = (SELECT ctid FROM bag WHERE k = {at % 7} LIMIT 1)",
        "INSERT INTO entry (note) SELECT 'more' FROM generate_series(1, 3)",
    ]
    chosen = [statement for statement in all_kinds if _TABLE.split(statement)[1] in tables]
    return chance.sample(chosen, min(len(chosen), chance.randint(1, 4)))


def inserts(chance: random.Random) -> Script:
    return ["INSERT INTO entry (note) SELECT 'alone' FROM generate_series(1, 5)"]


def wipe(chance: random.Random) -> Script:
    rows = f"INSERT INTO wiped SELECT g, 'after' FROM generate_series(1, {chance.randint(1, 9)}) g"
    emptied = chance.choice(["wiped", "wiped", "wiped", "wiped, bag", "part_n"])
    return ["BEGIN", f"TRUNCATE {emptied}", rows + " ON CONFLICT (id) DO NOTHING", "COMMIT"]


def elsewhere(chance: random.Random) -> Script:
    return ["INSERT INTO elsewhere.foreign_table SELECT repeat('x', 200) FROM generate_series(1, 200)"]


def work(chance: random.Random) -> Sequence[tuple[Draw, int]]:
    """The kinds of scripts that the writers choose from, with their weights. The scripts of ``changes`` change only one
    or two random tables, because a MERGE takes seconds."""
    tables = chance.sample(CHANGING, chance.choice([1, 1, 2]))
    some = partial(changes, tables=tables)
    return (some, 8), (in_transaction(some), 6), (prepared(some), 2), (inserts, 2), (wipe, 2), (elsewhere, 1)


@dataclass
class LakeRig:
    """What tests that sync in their own process and tests that run commands have in common: the source, and the checks
    of the lake."""

    server: EmbeddedServer
    faults: Faults
    proxy: Proxy
    chance: random.Random
    tally: Tally
    database: Database
    lake: Location
    slot: str = field(init=False)
    conn: psycopg.Connection[Any] = field(init=False)
    journal: Journal = field(init=False)
    writers: Writers = field(init=False)
    compared: set[str] = field(default_factory=set)
    """Consistent points that were already compared with the source."""
    stood: Lsn = ZERO

    def __post_init__(self) -> None:
        self.slot = f"s_{self.database.name}"
        self.conn = self.database.connect()
        self.conn.execute(_MAKE)
        self.journal = Journal.keep(self.conn, *TABLES)
        self.writers = Writers(self.database.conninfo, work(self.chance), self.chance, threads=2, most_pause=0.12)

    def close(self) -> None:
        self.conn.close()

    def connected_again(self) -> None:
        self.close()
        self.conn = self.journal.conn = self.database.connect()

    def moved(self) -> tuple[int, ...]:
        """The number of Delta commits of the log and of every mirror."""
        folders = [Layout(self.lake).change_log, *(self.lake / table.replace(".", "/") for table in TABLES)]
        listed = (storage.list_after(folder / "_delta_log") for folder in folders)
        return tuple(sum(entry.name.endswith(".json") for entry in entries) for entries in listed)

    def look(self) -> int:
        """Checks that the confirmed LSN is not above the log's position, that no table is set aside, and that all
        tables of every new consistent point equal the source at the point's LSN. Returns the number of new points."""
        log = ChangeLog(Layout(self.lake))
        if log.exists:
            row = self.conn.execute(
                "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = %s", [self.slot]
            ).fetchone()
            assert row is not None
            position = log.position()
            assert Lsn.parse(row[0]) <= position, f"confirmed {row[0]}, but the log ends at {position}"
            assert position >= self.stood, f"the log's end moved back from {self.stood} to {position}"
            self.stood = position
        points = published(self.lake.text)
        assert [lsn for lsn, _ in points] == sorted(lsn for lsn, _ in points), "the points are not in order"
        # Points are remembered by their content and not by their number, because maintenance removes old points.
        fresh = [point for point in points if repr(point) not in self.compared]
        self.compared |= {repr(point) for point in fresh}
        commits = self.journal.commits() if fresh else {}
        for lsn, versions in fresh:
            self.journal.assert_equal_at(self.lake.text, lsn, versions, commits)
        aside = [row for row in TableStates(Layout(self.lake)).all().values() if row.state is TableState.SET_ASIDE]
        assert not aside, f"{aside[0].name}: {aside[0].reason}"
        return len(fresh)

    def assert_all_there(self) -> None:
        """Checks, after a sync without writers, that the newest point lists all tables and equals the current
        source."""
        assert self.look() > 0 or published(self.lake.text)
        assert set(published(self.lake.text)[-1][1]) == {*TABLES, WIDE}
        assert_equal(self.conn, self.lake.text, *TABLES, WIDE)
