"""Plays a random history without Spark: this process derives the feeds, computes net effects, and merges them into
mirrors. Only the receiver is a separate process."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.delta.log import DeltaLog
from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.feed.events import Route
from pgcdc_assets.feed.plan import Router
from pgcdc_assets.feed.schema import FeedPart
from pgcdc_assets.feed.task import Derivation, FeedTarget, derive
from pgcdc_assets.lake.netchange import net_change
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.log.receive.client import ReceiverProcess
from pgcdc_assets.log.receive.messages import ReceiverSettings
from pgcdc_assets.settings import Settings
from pgcdc_assets.source.catalog.tables import read_tables
from pgcdc_assets.source.setup.setup import setup
from pgcdc_assets.source.slot.slot import identity
from pgcdc_assets.source.stream.drain import LEAST_BYTES
from pgcdc_assets.store.local import path_of
from tests.fix_postgres import fresh_database
from tests.history.mirror import PlainMirror
from tests.history.steps import Step
from tests.history.tables import Spec
from tests.history.workload import Workload
from tests.journal import Journal
from tests.netchanges import assert_net_change
from tests.receiving import run_to

SECONDS = 180.0


@dataclass
class Derived:
    """The change log of a history, and the feeds derived from this log. The history's tables were empty at the start of
    the log."""

    journal: Journal
    layout: Layout
    log: ChangeLog
    tables: list[Table]
    parts: dict[str, FeedPart]
    """By the table's :func:`title`: the whole feed of each table that changed."""
    commits: dict[int, str]

    @classmethod
    def of(cls, journal: Journal, log: ChangeLog, publications: Sequence[str], patterns: Sequence[str] = ()) -> Derived:
        tables = list(read_tables(journal.conn, publications, patterns))
        return cls(journal, log.layout, log, tables, _derived(log, tables), journal.commits())

    @property
    def boundaries(self) -> list[Lsn]:
        """The start of the log, the ``commit_lsn`` of each transaction in the log, and the end of the log."""
        start, end = self.log.start, self.log.position()
        commits = sorted(Lsn.parse(lsn) for lsn in self.commits.values())
        return [start, *(lsn for lsn in commits if start < lsn < end), end]

    def apply(self, table: Table, boundaries: Sequence[Lsn]) -> PlainMirror:
        """Makes a new mirror of the table, and applies the table's changes in turns: each turn begins at one of
        ``boundaries`` and ends at the next boundary. Compares the mirror with the source after each turn that changed
        the mirror, and after the last turn."""
        shutil.rmtree(path_of(self.layout.mirror(table.name)), ignore_errors=True)
        mirror = PlainMirror(self.layout, self.log.identity, table, boundaries[0])
        part = self.parts.get(title(table))
        for upto in boundaries[1:]:
            changed = part is not None and mirror.apply(part, upto) is not None
            mirror.versions[upto] = mirror.mirror.version
            if changed or upto == boundaries[-1]:
                self.assert_equal(mirror, upto)
        return mirror

    def repair(self, mirror: PlainMirror, at: Lsn, touched: LsnRange, *, damaged: bool) -> None:
        """Repairs the LSN range ``touched`` in a mirror that is at LSN ``at``. ``damaged``: whether the mirror is
        damaged before the repair. The damage deletes from the mirror all rows that the range changed, and puts back the
        rows that the range deleted."""
        part = self.parts.get(title(mirror.table))
        if part is None:
            return
        if damaged:
            mirror.damage(touched)
        mirror.repair(part, touched, at, refusable=not damaged)
        self.assert_equal(mirror, at)

    def assert_net_changes(self, mirror: PlainMirror, boundaries: Sequence[Lsn]) -> None:
        """Compares net changes of the mirror with the source: the net change from each boundary to the next boundary,
        from the first boundary to the last, and from the last back to the first."""
        keys = [column.name for column in mirror.table.key_columns]
        for a, b in [*pairwise(boundaries), (boundaries[0], boundaries[-1]), (boundaries[-1], boundaries[0])]:
            before, after = (DeltaLog(mirror.mirror.path).at(mirror.versions[lsn]) for lsn in (a, b))
            change = net_change(before, after, mirror.table)
            assert_net_change(self.journal, title(mirror.table), change, a, b, self.commits, keys)

    def assert_equal(self, mirror: PlainMirror, at: Lsn) -> None:
        columns, expected = self.journal.rows_at(title(mirror.table), at, self.commits)
        found = mirror.rows(columns)
        assert found == expected, (
            f"{title(mirror.table)} at {at}: missing {list((expected - found).elements())[:3]}, "
            f"too many {list((found - expected).elements())[:3]}"
        )


@contextmanager
def received(
    server: EmbeddedServer, specs: Sequence[Spec], steps: Sequence[Step]
) -> Iterator[tuple[Derived, Workload]]:
    """Makes the tables, runs the steps, and receives all changes into a change log."""
    with (
        tempfile.TemporaryDirectory() as folder, fresh_database(server) as database, database.connect() as conn
    ):  # fmt: skip
        workload = Workload(database, specs, conn)
        workload.make()
        try:
            journal = Journal.keep(conn, *(spec.title for spec in specs))
            settings = Settings(source=database.conninfo, lake=Path(folder) / "lake",
                                slot=f"s_{database.name}"[:60], tables=("*.*", "-journal.*"))  # fmt: skip
            catalog = setup(settings, database.conninfo).catalog
            log = ChangeLog(settings.layout)
            row = conn.execute("SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = %s",
                               [settings.slot]).fetchone()  # fmt: skip
            assert row is not None
            log.create(identity(conn, settings.slot), Lsn.parse(str(row[0])), 1)
            for step in steps:
                workload.take(step)
            workload.finish(random.Random(0))
            _receive(workload, settings, catalog.publications)
            log.open()
            yield Derived.of(journal, log, catalog.publications, settings.tables), workload
        finally:
            workload.close()


def _receive(workload: Workload, settings: Settings, publications: tuple[str, ...]) -> None:
    assert settings.source is not None
    row = workload.conn.execute("SELECT pg_current_wal_insert_lsn()").fetchone()
    assert row is not None
    receiver = ReceiverProcess(ReceiverSettings(
        settings.source, str(settings.layout.root), tuple(publications), 1 << 20, 0.2,
        drain_bytes=1 if len(workload.positions) % 2 else LEAST_BYTES, messages=("*",),
    ))  # fmt: skip
    run_to(receiver, Lsn.parse(str(row[0])))


def _derived(log: ChangeLog, tables: Sequence[Table]) -> dict[str, FeedPart]:
    """The feeds of the whole log, by the table's :func:`title`. One task derives all of them."""
    span = LsnRange(log.start, log.position())
    by_name = {table.name: table for table in tables}
    router = Router.of(tables)
    places = [(shape, router.place(shape)) for shape in log.shapes(span).values()]
    segments = log.segments(span, {shape.relation_id for shape, _ in places})
    task = Derivation(
        segments=tuple(segment.file for segment in segments),
        targets={name: FeedTarget(table, log.layout.changes(name), span) for name, table in by_name.items()},
        routes={s.schema_id: Route.of(s, by_name[p.table], p.leaf) for s, p in places if p.table is not None},
    )
    for target in task.targets.values():
        path_of(target.folder).mkdir(parents=True, exist_ok=True)
    done = derive(task)
    assert done.ended == {}
    parts = {name: FeedPart(by_name[name], span, tuple(files), None) for name, files in done.files.items()}
    return {title(part.table): part for part in parts.values()}


def title(table: Table) -> str:
    """The table's name as the journal writes it."""
    return f"{table.name.schema}.{table.name.name}"
