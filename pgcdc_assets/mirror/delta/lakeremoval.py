"""Removes a lake from its folder, which may also contain files that pgcdc did not write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from pgcdc_assets.core.formats import MALFORMED
from pgcdc_assets.core.layout import DELTA_LOG, OWN, Layout, Location
from pgcdc_assets.delta.log import DeltaLog
from pgcdc_assets.delta.sweep import remove_table
from pgcdc_assets.errors import LakeError, MachineError, PgcdcError
from pgcdc_assets.mirror.delta.mirror import IDENTITY, clear_unfinished
from pgcdc_assets.points.states import TableStates
from pgcdc_assets.store import storage


def remove_lake(layout: Layout) -> list[str]:
    """Delete the mirrors and pgcdc's own folder in the lake, then the lake's folder if it is empty. Returns the names
    of the files that stay, because pgcdc did not write them. Raises MachineError if a file of pgcdc could not be
    deleted."""
    mirrors = list(_mirrors(layout))
    with suppress(OSError):
        for folder in mirrors:
            remove_table(folder)
            _delete_empty(folder)
    # This folder records which tables may have a mirror, so it is deleted last.
    storage.delete_folder(layout.own)
    storage.delete_empty(layout.root)
    left = [entry.name for entry in storage.walk(layout.root, hidden=True)]
    ours = tuple(f"{folder.text.removeprefix(layout.root.text).lstrip('/')}/" for folder in (layout.own, *mirrors))
    if any(name.startswith(ours) for name in left):
        raise MachineError("could not be removed completely", thing=f"lake {layout.root}",
                           do="delete the rest of the folder as the user who owns it")  # fmt: skip
    return sorted(left)


def _mirrors(layout: Layout) -> Iterator[Location]:
    """The folders of our mirrors. A mirror is recognized by its Delta log. If the log is damaged, the stored states of
    tables show whether the folder is a mirror. Also deletes the files of unfinished copies, whose tables have no Delta
    log yet."""
    known: set[Location] = set()
    with suppress(PgcdcError, OSError, *MALFORMED):
        known = {layout.mirror(name) for name in TableStates(layout).all()}
    parts = [entry.name.split("/") for entry in storage.walk(layout.root, hidden=True)]
    logged = {layout.root / f"{one[0]}/{one[1]}" for one in parts if len(one) > 3 and one[2] == DELTA_LOG}
    for folder in sorted(known | logged):
        if folder.parent.name == OWN:
            continue
        try:
            table = DeltaLog(folder, with_files=False).newest()
        except (PgcdcError, OSError, *MALFORMED):
            if folder in known:
                yield folder
            continue
        if table is not None and IDENTITY in table.configuration:
            yield folder
        elif table is None and folder in known:
            with suppress(LakeError, OSError):
                clear_unfinished(folder)
            _delete_empty(folder)


def _delete_empty(folder: Location) -> None:
    storage.delete_empty(folder)
    storage.delete_empty(folder.parent)
