"""Decides whether a run of the sync is needed now. Works without I/O: its input is what the sensor has read of slot,
log and runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Self

from pgcdc_assets.core.formats import MALFORMED
from pgcdc_assets.core.lsn import ZERO, Lsn

FOREIGN_WAL_BYTES = 16 << 20
"""One WAL segment. If the source has this much WAL above the lake's position, a run is requested even if it is not
known whether this WAL contains a published change. The run moves the slot forward, so that the source can remove
WAL."""

_FIRST_PAUSE_SECONDS = 15.0
_LONGEST_PAUSE_SECONDS = 600.0
"""The longest pause after failed runs, in seconds. Each failure in a row doubles the first pause, up to this limit."""


@dataclass(frozen=True)
class SourceState:
    """What one tick (evaluation) of the sensor has read from source and lake. The tick receives no changes, and writes
    nothing."""

    now: float
    flush_lsn: Lsn
    """The source's flush position."""
    position: Lsn
    """The lake's position: the log's transform_lsn, or the slot's confirmed_flush_lsn if there is no log yet."""
    to_copy: int = 0
    """Published tables without a finished copy."""
    unapplied: int = 0
    """Batches in the log that a run still has to apply to the mirrors."""
    paused: bool = False
    """Whether the operator has paused applying. Then nothing is applied or copied."""
    endpos: Lsn | None = None
    """The LSN at which a sync in follow mode must end, at the operator's request."""
    published: bool | None = None
    """Whether the WAL above the lake's position contains a published change. None if this is not known."""
    catalog: str = ""
    """A digest of the source's catalog: of the tables that the settings select, of the published tables, and of their
    partitions and publications. It is read only if the source has written WAL in which no published change was found,
    because this WAL may come from a CREATE TABLE. Otherwise it is empty."""
    catalog_changed: bool = False
    """Whether the digest differs from the digest that an earlier tick stored. True also if no tick has stored one,
    because a table may have been created after the last run read the catalog."""


@dataclass(frozen=True)
class Runs:
    """The live Dagster runs, and how the last runs ended."""

    holder: str | None = None
    """The command that holds the lake's lock."""
    under_way: Sequence[str] = ()
    """Ids of runs that are queued, starting or running."""
    failures: int = 0
    """The number of sync runs that failed in a row."""
    succeeded: bool = True
    """Whether the sync run that ended last was successful. True if no run has ended."""
    why: str = "see the newest run"
    """Why the last of these runs failed, if the lake has recorded the reason."""
    last_ended: float = 0.0


@dataclass(frozen=True)
class Cursor:
    """What a tick of the sensor stores for the next tick."""

    position: Lsn = ZERO
    since: float = 0.0
    """The time at which the lake's current position was first seen."""
    empty_to: Lsn = ZERO
    """When the slot was last checked, it held no published change up to this LSN."""
    catalog: str = ""
    """The digest of the source's catalog (:attr:`SourceState.catalog`) when a tick last read it."""
    told: float = 0.0
    """The time at which an observation of the slot was last recorded."""
    fresh: float = 0.0
    """The time at which a tick last recorded that the newest consistent point is still current."""
    health: str = ""
    """A digest of the check results that were last recorded. The results are recorded again when the digest changes."""

    @classmethod
    def parse(cls, text: str | None) -> Self:
        try:
            data = json.loads(text or "{}")
            lsns = Lsn(int(data["position"])), Lsn(int(data["empty_to"]))
            times = float(data["since"]), float(data["told"]), float(data["fresh"])
            return cls(lsns[0], times[0], lsns[1], str(data["catalog"]), times[1], times[2], str(data["health"]))
        except MALFORMED:
            return cls()

    def __str__(self) -> str:
        return json.dumps(asdict(self))

    def seen(self, state: SourceState) -> Self:
        empty_to = state.flush_lsn if state.published is False else self.empty_to
        moved = not self.since or state.position != self.position
        since = state.now if moved else self.since
        catalog = state.catalog or self.catalog
        return replace(self, position=state.position, since=since, empty_to=empty_to, catalog=catalog)


@dataclass(frozen=True)
class Decision:
    wanted: bool
    why: str
    current: bool = False
    """Whether it is known that the mirrors contain everything that the source has published."""


def busy(runs: Runs, now: float) -> str | None:
    """The reason why no run may be requested now, even if there is work. None if a run may be requested."""
    if runs.holder is not None:
        return f"`pgcdc {runs.holder}` is running"
    if runs.under_way:
        return f"run {runs.under_way[0][:8]} is queued or starting"
    if runs.failures:
        pause = min(_FIRST_PAUSE_SECONDS * 2 ** (runs.failures - 1), _LONGEST_PAUSE_SECONDS)
        left = runs.last_ended + pause - now
        if left > 0:
            return f"failed runs in a row: {runs.failures} ({runs.why}); next try in {left:.0f} s"
    return None


def decide(state: SourceState, cursor: Cursor, range_seconds: float) -> Decision:
    """Requests a run if there are changes to apply or tables to copy, or if the source is 16 MiB of WAL ahead. If it is
    not known whether the WAL contains a published change, requests a run after the lake has not advanced for
    ``range_seconds``."""
    if state.unapplied and not state.paused:
        return Decision(True, f"batches of the log that are not applied yet: {state.unapplied}")
    if state.endpos is not None and state.position >= state.endpos:
        return Decision(
            False, f"syncs end at {state.endpos}, which the lake has reached; `pgcdc until --clear` removes this limit"
        )
    if state.to_copy and not state.paused:
        return Decision(True, f"tables to copy: {state.to_copy}")
    ahead = state.flush_lsn - state.position
    if ahead <= 0:
        why = f"the source has no WAL above the lake's position, {state.position}"
        return Decision(False, why, current=not state.unapplied)
    if state.published:
        return Decision(True, f"changes wait in the slot: the lake is {ahead} bytes of WAL behind the source")
    if state.catalog_changed:
        return Decision(True, "tables or publications of the source were created, changed or dropped")
    if ahead >= FOREIGN_WAL_BYTES:
        return Decision(True, f"the source is {ahead} bytes of WAL ahead of the lake")
    if state.published is None and state.now - cursor.since >= range_seconds:
        return Decision(
            True, f"the source has written WAL, and the lake has not advanced for {state.now - cursor.since:.0f} s"
        )
    current = state.published is False and not state.unapplied
    return Decision(
        False,
        f"pgcdc knows of no change to a published table in the last {ahead} bytes of the source's WAL",
        current=current,
    )
