"""Snapshot copies: parallel Spark tasks run PostgreSQL's COPY, and write files of the mirrors. Then each table gets one
commit, which adds the rows and records the snapshot's LSN. So a mirror never holds a part of a copy. If the mirror
exists, the commit replaces its rows, and also its columns if they have changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.core.faultpoints import FaultPoint, passed
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.delta.checkpoint import retention_properties
from pgcdc_assets.delta.commit import commit_files
from pgcdc_assets.delta.datafile import FileReport
from pgcdc_assets.delta.definition import replace_table
from pgcdc_assets.delta.mapping import HIGHEST, physical
from pgcdc_assets.errors import CopyOutdated, LakeError
from pgcdc_assets.failures import again_after_lost_races
from pgcdc_assets.feed.table import moved_away
from pgcdc_assets.mirror.delta.copytask import (
    CopyPart,
    CopyTarget,
    CopyTask,
    WrittenPart,
    bytes_read,
    copy_failure,
    copy_parts,
    rows_written,
)
from pgcdc_assets.mirror.delta.mirror import IDENTITY, SOURCE_OID, SOURCE_TABLE, Mirror, Mirrors, create_mirror
from pgcdc_assets.mirror.delta.mirrorschema import Commented, mirror_columns, new_columns
from pgcdc_assets.mirror.target import CopyCount, CopyReport, Failures
from pgcdc_assets.source.connect.connection import APPLICATION, connect
from pgcdc_assets.source.connect.route import SourceRoute
from pgcdc_assets.source.snapshot.pieces import Piece, pieces
from pgcdc_assets.spark.tasks import TaskSum, beside, cores, run_tasks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from pgcdc_assets.source.connect.connection import SourceConnection
    from pgcdc_assets.source.snapshot.export import Snapshot

LARGEST_PIECE: Final = 128 << 20
SMALLEST_PIECE: Final = 4 << 20
"""The smallest piece of a table, in bytes on the source's disk. For a smaller piece, a connection and a file would cost
more time than the rows."""
PIECES_PER_CORE: Final = 4
"""How many pieces each core copies, if there is enough data. The more pieces, the shorter is the time at the end in
which some cores have no piece left."""
TABLES_PER_JOB: Final = 10
"""Up to this many small tables share a job, and so the cost of a connection. They are committed after the job."""
JOBS: Final = 2
"""The least number of Spark jobs that run at a time. When the last tasks of a job leave cores idle, the next job uses
these cores."""


def copy_tables(
    session: SparkSession, conninfo: str, tables: Sequence[Table], mirrors: Mirrors, snapshot: Snapshot,
    on_table: Callable[[CopyReport], None], retention: timedelta = timedelta(0), count: CopyCount | None = None,
) -> Failures:  # fmt: skip
    """Copy the tables as the snapshot shows them. ``on_table`` is called for each table after its commit, in the
    calling thread.

    A failure of one table does not prevent the commits of the other tables. Returns which tables failed, and why:
    CopyOutdated or CopyBlocked if another session altered or locked the table during the copy, IdentityMismatch if the
    folder for the mirror has a Delta table of another owner. ``retention``: how long consistent points must stay
    readable, for the properties of new mirrors. ``count`` is updated while the tasks run.
    """
    copier = _Copier(session, conninfo, mirrors, snapshot, retention)
    jobs, failures = copier.jobs(tables)
    if count is not None:
        count.bytes, count.read = sum(task.bytes_estimate for job in jobs for task in job), copier.read
    for reports, failed in _in_parallel(copier.copy, jobs, max(JOBS, cores(session))):
        failures |= failed
        for report in reports:
            on_table(report)
    return failures


_Outcome = tuple[list[CopyReport], Failures]


def _in_parallel(
    copy: Callable[[list[CopyTask]], _Outcome], jobs: Sequence[list[CopyTask]], at_a_time: int
) -> Iterator[_Outcome]:
    """Run ``at_a_time`` jobs together; yields the outcome of each job when the job ends."""
    pool = ThreadPoolExecutor(at_a_time, thread_name_prefix="copy")
    waiting = iter(jobs)
    running: set[Future[_Outcome]] = set()
    try:
        while True:
            running |= {pool.submit(copy, job) for job in islice(waiting, at_a_time - len(running))}
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()
    finally:
        # After a failure, a later copy may write to the same mirrors. So wait until all jobs of this copy have ended.
        pool.shutdown(wait=True, cancel_futures=True)


class _Copier:
    def __init__(
        self, session: SparkSession, conninfo: str, mirrors: Mirrors, snapshot: Snapshot, retention: timedelta
    ) -> None:
        self._session = session
        self._conninfo = conninfo
        self._mirrors = mirrors
        self._snapshot = snapshot
        self._retention = retention
        self._route = SourceRoute(conninfo) if beside(session) else SourceRoute.of(snapshot.holder, conninfo)
        self._rows, self._bytes = TaskSum(session, rows_written), TaskSum(session, bytes_read)

    def read(self) -> tuple[int, int]:
        """How many rows the tasks have read, and how many bytes of the tables on the source's disk. A task that Spark
        repeats may be counted twice."""
        return self._rows.value, self._bytes.value

    # Planning -------------------------------------------------------------------------------------

    def jobs(self, tables: Sequence[Table]) -> tuple[list[list[CopyTask]], Failures]:
        """Plan the Spark jobs, largest tables first. A large table has its own job, with a task for each piece. Small
        tables share a job of one task. Also returns the tables that cannot be copied."""
        with connect(self._conninfo, application_name=f"{APPLICATION}/snapshot") as conn:
            cut, failures = self._cut(conn, tables)
        sizes = {name: sum(piece.bytes_estimate for piece in found) for name, found in cut.items()}
        ordered = sorted((table for table in tables if table.name in cut), key=lambda table: -sizes[table.name])
        large = [table for table in ordered if len(cut[table.name]) > 1]
        jobs = [[self._task([(table, (piece,))]) for piece in cut[table.name]] for table in large]
        small = [(table, tuple(cut[table.name])) for table in ordered if len(cut[table.name]) <= 1]
        return jobs + [[self._task(share)] for share in _packed(small, sizes)], failures

    def _cut(self, conn: SourceConnection, tables: Sequence[Table]) -> tuple[dict[TableName, list[Piece]], Failures]:
        whole, failures = _pieces(conn, tables, LARGEST_PIECE)
        total = sum(piece.bytes_estimate for found in whole.values() for piece in found)
        size = max(SMALLEST_PIECE, min(LARGEST_PIECE, total // (PIECES_PER_CORE * cores(self._session))))
        if size == LARGEST_PIECE:
            return whole, failures
        larger = {name for name, found in whole.items() if any(piece.bytes_estimate > size for piece in found)}
        smaller, more = _pieces(conn, [table for table in tables if table.name in larger], size)
        return {name: found for name, found in (whole | smaller).items() if name not in more}, failures | more

    def _task(self, parts: Sequence[CopyPart]) -> CopyTask:
        return CopyTask(self._route, self._snapshot.name, tuple(parts))

    # One job --------------------------------------------------------------------------------------

    def copy(self, job: list[CopyTask]) -> _Outcome:
        started = time.monotonic()
        targets, failures = self._targets({table.name: table for task in job for table, _ in task.parts})
        found = run_tasks(self._session, copy_parts, _ready(job, targets), [self._rows, self._bytes])
        written = [part for parts in found for part in parts]
        reports: list[CopyReport] = []
        for name, target in targets.items():
            with _contained(name, failures):
                files = _sound([one for one in written if one.table == name])
                passed(FaultPoint.COPY_COMMITTING)
                version = again_after_lost_races(partial(self._commit, target, files))
                passed(FaultPoint.COPY_COMMITTED)
                rows, size = sum(file.rows for file in files), sum(file.size for file in files)
                point, seconds = self._snapshot.consistent_point, time.monotonic() - started
                reports.append(CopyReport(name, point, rows, size, len(files), seconds, version))
        return reports, failures

    def _targets(self, tables: dict[TableName, Table]) -> tuple[dict[TableName, CopyTarget], Failures]:
        targets: dict[TableName, CopyTarget] = {}
        failures: Failures = {}
        for name, table in tables.items():
            with _contained(name, failures):
                targets[name] = self._target(table)
        return targets, failures

    def _target(self, table: Table) -> CopyTarget:
        """The mirror's folder and its columns after the copy. Creates the mirror if there is none."""
        schema = mirror_columns(table)
        mirror = self._opened(table.name)
        point = int(self._snapshot.consistent_point)
        if mirror.exists and not mirror.holds(schema):
            highest = int(mirror.existing.configuration.get(HIGHEST, 0))
            columns = new_columns(schema, mapped=mirror.mapped, highest=highest)
            return CopyTarget(table, mirror.path, physical(schema, columns.schema), point, columns)
        if not mirror.exists:
            properties = {IDENTITY: mirror.identity.app_id(), SOURCE_TABLE: str(table.name), SOURCE_OID: str(table.oid),
                          **retention_properties(self._retention)}  # fmt: skip
            create_mirror(mirror.path, schema, properties, self._mirrors.layout.root)
            passed(FaultPoint.MIRROR_MADE)
            mirror = mirror.again()
        return CopyTarget(table, mirror.path, mirror.physical(schema), point)

    def _opened(self, name: TableName) -> Mirror:
        """The mirror of this name. If its Delta log cannot be read, the mirror is moved to another folder, so that the
        copy creates a new one."""
        layout = self._mirrors.layout
        try:
            return self._mirrors.open(name)
        except (LakeError, pa.ArrowException, ValueError):
            self._mirrors.forget(name)
            moved_away(layout, layout.mirror(name))
            return self._mirrors.open(name)

    def _commit(self, target: CopyTarget, files: Sequence[FileReport]) -> int:
        mirror = self._mirrors.open(target.table.name)
        delta = mirror.existing
        position = {mirror.snapshot_app_id: target.commit_lsn}
        commented = Commented.of(delta, target.table, target.columns)
        owner = {SOURCE_OID: str(target.table.oid)}
        if target.columns is None and commented.held_by(delta) and mirror.oid == target.table.oid:
            return commit_files(delta, files, "overwrite", position)
        if (held := mirror.snapshot_lsn) is not None and held >= target.commit_lsn:
            raise LakeError(f"already contains a copy as of {held}, so no earlier copy is written",
                            thing=f"mirror {mirror.name}", lsn=Lsn(target.commit_lsn))  # fmt: skip
        return replace_table(delta, commented.columns, files, position, {**commented.properties, **owner},
                             description=commented.description)  # fmt: skip


