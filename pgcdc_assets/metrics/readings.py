"""What a scrape reads. Source and lake (the two parts) are read at the same time, each in its own thread. If a part
does not answer, its metrics are absent, and the other part is still reported."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain, islice
from typing import Any, Final, Generic, TypeVar

import psycopg

from pgcdc_assets.checks.positions import Pending, pending
from pgcdc_assets.checks.report import Proof, read_proofs
from pgcdc_assets.checks.status import LIMITS, Status, reachable, refused, status
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.delta.log import DeltaLog
from pgcdc_assets.errors import LakeError, PgcdcError, SettingsError, StoreFailed
from pgcdc_assets.flow.meter import RunCounts, read_counts
from pgcdc_assets.flow.requests import operator_requests
from pgcdc_assets.log.extent import complete_to
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.points.points import ConsistentPoints, Point
from pgcdc_assets.project import load_catalog
from pgcdc_assets.projectsource import refuse_other_identity
from pgcdc_assets.settings import Settings
from pgcdc_assets.source.connect.connection import APPLICATION, connect
from pgcdc_assets.source.connect.failures import of_exception
from pgcdc_assets.source.slot.slot import SlotStatus, flush_lsn, identity, slot_status

WAIT_SECONDS: Final = 8.0
"""How long a scrape waits for a part. Prometheus gives up after ten seconds by default."""
FRESH_SECONDS: Final = 3.0
"""A reading that is younger than this is used again, so that frequent probes and scrapes do not load the source."""
STALE_SECONDS: Final = 60.0
"""If reading a part takes longer than WAIT_SECONDS, the last reading is shown, up to this age."""
SIZED: Final = 2
"""A reading determines the sizes of at most this many mirrors. In an object store, each size takes several requests."""
_LIMIT = "SELECT nullif(pg_size_bytes(current_setting('max_slot_wal_keep_size')), -1)"

_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class SourceReading:
    """The source and its slot at one moment."""

    flush_lsn: Lsn
    """The end of the source's durable WAL."""
    slot: SlotStatus | None
    wal_limit_bytes: int | None = None
    """max_slot_wal_keep_size; None if there is no limit."""


@dataclass(frozen=True)
class LakeReading:
    """The lake at one moment, and what ``pgcdc status`` reports."""

    status: Status
    answers: bool
    """Whether the lake could be reached, and is the project's own."""
    log: Lsn | None = None
    """``transform_lsn``; None without a change log."""
    complete: Lsn | None = None
    """The LSN up to which the log contains every transaction. It is ``transform_lsn``, or higher if the WAL above
    ``transform_lsn`` contains no published change."""
    log_bytes: int | None = None
    point: Point | None = None
    pending: dict[TableName, Pending] = field(default_factory=dict)
    counts: RunCounts | None = None
    proofs: dict[TableName, Proof] = field(default_factory=dict)
    paused: bool = False
    """Whether the operator has paused apply."""
    alive: datetime | None = None
    """The last time at which a run wrote to the log, published a point, or recorded its counts."""
    mirror_bytes: dict[TableName, int] = field(default_factory=dict)
    """Size of the data files of the mirrors that were read."""


def read_source(settings: Settings) -> SourceReading:
    """Raises a PgcdcError if the source cannot be reached or is not the project's own."""
    with connect(reachable(settings), application_name=f"{APPLICATION}/metrics", **LIMITS) as conn:
        refuse_other_identity(settings, identity(conn, settings.slot))
        flushed, slot = flush_lsn(conn), slot_status(conn, settings.slot)
        [(limit,)] = conn.execute(_LIMIT)
        return SourceReading(flushed, slot, limit)


