"""``pgcdc status`` at each stage of a project: before setup, without a lake, without the source, and with all of
them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from psycopg import sql

from pgcdc_assets.checks.health import TableFacts
from pgcdc_assets.checks.status import Status, status
from pgcdc_assets.core.catalog import Catalog
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.flow.lock import lake_lock
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.log.spill import PREPARED, PreparedFolder
from pgcdc_assets.log.transactions import PreparedKey, PreparedTransaction
from pgcdc_assets.points.points import ConsistentPoints
from pgcdc_assets.points.states import TableStates
from pgcdc_assets.points.untaken import UntakenLedger, UntakenRows
from pgcdc_assets.project import save_catalog
from pgcdc_assets.settings import Settings
from pgcdc_assets.source.catalog.tables import read_tables
from pgcdc_assets.source.connect.connection import connect
from pgcdc_assets.source.setup.setup import setup
from pgcdc_assets.store import lease
from pgcdc_assets.store.local import path_of
from pgcdc_assets.structure.record import TableState
from tests.deltatables import publish_at
from tests.fix_postgres import Database
from tests.projectfiles import CATALOG_FILE
from tests.waiting import wait_for


@dataclass(frozen=True)
class Project:
    """A project directory for a source with two tables."""

    settings: Settings
    source: Database

    def setup(self) -> Catalog:
        catalog = setup(self.settings, self.source.conninfo).catalog
        save_catalog(catalog, CATALOG_FILE)
        return catalog

    def log(self, catalog: Catalog, start: Lsn | None = None) -> Lsn:
        """Creates a change log that begins at ``start``. Without ``start``, the log begins at the slot's position.
        Returns the LSN at which the log begins."""
        begin = start or self.confirmed()
        ChangeLog(self.settings.layout).create(catalog.identity, begin, 1)
        return begin

    def confirmed(self) -> Lsn:
        found = self.status().slot
        assert found is not None
        assert found.confirmed_flush_lsn is not None
        return found.confirmed_flush_lsn

    def status(self) -> Status:
        return status(self.settings)

    def problem(self, thing: str) -> str:
        """The text of the problem with this thing. Fails if the thing has no problem or several."""
        (found,) = [problem for problem in self.status().problems if problem.thing == thing]
        return found.what


@pytest.fixture
def project(database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.chdir(tmp_path)
    with database.connect() as conn:
        conn.execute("CREATE TABLE a (id int PRIMARY KEY); CREATE TABLE b (id int PRIMARY KEY)")
    slot = f"s_{database.name}"
    settings = Settings(source=database.conninfo, lake=tmp_path / "lake", slot=slot, publication=slot)
    return Project(settings, database)


A, B = TableName("public", "a"), TableName("public", "b")


def test_before_setup_status_advises_setup(project: Project) -> None:
    found = project.status()
    document = json.loads(json.dumps(found.to_json()))
    age = datetime.now(UTC) - datetime.fromisoformat(document.pop("time"))
    assert timedelta(0) <= age < timedelta(minutes=5)
    assert document.pop("version") == version("pgcdc_assets")
    assert document == {
        "ok": False, "slot": {}, "at_work": None, "transform_lsn": None, "replay_lsn": None, "lag_bytes": None,
        "lag_seconds": None, "in_progress": None, "prepared": [], "hold": None, "tables": [],
        "problems": [{"severity": "error", "code": "not_set_up", "what": "project is not set up",
                      "do": "run `pgcdc setup`"}], "last": {},
    }  # fmt: skip
    assert not path_of(project.settings.layout.root).exists()


def test_status_succeeds_after_setup_even_if_there_is_no_lake_yet(project: Project) -> None:
    project.setup()
    found = project.status()
    assert (found.problems, found.uncopied) == ((), 2)
    data: dict[str, Any] = json.loads(json.dumps(found.to_json()))
    assert data["ok"]
    assert data["slot"]["name"] == project.settings.slot
    assert data["slot"]["plugin"] == "pgoutput"
    assert Lsn.parse(data["slot"]["confirmed_flush_lsn"]) > 0
    assert [(table["name"], table["state"]) for table in data["tables"]] == [
        ("public.a", "waiting"),
        ("public.b", "waiting"),
    ]
    assert not path_of(project.settings.layout.root).exists()


def test_status_names_the_process_that_writes_to_the_lake(project: Project) -> None:
    project.log(project.setup())
    with lake_lock(project.settings.layout, "follow"):
        assert project.status().at_work == f"`pgcdc follow` (pid {os.getpid()})"
    with lease.held(project.settings.layout.lock) as other:
        assert other is not None
        other.write("not ours")
        assert project.status().at_work is None


def test_prepared_transactions_that_the_lake_stores_are_listed(project: Project) -> None:
    """The oldest transaction is listed first. A transaction without changes of published tables is stored, too, but not
    listed."""
    project.log(project.setup())
    folder = PreparedFolder(project.settings.layout.change_log)
    for xid, changes in ((9, 3), (8, 0), (7, 2)):
        key = PreparedKey(xid, f"it's {xid}", Lsn(100 + xid))
        folder.keep(PreparedTransaction(key, 5, changes=4, counted=changes), [])
    found: dict[str, Any] = json.loads(json.dumps(project.status().to_json()))
    assert [(kept["gid"], kept["xid"], kept["changes"]) for kept in found["prepared"]] == [
        ("it's 7", 7, 2),
        ("it's 9", 9, 3),
    ]
    assert found["prepared"][0]["prepared"] == "1970-01-01T00:00:00.000005+00:00"
    (manifest, *_) = path_of(project.settings.layout.change_log / PREPARED).iterdir()
    manifest.write_text("[1]")
    damaged = project.status()
    assert not damaged.ok
    assert any(manifest.name in problem.thing + problem.what for problem in damaged.problems)
    assert damaged.slot is not None


def test_status_shows_the_lake_even_if_the_source_is_unreachable(project: Project) -> None:
    catalog = project.setup()
    start = project.log(catalog)
    elsewhere = replace(project, settings=project.settings.model_copy(update={"source": "host=/nowhere user=u"}))
    began = time.monotonic()
    found = elsewhere.status()
    assert time.monotonic() - began < 30
    assert not found.ok
    assert found.transform_lsn == start
    assert found.slot is None
    assert [problem.thing for problem in found.problems] == ["u@/nowhere"]


def test_status_does_not_show_the_password_of_the_source(project: Project) -> None:
    settings = project.settings.model_copy(update={"source": "host=/nowhere user=u password=hunter2"})
    assert "hunter2" not in json.dumps(status(settings).to_json())


def test_status_shows_positions_and_states_of_tables(project: Project) -> None:
    catalog = project.setup()
    start = project.log(catalog)
    layout = project.settings.layout
    states, points = TableStates(layout), ConsistentPoints(layout)
    a, b = catalog.tables
    states.set(a, TableState.CATCHING_UP, start)
    states.set(b, TableState.COPYING, start)
    publish_at(points, start, {A: 3})
    found = project.status()
    assert found.tables == (TableFacts(A, TableState.STREAMING, start), TableFacts(B, TableState.COPYING))
    assert (found.transform_lsn, found.replay_lsn) == (start, start)
    assert found.lag_bytes is not None
    assert found.lag_bytes >= 0
    assert found.ok


@pytest.mark.long
def test_status_and_lake_at_do_not_import_pandas(project: Project) -> None:
    """Many pyarrow functions import pandas. In a new process this takes 0.2 s, half of the command's time."""
    settings, catalog = project.settings, project.setup()
    begin, folder = project.log(catalog), path_of(settings.layout.root)
    TableStates(settings.layout).set_all(catalog.tables, TableState.SET_ASIDE, begin, "for some reason")
    UntakenLedger(settings.layout).add([UntakenRows(1, A, 3, begin, begin, begin)])
    publish_at(ConsistentPoints(settings.layout), begin, {A: 3})
    code = """
import sys
from pgcdc_assets.cli.main import run
from pgcdc_assets.lake.lake import Lake
assert run(["status"]) == 1
at = Lake(sys.argv[1]).at()
assert Lake(sys.argv[1]).at(at.lsn).lsn == at.lsn
assert "pyarrow" in sys.modules
assert "pandas" not in sys.modules
"""
    environment = {**os.environ, "PGCDC_SOURCE": project.source.conninfo, "PGCDC_LAKE": str(folder),
                   "PGCDC_SLOT": settings.slot, "PGCDC_PUBLICATION": settings.publication}  # fmt: skip
    command = [sys.executable, "-c", code, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "public.a" in done.stdout
    assert "for some reason" in done.stdout


def test_status_reports_a_publication_without_tables_as_an_error(project: Project) -> None:
    project.setup()
    name = sql.Identifier(project.settings.publication)
    with project.source.connect() as conn:
        conn.execute(sql.SQL("ALTER PUBLICATION {} DROP TABLE a").format(name))
        assert "is no longer published" in project.problem("table public.a")
        conn.execute(sql.SQL("ALTER PUBLICATION {} DROP TABLE b").format(name))
    both = f"publication {project.settings.publication}, {project.settings.publication}_inserts"
    assert project.problem(both) == "lists no table: changes are being lost"


def test_status_does_not_wait_for_a_locked_table(project: Project) -> None:
    """PostgreSQL's own view, pg_publication_tables, waits until other sessions release their locks on published tables.
    If a table is locked, status reads the catalog tables instead of the view."""
    project.setup()
    with project.source.connect() as conn, conn.transaction():
        conn.execute("ALTER TABLE a ADD COLUMN more int")
        began = time.monotonic()
        assert project.status().problems == ()
        assert time.monotonic() - began < 30


def test_a_table_without_replica_identity_is_reported(project: Project) -> None:
    with project.source.connect() as conn:
        conn.execute("CREATE TABLE c (x int)")
    project.setup()
    assert project.status().ok
    assert "updates and deletes are not replicated" in project.problem("table public.c")


def test_a_publication_of_another_owner_need_not_list_all_tables(project: Project) -> None:
    with project.source.connect() as conn:
        conn.execute("CREATE PUBLICATION theirs FOR TABLE a")
    theirs = replace(project, settings=project.settings.model_copy(update={"publication": "theirs"}))
    catalog = theirs.setup()
    assert [table.name for table in catalog.tables] == [A]
    assert theirs.status().ok
    assert not [problem for problem in theirs.status().problems if "public.b" in problem.thing]


def test_a_replica_identity_that_was_already_missing_at_setup_causes_only_a_warning(project: Project) -> None:
    """Another owner's publication publishes updates of a table that never had a replica identity. Setup and status
    report this as a warning. A key that is dropped later is reported as an error."""
    with project.source.connect() as conn:
        conn.execute("CREATE TABLE c (x int); CREATE PUBLICATION theirs FOR TABLE a, c")
        theirs = replace(project, settings=project.settings.model_copy(update={"publication": "theirs"}))
        theirs.setup()
        assert "UPDATE and DELETE fail on the source" in theirs.problem("table public.c")
        assert theirs.status().ok
        conn.execute("ALTER TABLE a DROP CONSTRAINT a_pkey")
    assert "UPDATE and DELETE fail on the source" in theirs.problem("table public.a")
    assert not theirs.status().ok


def test_updates_that_a_publication_lacks_are_reported_even_if_the_table_has_no_replica_identity(
    project: Project,
) -> None:
    """PostgreSQL refuses a DELETE of this table, but not an UPDATE, because no publication publishes updates."""
    catalog, publication = project.setup(), project.settings.publication
    with project.source.connect() as conn:
        conn.execute("INSERT INTO a VALUES (1); ALTER TABLE a DROP CONSTRAINT a_pkey")
        conn.execute(f"ALTER PUBLICATION {publication} SET (publish = 'insert, delete')".encode())
        conn.execute("UPDATE a SET id = 2")
        save_catalog(replace(catalog, tables=tuple(read_tables(conn, [publication]))), CATALOG_FILE)
    found = [problem.what for problem in project.status().problems if problem.thing == "table public.a"]
    assert "is published without update" in found


def test_status_advises_setup_for_a_table_that_gained_a_key(project: Project) -> None:
    with project.source.connect() as conn:
        conn.execute("CREATE TABLE c (x int NOT NULL)")
        project.setup()
        conn.execute("ALTER TABLE c ADD PRIMARY KEY (x)")
    (found,) = [problem for problem in project.status().problems if problem.thing == "table public.c"]
    assert "has a usable replica identity now" in found.what
    assert found.do.startswith("run `pgcdc setup`")
    project.setup()
    assert not [problem for problem in project.status().problems if problem.thing == "table public.c"]


def test_an_unreadable_change_log_is_reported(project: Project) -> None:
    project.log(project.setup())
    for file in path_of(project.settings.layout.change_log / "_delta_log").iterdir():
        file.write_text("{")
    found = project.status()
    assert not found.ok
    assert any("change_log" in problem.thing for problem in found.problems)


def test_a_missing_privilege_of_the_role_is_reported(project: Project) -> None:
    project.setup()
    with project.source.connect() as conn:
        conn.execute("REVOKE EXECUTE ON FUNCTION pg_control_system() FROM PUBLIC")
        conn.execute("CREATE ROLE looker LOGIN")
        try:
            source = f"{project.source.conninfo} user=looker"
            settings = project.settings.model_copy(update={"source": source})
            found = status(settings)
        finally:
            conn.execute("DROP ROLE looker")
    assert [problem.thing for problem in found.problems] == ["source"]
    assert "permission denied for function pg_control_system" in found.problems[0].what


def test_status_leaves_no_session_on_the_source(project: Project) -> None:
    project.setup()
    project.status()
    sessions = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND application_name = %s"
    with connect(project.source.conninfo) as conn:
        # The server ends a session some time after the client has closed its connection.
        wait_for(lambda: conn.execute(sessions, ["pgcdc_assets/status"]).fetchone() is None, 20, "the session's end")
