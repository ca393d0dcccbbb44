"""A PostgreSQL server of each version, started once, and a change log that has received the changes of the workload
from this server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import pytest

from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.log.receive.client import ReceiverProcess
from pgcdc_assets.log.receive.messages import ReceiverSettings
from pgcdc_assets.source.connect.walsender import ReplicationConnection
from pgcdc_assets.source.slot.slot import identity
from pgcdc_assets.source.stream.drain import LEAST_BYTES
from tests.fix_postgres import TEST_SETTINGS, Database, fresh_database
from tests.history.derived import Derived
from tests.journal import Journal
from tests.receiving import run_to
from tests.servers import VERSIONS, new_server
from tests.versions.workload import LISTS_SINCE, TABLES, Workload, make, publish


@pytest.fixture(scope="session")
def version_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EmbeddedServer]:
    """A server of the test's version. All tests with the same version share it."""
    folder = tmp_path_factory.mktemp(f"pg{request.param}") / "server"
    with new_server(folder, request.param, settings=TEST_SETTINGS) as server:
        yield server


@dataclass
class Received:
    """A database in which the workload was executed, and the change log into which several runs of the receiver have
    received it. ``raw``: the name of a second slot, which was created before the workload and is never advanced."""

    database: Database
    journal: Journal
    log: ChangeLog
    publications: tuple[str, ...]
    raw: str
    boundaries: list[Lsn] = field(default_factory=list)

    @cached_property
    def derived(self) -> Derived:
        """The feeds of the whole log, derived without Spark."""
        return Derived.of(self.journal, self.log, self.publications)

    @property
    def version(self) -> int:
        return self.database.server.version

    def receive(self) -> None:
        """Runs the receiver up to the source's current position."""
        row = self.journal.conn.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone()
        assert row is not None
        turn = len(self.boundaries)
        receiver = ReceiverProcess(ReceiverSettings(
            self.database.conninfo, str(self.log.path.parent.parent), tuple(self.publications), 1 << 20, 0.2,
            drain_bytes=LEAST_BYTES if turn % 2 else 1, messages=("*",),
        ))  # fmt: skip
        run_to(receiver, Lsn.parse(row[0]))
        self.boundaries.append(self.log.position())


@pytest.fixture(scope="session")
def received(version_server: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Received]:
    with fresh_database(version_server) as database, database.connect() as conn:
        make(conn, version_server.version)
        publications = publish(conn, version_server.version, "p")
        journal = Journal.keep(conn, *TABLES)
        slot, raw = f"s_{database.name}", f"raw_{database.name}"
        with ReplicationConnection.open(database.conninfo) as walsender:
            walsender.create_slot(raw)
            start = walsender.create_slot(slot).consistent_point
        log = ChangeLog(Layout.of(tmp_path_factory.mktemp("lake")))
        log.create(identity(conn, slot), start, 1)
        received = Received(database, journal, log, publications, raw)
        work = Workload(database)
        for step in (work.before, work.rows, work.transactions):
            step()
            received.receive()
        if version_server.version >= LISTS_SINCE:
            work.lists()
            received.receive()
        yield received


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs each test with the oldest version of PostgreSQL. With ``--run-long``, runs it with all versions. A test with
    the marker ``versions`` is run with the versions that the marker lists."""
    if "version_server" not in metafunc.fixturenames:
        return
    marker = metafunc.definition.get_closest_marker("versions")
    chosen = marker.args if marker else VERSIONS[:1]
    long = marker.kwargs.get("long", ()) if marker else VERSIONS[1:]
    params = [pytest.param(number, id=f"pg{number}") for number in chosen]
    params += [pytest.param(number, id=f"pg{number}", marks=pytest.mark.long) for number in long]
    metafunc.parametrize("version_server", params, indirect=True, scope="session")