class LakeReader:
    """Reads the lake at each call. Remembers the change log, so that each file of the log is read at most once. Also
    remembers the sizes of mirrors. A call reads the sizes of a few mirrors whose version has changed, beginning with
    the mirrors that were read longest ago."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._log = ChangeLog(settings.layout)
        self._points = ConsistentPoints(settings.layout)
        self._sizes: dict[TableName, tuple[int, int]] = {}
        """The version and the size of each mirror that was read, in the order of reading."""

    def __call__(self) -> LakeReading:
        settings, layout = self._settings, self._settings.layout
        try:
            found = status(settings, thorough=False)
        except (SettingsError, StoreFailed) as error:
            return LakeReading(refused(error), answers=False)
        if not self._log.exists:
            return LakeReading(found, answers=True)
        point, segments, catalog = self._points.newest(), self._log.all_segments(), load_catalog(settings.catalog_file)
        counts, position = read_counts(layout), self._log.position()
        signs = [segment.written for segment in segments]
        signs += [time for time in (point and point.at, counts and counts.written) if time]
        return LakeReading(
            status=found,
            answers=True,
            log=position,
            complete=complete_to(layout, position),
            log_bytes=sum(segment.size for segment in segments),
            point=point,
            pending=pending(self._log, catalog, found.tables) if catalog is not None else {},
            counts=counts,
            proofs=read_proofs(layout),
            paused=operator_requests(layout).paused,
            alive=max(signs, default=None),
            mirror_bytes=self._mirror_bytes(point.tables) if point is not None else {},
        )

    def _mirror_bytes(self, versions: Mapping[TableName, int]) -> dict[TableName, int]:
        sizes = self._sizes
        new = (name for name in versions if name not in sizes)
        changed = (name for name, (version, _) in list(sizes.items()) if versions.get(name, version) != version)
        for name in islice(chain(new, changed), SIZED):
            _, before = sizes.pop(name, (0, 0))
            with suppress(LakeError):
                files = DeltaLog(self._settings.layout.mirror(name)).at(versions[name]).files
                before = sum(file.size for file in files)
            sizes[name] = versions[name], before
        return {name: sizes[name][1] for name in versions if name in sizes}


@dataclass(frozen=True)
class _Read(Generic[T]):
    value: T | None
    why: str
    began: float


class Part(Generic[T]):
    """Source or lake, which is read in a separate thread. While a reading hangs, no other reading is started."""

    def __init__(self, name: str, read: Callable[[], T]) -> None:
        self.name = name
        self._read = read
        self._lock = threading.Lock()
        self._newest: _Read[T] | None = None
        self._ended: threading.Event | None = None
        """Set when the reading in progress ends; None if no reading is in progress."""
        self.why = ""
        """Why the last :meth:`value` was None."""

    def begin(self) -> None:
        """Begin a reading, unless the newest reading is younger than FRESH_SECONDS or a reading is in progress."""
        with self._lock:
            newest = self._newest
            if self._ended is None and (newest is None or time.monotonic() - newest.began >= FRESH_SECONDS):
                self._ended = threading.Event()
                threading.Thread(target=self._run, args=(self._ended,), name=f"read-{self.name}", daemon=True).start()

    def value(self, deadline: float) -> T | None:
        """The newest reading. Waits for the reading in progress until ``deadline``. None if the part cannot be read."""
        ended = self._ended
        if ended is not None:
            ended.wait(max(0.0, deadline - time.monotonic()))
        newest = self._newest
        if newest is None or time.monotonic() - newest.began > STALE_SECONDS:
            self.why = "does not answer in time"
            return None
        self.why = newest.why
        return newest.value

    @property
    def age(self) -> float | None:
        """Seconds since the newest reading began."""
        return None if self._newest is None else time.monotonic() - self._newest.began

    def _run(self, ended: threading.Event) -> None:
        began, value, why = time.monotonic(), None, ""
        try:
            value = self._read()
        except PgcdcError as error:
            why = str(error)
        except psycopg.Error as error:
            why = str(of_exception(error).typed(self.name))
        except Exception as error:  # noqa: BLE001  (the other part and later readings must still work)
            # The text is left out, because it may quote values.
            why = f"cannot be read: {type(error).__name__}"
            _log.warning("%s %s", self.name, why)
        with self._lock:
            self._newest, self._ended = _Read(value, why, began), None
        ended.set()


class Readings:
    """The two parts, source and lake."""

    def __init__(self, settings: Settings) -> None:
        self.source = Part("source", lambda: read_source(settings))
        self.lake = Part("lake", LakeReader(settings))

    def take(self, seconds: float = WAIT_SECONDS) -> tuple[SourceReading | None, LakeReading | None]:
        """Read both parts, for at most this long. A part that cannot be read is None."""
        parts: tuple[Part[Any], ...] = (self.source, self.lake)
        for part in parts:
            part.begin()
        deadline = time.monotonic() + seconds
        return self.source.value(deadline), self.lake.value(deadline)


def now() -> datetime:
    return datetime.now(UTC)
