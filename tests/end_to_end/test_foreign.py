"""The ``pgcdc`` commands with tables that are less simple than the tables of the sample shop: odd names, several
schemas, no keys."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable, QueryBuilder, write_deltalake

from tests.end_to_end.command import Project
from tests.end_to_end.terminal import ends, terminal
from tests.fix_postgres import Database
from tests.journal import published
from tests.oracle import assert_equal
from tests.waiting import wait_for

SCHEMA = """
CREATE SCHEMA "Odd Schema"; CREATE SCHEMA other; CREATE SCHEMA changes;
CREATE TYPE public.mood AS ENUM ('sad', 'ok', 'happy');
CREATE TABLE public.plain (id int PRIMARY KEY, name text NOT NULL, amount numeric(12,2), at timestamptz, day date,
  flag bool, tags text[], doc jsonb, mood public.mood, raw bytea, ratio float8);
CREATE TABLE "Odd Schema"."Select" ("Group by" int, "a.b" text, "ümlaut ☃" text, "key;,= ()" int,
  PRIMARY KEY ("Group by", "key;,= ()"));
CREATE TABLE other.plain (id bigint PRIMARY KEY, big text);
CREATE TABLE changes.plain (id bigint PRIMARY KEY, v int);
CREATE TABLE public.bag (k int, v text); ALTER TABLE public.bag REPLICA IDENTITY FULL;
CREATE TABLE public.log_only (at timestamptz, line text);
CREATE TABLE public.empty_one (id int PRIMARY KEY);
CREATE TABLE public.measure (id int, region text, value int, PRIMARY KEY (id, region)) PARTITION BY LIST (region);
CREATE TABLE public.measure_n PARTITION OF public.measure FOR VALUES IN ('n');
CREATE TABLE public.measure_s PARTITION OF public.measure FOR VALUES IN ('s');
"""
DATA = """
INSERT INTO public.plain SELECT g, 'name ' || g, g / 3.0,
  timestamptz '2024-02-29 12:00:00.123456+00' + g * interval '1 h', date '2024-01-01' + g, g % 2 = 0,
  ARRAY['a', NULL, 'x "' || g], jsonb_build_object('g', g), 'ok', decode(md5(g::text), 'hex'), g / 7.0
  FROM generate_series(1, 500) g;
INSERT INTO "Odd Schema"."Select" SELECT g, 'dot', E'line\\nbreak,"quoted"', g % 7 FROM generate_series(1, 50) g;
INSERT INTO other.plain SELECT g, repeat(md5(g::text), 400) FROM generate_series(1, 20) g;
INSERT INTO changes.plain SELECT g, g FROM generate_series(1, 20) g;
INSERT INTO public.bag SELECT g % 3, 'dup' FROM generate_series(1, 30) g;
INSERT INTO public.log_only SELECT now(), 'line ' || g FROM generate_series(1, 10) g;
INSERT INTO public.measure SELECT g, CASE WHEN g % 2 = 0 THEN 'n' ELSE 's' END, g FROM generate_series(1, 40) g;
"""
WRITES = """
BEGIN; UPDATE public.plain SET name = name || '!' WHERE id % 5 = 0; DELETE FROM public.plain WHERE id % 7 = 0;
  INSERT INTO public.plain (id, name) VALUES (1001, ''), (1002, 'emoji 🐘'); COMMIT;
