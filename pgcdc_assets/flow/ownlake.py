"""Makes sure that a project writes only to its own lake. A run with another lake would copy all tables there, and
confirm to the slot the changes that it receives. The project's own lake would never get these changes. So every command
first compares the id of the lake's change log with the id that the project has recorded."""

from __future__ import annotations

from pgcdc_assets.core.layout import Layout, Location
from pgcdc_assets.errors import PgcdcError, StoreFailed, WrongLake, WrongSource
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.project import ProjectNote, change_note, load_note
from pgcdc_assets.settings import Settings
from pgcdc_assets.source.connect.failures import COPY_ANEW
from pgcdc_assets.source.slot.slot import SlotStatus


def refuse_other_lake(settings: Settings, *, may_be_gone: bool = False) -> None:
    """Raise WrongLake if the lake of the settings is not the lake that the project has recorded, or StoreFailed if it
    cannot be reached. A lake that was moved is accepted: it contains the project's change log, and the recorded
    location no longer does. ``may_be_gone``: also accept the recorded location if it has lost its change log or cannot
    be reached."""
    note, layout = load_note(settings.state), settings.layout
    if note.log is None:
        return
    try:
        found = log_id(layout)
    except StoreFailed:
        if not (may_be_gone and note.is_at(layout.root)):
            raise
        return
    except (PgcdcError, OSError, ValueError):
        # The operation that opens the log reports this error.
        return
    at_home = note.is_at(layout.root)
    if found == note.log:
        if not at_home and _holds(note):
            raise WrongLake(
                f"is a copy of this project's lake, which is {note.lake}", thing=f"lake {layout.root}",
                do=f"{_set(note)}; or, to continue with the copy, rename the original's folder",
            )  # fmt: skip
    elif not at_home:
        what = "holds the change log of another project" if found else "has no change log"
        raise WrongLake(
            f"{what}, and the lake of this project is {note.lake}", thing=f"lake {layout.root}",
            do=f"{_set(note)}; if the lake was moved, move its change log too; for a new lake, {COPY_ANEW}",
        )  # fmt: skip
    elif found:
        raise WrongLake(
            "holds the change log of another project", thing=f"lake {layout.root}",
            do="move that lake away, and put the lake of this project back",
        )  # fmt: skip
    elif not may_be_gone:
        raise WrongLake(
            "has lost the change log that this project made there", thing=f"lake {layout.root}",
            do="put the log back, or mount its disk; if the lake was moved, set `lake` to its new place; "
               f"if the log is lost, {COPY_ANEW}",
        )  # fmt: skip


def refuse_other_slot(settings: Settings) -> None:
    """Raise WrongSource if the lake's change log belongs to another slot than the setting ``slot``. Otherwise `setup`
    would report that the slot is gone, and `teardown` would remove the log, but leave the log's slot on the source."""
    try:
        log = ChangeLog(settings.layout)
        slot = log.identity.slot if log.exists else settings.slot
    except (PgcdcError, OSError, ValueError):
        # The operation that opens the log reports this error.
        return
    if slot != settings.slot:
        raise WrongSource(
            f"is {settings.slot}, but this project was set up with slot {slot}", thing="setting `slot`",
            do=f"set it back to {slot}; for another slot, use a new project folder and a new lake",
        )  # fmt: skip


def refuse_taken_slot(slot: SlotStatus, layout: Layout) -> None:
    """For a lake without a change log: raise WrongLake if changes were received from the slot before. They probably
    went to another lake, and this lake would confirm to the slot changes that the other lake still needs."""
    if slot.active or slot.decoded.total_txns:
        raise WrongLake(
            f"has no change log, but {slot.thing} was read before, so another lake probably needs its changes",
            thing=f"lake {layout.root}",
            do="set `lake` (PGCDC_LAKE, or pgcdc.yaml) to the other lake, or choose another name in the setting "
               "`slot`; if no lake needs the slot, run `pgcdc teardown --shared`, then `pgcdc setup` and `pgcdc sync`, "
               "which copies all tables again",
        )  # fmt: skip


def note_lake(settings: Settings, log: ChangeLog) -> None:
    """Record, in the project's state, that the lake of this log is the project's own."""
    change_note(settings.state, lake=log.layout.root.text, log=log.id)


def log_id(layout: Layout) -> str | None:
    """The id of the lake's change log; None if the lake has no change log."""
    log = ChangeLog(layout)
    return log.id if log.exists else None


def _holds(note: ProjectNote) -> bool:
    """Whether the recorded location still contains the project's log. False if the location cannot be read."""
    assert note.lake is not None
    try:
        return log_id(Layout(Location(note.lake))) == note.log
    except (PgcdcError, OSError, ValueError):
        return False


def _set(note: ProjectNote) -> str:
    return f"set `lake` (PGCDC_LAKE, or pgcdc.yaml) to {note.lake}"
