"""Feed files that are derived while their transaction is in progress, from what the receiver has spooled of it.

The commit of the rows is not known then. A mark of the same size stands in its place: a random number in the columns
``_pgcdc_commit_lsn`` and ``_pgcdc_commit_ts``, and in what the file says of itself. These columns are not compressed,
and each has one value, so the mark stands in a file some dozen times, however many rows there are. Once the transaction
has committed, and nothing of the segment was rolled back, the commit is written over the marks and the file goes into
the feed. In all other cases the segment is derived as any other: early files are never needed, and nobody reads them
before.
"""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from pgcdc_assets.core.faultpoints import FaultPoint, passed
from pgcdc_assets.core.location import Location
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.ranges import LsnRange
from pgcdc_assets.errors import LakeError
from pgcdc_assets.feed.events import Route
from pgcdc_assets.feed.evolve import alignment, evolved
from pgcdc_assets.feed.file import feed_file
from pgcdc_assets.feed.routing import Router
from pgcdc_assets.feed.schema import COMMIT_LSN, COMMIT_TS, FeedFile
from pgcdc_assets.feed.task import Derivation, Derived, FeedTarget, derive
from pgcdc_assets.log.latefacts import LateFacts
from pgcdc_assets.log.reader import Segment
from pgcdc_assets.log.segment import SegmentFile
from pgcdc_assets.protocol.shape import Shape
from pgcdc_assets.spark.tasks import run_tasks
from pgcdc_assets.store import storage

_DIGITS = 19
"""Of a commit_lsn's mark, as text: as many as the largest LSN has, which is written to the right of blanks."""


@dataclass(frozen=True)
class Mark:
    """What stands in the place of a commit. No value of a user's is likely to be the same number."""

    commit_lsn: int
    commit_ts: int

    @classmethod
    def new(cls) -> Mark:
        lsn = 10 ** (_DIGITS - 1) + secrets.randbelow(8 * 10 ** (_DIGITS - 1))
        # In a year from 6723 to 8307: statistics hold it as a date.
        return cls(lsn, 150_000_000_000_000_000 + secrets.randbelow(50_000_000_000_000_000))

    def changes(self, commit_lsn: int, commit_ts: int) -> dict[bytes, bytes]:
        """What is to be written over what."""
        return {
            self.commit_lsn.to_bytes(8, "little"): commit_lsn.to_bytes(8, "little"),
            self.commit_ts.to_bytes(8, "little", signed=True): commit_ts.to_bytes(8, "little", signed=True),
            str(self.commit_lsn).encode(): str(commit_lsn).rjust(_DIGITS).encode(),
        }


@dataclass(frozen=True)
class EarlySegment:
    """A segment of a transaction in progress, and how its rows are read."""

    xid: int
    draft: str
    """Where it lies now."""
    name: str
    """The name that it is going to have in the log."""
    shapes: Mapping[int, Shape]
    """By provisional schema id, as far as the catalog shows them before the commit."""


@dataclass
class _Early:
    """One segment that is derived early."""

    xid: int
    mark: Mark
    folder: Location
    schema_ids: Mapping[int, int]
    routes: Mapping[int, Route]
    future: Future[list[Derived]] = field(default_factory=Future)
    commit_lsn: int | None = None
    """None while the transaction is in progress."""