@contextmanager
def _contained(name: TableName, failures: Failures) -> Iterator[None]:
    """Adds an error to ``failures`` if it concerns only this table's copy. Raises all other errors."""
    try:
        yield
    except Exception as error:
        if (failure := copy_failure(name, error)) is None:
            raise
        failures[name] = failure


def _pieces(
    conn: SourceConnection, tables: Sequence[Table], size: int
) -> tuple[dict[TableName, list[Piece]], Failures]:
    found: dict[TableName, list[Piece]] = {}
    gone: Failures = {}
    for table in tables:
        try:
            found[table.name] = pieces(conn, table, size)
        except CopyOutdated as error:
            gone[table.name] = error
    return found, gone


def _packed(small: Sequence[CopyPart], sizes: dict[TableName, int]) -> Iterator[list[CopyPart]]:
    """Group small tables until a group has about the size of the smallest piece. A group has at most TABLES_PER_JOB
    tables, because their commits are made one after another."""
    share: list[CopyPart] = []
    size = 0
    for table, cut in small:
        share.append((table, cut))
        size += sizes[table.name]
        if size >= SMALLEST_PIECE or len(share) == TABLES_PER_JOB:
            yield share
            share, size = [], 0
    if share:
        yield share


def _ready(job: Sequence[CopyTask], targets: dict[TableName, CopyTarget]) -> list[CopyTask]:
    ready: list[CopyTask] = []
    for task in job:
        parts = tuple(part for part in task.parts if part[0].name in targets)
        if parts:
            ready.append(replace(task, parts=parts, targets={table.name: targets[table.name] for table, _ in parts}))
    return ready


def _sound(written: Sequence[WrittenPart]) -> list[FileReport]:
    for one in written:
        if one.error is not None:
            raise one.error
    return [one.file for one in written if one.file is not None]
