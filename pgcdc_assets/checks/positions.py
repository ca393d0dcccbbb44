"""Up to which LSN changes are received, durable and applied, at which LSN syncs end, and whether applying is paused.
The model is ``pgcopydb stream sentinel get``. Reads by plain SQL and from small tables. Works while a sync runs."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import TypedDict

from pgcdc_assets.checks.facts import lowest_replayed, read_tables
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.flow import lock
from pgcdc_assets.flow.requests import operator_requests
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.project import load_catalog
from pgcdc_assets.projectsource import source_of
from pgcdc_assets.settings import Settings
from pgcdc_assets.source.connect.connection import APPLICATION, connect
from pgcdc_assets.source.slot.slot import flush_lsn

_WRITTEN = """
SELECT r.write_lsn::text FROM pg_catalog.pg_replication_slots s
JOIN pg_catalog.pg_stat_replication r ON r.pid = s.active_pid WHERE s.slot_name = %s
"""


class PositionsDocument(TypedDict):
    """What ``pgcdc positions --json`` prints."""

    source: str
    """The source's flush LSN."""
    write_lsn: str | None
    """Changes up to this LSN are received."""
    flush_lsn: str | None
    """Changes up to this LSN are durable in the change log."""
    replay_lsn: str | None
    """All followed mirrors contain the changes up to this LSN."""
    endpos: str | None
    """The LSN at which syncs end, if ``pgcdc until`` set one."""
    apply: str
    """Whether changes are applied to mirrors: ``running`` or ``paused``."""
    at_work: str | None
    """The command that writes to the lake."""


@dataclass(frozen=True)
class Positions:
    """The positions of a project. None means that a position does not exist yet."""

    source: Lsn
    """The source's flush position."""
    write: Lsn | None
    """The LSN up to which changes are received. The same as ``flush`` if no process streams."""
    flush: Lsn | None
    """``transform_lsn``: changes up to this LSN are durable in the log, and can be confirmed to the slot."""
    replay: Lsn | None
    """``replay_lsn`` of the lake: the lowest position of all followed tables."""
    endpos: Lsn | None
    """The LSN at which syncs end, at the operator's request."""
    paused: bool
    at_work: str | None
    """The command that holds the lake's lock."""

    def to_json(self) -> PositionsDocument:
        return {
            "source": str(self.source), "write_lsn": _text(self.write), "flush_lsn": _text(self.flush),
            "replay_lsn": _text(self.replay), "endpos": _text(self.endpos),
            "apply": "paused" if self.paused else "running", "at_work": self.at_work,
        }  # fmt: skip


def positions(settings: Settings) -> Positions:
    """The current positions of the project. Raises SourceUnavailable or LakeError."""
    layout, catalog = settings.layout, load_catalog(settings.catalog_file)
    with connect(source_of(settings), application_name=f"{APPLICATION}/positions") as conn:
        row = conn.execute(_WRITTEN, [settings.slot]).fetchone()
        # Replay is read before flush, and flush before the source's position, so that replay never seems to be ahead of
        # flush, and flush never ahead of the source.
        replayed = lowest_replayed(read_tables(layout, catalog)) if catalog is not None else None
        log = ChangeLog(layout)
        flushed = log.position() if log.exists else None
        source = flush_lsn(conn)
    written = Lsn.parse(row[0]) if row and row[0] else None
    told, holder = operator_requests(layout), lock.holder(layout)
    return Positions(
        source=source,
        write=max((lsn for lsn in (written, flushed) if lsn is not None), default=None),
        flush=flushed,
        replay=replayed,
        endpos=told.endpos,
        paused=told.paused,
        at_work=holder.command if holder else None,
    )


def _text(lsn: Lsn | None) -> str | None:
    return None if lsn is None else str(lsn)