class EarlyFeeds:
    """The early files of one run. ``folder`` is one of its own, which nobody else writes to."""

    def __init__(self, session: Callable[[], SparkSession], folder: Location) -> None:
        self._session = session
        self._folder = folder
        self._early: dict[str, _Early] = {}
        # One at a time: the turns of other transactions want the cores, too.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="early-feeds")

    def spooled(self, segment: EarlySegment, router: Router) -> None:
        """Derive a segment, unless something about its tables has to wait for the commit."""
        schema_ids = {provisional: shape.schema_id for provisional, shape in segment.shapes.items()}
        routes = _routes(segment.shapes, router)
        if not routes:
            return
        mark, folder = Mark.new(), self._folder / uuid.uuid4().hex
        span = LsnRange(Lsn(mark.commit_lsn), Lsn(mark.commit_lsn + 1))
        file = SegmentFile(Location(segment.draft), LateFacts(mark.commit_lsn, mark.commit_ts, (), schema_ids))
        targets = {route.table.name: FeedTarget(route.table, folder, span) for route in routes.values()}
        task = Derivation((file,), targets, routes, provisional=True)
        early = _Early(segment.xid, mark, folder, schema_ids, routes)
        early.future = self._pool.submit(lambda: run_tasks(self._session(), derive, [task]))
        self._early[segment.name] = early

    def ended(self, xid: int | None, commit_lsn: int | None) -> None:
        """The transaction has committed there, or was rolled back; without xid, all that are open come again."""
        for name, early in list(self._early.items()):
            if xid is None or early.xid == xid:
                if commit_lsn is None:
                    self._discard(self._early.pop(name))
                else:
                    early.commit_lsn = commit_lsn

    def passed(self, lsn: Lsn) -> None:
        """All tables have taken what commits below: what was not taken until now never is, for it was rolled back to a
        savepoint, or its table waits for a copy."""
        for name, early in list(self._early.items()):
            if early.commit_lsn is not None and early.commit_lsn < lsn:
                self._discard(self._early.pop(name))

    def take(self, segment: Segment, turn: Derivation) -> Derived | None:
        """What was derived of a segment of the log, as files of the feeds; None if it has to be derived now.

        ``turn`` is how this turn derives.
        """
        early, late = self._early.pop(segment.path.name, None), segment.late
        if early is None or late is None:
            return None
        ids = set(late.schema_ids.values())
        fits = (
            early.future.done()
            and not late.aborted
            and dict(late.schema_ids) == early.schema_ids
            and {schema_id: route for schema_id, route in turn.routes.items() if schema_id in ids} == early.routes
            and not ids & turn.refused.keys()
            and all(_wants(turn.targets.get(route.table.name), late.commit_lsn) for route in early.routes.values())
        )
        derived = _result(early) if fits else None
        if derived is None or derived.set_aside or not _there(early, derived):
            self._discard(early)
            return None
        changes = early.mark.changes(late.commit_lsn, late.commit_ts)
        files = {
            name: [_landed(early.folder, file, turn.targets[name].folder, changes, late) for file in files]
            for name, files in derived.files.items()
        }
        passed(FaultPoint.EARLY_LANDED)
        storage.delete_folder(early.folder)
        return replace(derived, files=files)

    def close(self) -> None:
        """Leave nothing behind. A task that is under way is not waited for: what it makes goes once it is done."""
        self.ended(None, None)
        self._pool.shutdown(wait=False, cancel_futures=True)
        storage.delete_folder(self._folder)

    def _discard(self, early: _Early) -> None:
        early.future.cancel()
        early.future.add_done_callback(lambda done: storage.delete_folder(early.folder))


def _routes(shapes: Mapping[int, Shape], router: Router) -> dict[int, Route]:
    """By schema id; none at all if a row might show a table to be changed."""
    found: dict[int, Route] = {}
    for shape in shapes.values():
        place = router.place(shape)
        if place.refused:
            return {}
        if place.table is None:
            continue
        table = router.names[place.table]
        if table.multiset or evolved(table, shape, None, past=False) != table:
            return {}
        found[shape.schema_id] = Route.of(shape, table, place.leaf, alignment(table, shape, None))
    return found


def _wants(target: FeedTarget | None, commit_lsn: int) -> bool:
    return target is not None and target.buckets == 1 and target.span.holds_commit(commit_lsn)


def _result(early: _Early) -> Derived | None:
    if early.future.cancelled() or early.future.exception() is not None:
        # Deriving the segment of the log says what is wrong, if it still is.
        return None
    return early.future.result()[0]


def _there(early: _Early, derived: Derived) -> bool:
    """Whether the files are still there: a maintenance clears what lies beside the tables."""
    names = [file.name for files in derived.files.values() for file in files]
    return all(storage.head(early.folder / name) is not None for name in names)


def _landed(
    folder: Location, file: FeedFile, to: Location, changes: Mapping[bytes, bytes], late: LateFacts
) -> FeedFile:
    """The file with its commit, in the feed's folder."""
    draft, path = storage.draft(folder / file.name), to / file.name
    draft.patch(changes)
    storage.put(draft, path)
    _check(path, late)
    return feed_file(path, file.size)


def _check(path: Location, late: LateFacts) -> None:
    """Each row has the commit, and nothing else."""
    rows = pq.read_table(storage.open_file(path), columns=[COMMIT_LSN, COMMIT_TS], partitioning=None)
    found = {*pc.unique(rows[COMMIT_LSN]).to_pylist(), *pc.unique(rows[COMMIT_TS].cast("int64")).to_pylist()}
    if found != {late.commit_lsn, late.commit_ts}:
        raise LakeError("does not have its commit in all rows", thing=str(path), lsn=Lsn(late.commit_lsn))
