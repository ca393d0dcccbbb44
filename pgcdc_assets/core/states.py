"""The states of a mirrored table.

| state | set by | stored | meaning |
|---|---|---|---|
| waiting | the first catalog check that shows the table | no | not copied yet |
| copying | the copy, when its snapshot is taken | yes | being copied from one snapshot; not in consistent points |
| catching_up | the copy, when it is committed | yes | its replay_lsn still differs from the other tables' |
| streaming | the publisher, with the first point that lists it | no | its replay_lsn moves with the other tables |
| set_aside | the transform or the catalog check | yes | cannot be followed exactly, so its changes are not applied |
| moved | the flow, when the table was renamed | yes | the former name; the mirror continues under the new name |
"""

from __future__ import annotations

from enum import StrEnum


class TableState(StrEnum):
    WAITING = "waiting"
    COPYING = "copying"
    CATCHING_UP = "catching_up"
    STREAMING = "streaming"
    SET_ASIDE = "set_aside"
    MOVED = "moved"

    @property
    def readable(self) -> bool:
        """Whether consistent points may list the mirror."""
        return self in (TableState.CATCHING_UP, TableState.STREAMING)