BEGIN; DELETE FROM public.plain WHERE id = 1; ROLLBACK;
UPDATE public.plain SET id = -id WHERE id < 20;
UPDATE "Odd Schema"."Select" SET "Group by" = "Group by" + 1000 WHERE "key;,= ()" = 3;
UPDATE other.plain SET id = id + 100 WHERE id < 5;
UPDATE changes.plain SET v = v + 1;
DELETE FROM public.bag WHERE ctid IN (SELECT ctid FROM public.bag WHERE k = 1 LIMIT 2);
UPDATE public.bag SET v = 'changed' WHERE k = 2;
INSERT INTO public.log_only VALUES (now(), 'late');
INSERT INTO public.empty_one VALUES (1); TRUNCATE public.empty_one; INSERT INTO public.empty_one VALUES (2);
UPDATE public.measure SET region = 's' WHERE id < 10;
TRUNCATE public.measure_n;
"""
TABLES = (
    "public.plain", "Odd Schema.Select", "other.plain", "changes.plain", "public.bag", "public.log_only",
    "public.empty_one", "public.measure",
)  # fmt: skip


@pytest.fixture
def project(database: Database, tmp_path: Path) -> Project:
    return Project(tmp_path, {"PGCDC_SOURCE": database.conninfo, "PGCDC_SLOT": f"s_{database.name}"[:60]})


@pytest.mark.long
@pytest.mark.process
@pytest.mark.timeout(600)  # Eight commands, one after the other.
@pytest.mark.takes(80)
def test_each_command_from_setup_to_teardown_works_with_odd_tables(project: Project, database: Database) -> None:
    with database.connect() as conn:
        conn.execute(SCHEMA)
        conn.execute(DATA)
        assert project.run("setup", "--json").json["created"]
        _copied_and_interrupted(project)
        assert_equal(conn, project.lake, *TABLES)

        for statement in WRITES.strip().split(";\n"):
            conn.execute(statement)
        synced = project.run("sync", "--json").json
        assert synced["transactions"] >= 10
        assert_equal(conn, project.lake, *TABLES)

        verified = project.run("verify", "--json").json
        assert verified["ok"]
        assert {table["name"] for table in verified["tables"]} == {
            "public.plain", '"Odd Schema"."Select"', "other.plain", "changes.plain", "public.bag",
            "public.log_only", "public.empty_one", "public.measure",
        }  # fmt: skip
        status = project.run("status", "--json").json
        assert status["ok"], status["problems"]
        assert {table["state"] for table in status["tables"]} == {"streaming"}

        _damage(project.lake / "public" / "plain")
        wrong = project.run("verify", "public.plain", "--json", expect=1).json
        assert not wrong["ok"]
        assert "1001" in str(wrong["tables"][0]["examples"])
        assert "the mirror of public.plain does not match the source" in project.run("sync", expect=3).err

        project.run("teardown", "--yes")
        assert conn.execute("SELECT count(*) FROM pg_publication").fetchone() == (0,)
        slots = conn.execute("SELECT count(*) FROM pg_replication_slots WHERE database = current_database()")
        assert slots.fetchone() == (0,)
        assert (project.lake / "public" / "plain").is_dir()


def _copied_and_interrupted(project: Project) -> None:
    """Waits until ``pgcdc follow`` has copied all tables, then types Ctrl-C. The sync must end at a commit boundary,
    without a Spark traceback."""
    with terminal(project, "follow") as shown:
        wait_for(lambda: _listed(project) == len(TABLES) or shown.process.poll() is not None, what="a point with all")
        shown.ctrl_c()
        code = ends(shown.process)
        output = shown.words
    assert (code, "replay_lsn" in output) == (0, True), output
    assert "Traceback" not in output
    assert "py4j" not in output


def _listed(project: Project) -> int:
    """The number of tables in the newest consistent point."""
    points = published(project.lake)
    return len(points[-1][1]) if points else 0


def _damage(path: Path) -> None:
    """Changes one row of the mirror with delta-rs. Rewrites the whole table, because the UPDATE of delta-rs cannot
    write deletion vectors."""
    table = DeltaTable(str(path))
    rows = QueryBuilder().register("t", table).execute("SELECT * FROM t").read_all()
    index = rows.schema.get_field_index("name")
    arrow = pa.table(rows)
    changed = pc.if_else(pc.equal(arrow["id"], 1001), pa.scalar("changed from outside"), arrow["name"].cast("string"))
    write_deltalake(table, arrow.set_column(index, "name", changed), mode="overwrite")
