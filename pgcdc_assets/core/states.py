"""The life of a mirrored table.

| state | set by | stored | meaning |
|---|---|---|---|
| waiting | the first look at the catalog that shows the table | no | nothing copied, nothing asked |
| copying | the copy, when its snapshot is taken | yes | rows under one snapshot; left out of consistent points |
| catching_up | the copy, when its commit is made | yes | has a replay_lsn of its own, behind or ahead of the others |
| streaming | the publisher, with the first consistent point that lists it | no | replay_lsn moves with the others |
| set_aside | the transform or the watch of the catalog | yes | not followed exactly; its changes stay in the log |
| moved | the flow, when the mirror goes on under the table's new name | yes | what was published stays readable |
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
        """Whether the mirror stands in the rows of ``consistent_points``."""
        return self in (TableState.CATCHING_UP, TableState.STREAMING)
