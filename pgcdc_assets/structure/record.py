"""The states of a mirrored table, and all facts that the package ``flow`` has about one table. These facts are in one
immutable object that is replaced at each change.

| field | stored | set by |
|---|---|---|
| ``table`` | with the state | the copy; a change of structure; new columns that rows contained |
| ``state``, ``reason`` | with the state (:class:`TableState`) | each change of the state |
| ``replay_lsn``, ``version``, ``unchanged_from`` | in the mirror | the copy and each turn |
| ``unread`` | no | the turn; the next catalog check clears it |
| ``reshaping`` | no | the start and the end of a change of the mirror's structure or folder |
| ``refused``, ``since_columns``, ``columns``, ``reported`` | no | the catalog check |
| ``former`` | no: found again at each start | the start of a run, if the table was renamed |
| ``listed_from`` | no | the catalog check, the copy, the turn |
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum, auto

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.core.lsn import ZERO, Lsn
from pgcdc_assets.core.marks import Marks
from pgcdc_assets.core.names import TableName


class TableState(StrEnum):
    """The states of a mirrored table.

    | state | set by | stored | meaning |
    |---|---|---|---|
    | waiting | the first catalog check that shows the table | no | not copied yet |
    | copying | the copy, when its snapshot is taken | yes | being copied from one snapshot; not in consistent points |
    | catching_up | the copy, when it is committed | yes | its replay_lsn still differs from the other tables' |
    | streaming | the publisher, with the first point that lists it | no | its replay_lsn moves with the other tables |
    | set_aside | the transform or the catalog check | yes | cannot be followed exactly; its changes are not applied |
    | moved | the flow, when the table was renamed | yes | the former name; the mirror continues under the new name |
    """

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


class Strange(Enum):
    """Why rows of the log cannot be applied to the mirror yet."""

    STRUCTURE = auto()
    """The structure of the mirror does not fit the rows."""
    PARTITION = auto()
    """The rows belong to a partition that is not among the leaves recorded for the mirror."""
    ATTACHED = auto()
    """The table was a partition of another table for some time, and the stream sent its rows as rows of that table."""


@dataclass(frozen=True)
class UnreadRows:
    """Why rows of the log are not applied until the next catalog check, which decides what happens to the mirror."""

    how: Strange
    what: str


@dataclass(frozen=True)
class TableRecord:
    table: Table
    """The table with the structure that its mirror has."""
    state: TableState
    replay_lsn: Lsn = ZERO
    """All changes of the table by transactions with a commit below this LSN are applied to the mirror."""
    version: int = -1
    """The mirror's version at ``replay_lsn``."""
    unchanged_from: Lsn | None = None
    """The mirror has not changed between this LSN and ``replay_lsn``, so its rows are also right at this LSN. None: the
    same as ``replay_lsn``."""
    reason: str | None = None
    """Why the table is not followed (set aside) or waits for a copy; or a note that another writer has changed rows of
    its mirror."""
    refused: bool = False
    """Whether the table is set aside because no mirror can contain it, so that a new copy would not help."""
    reshaping: bool = False
    """Whether the mirror's structure or folder is being changed. During this time nothing is applied or copied."""
    since_columns: tuple[Lsn, Marks] | None = None
    """Set if a catalog check has found new columns, NULL in all older rows, that the mirror does not have yet. The
    value is an LSN at which the source certainly had these columns, and the :data:`Marks` of all columns at that
    check."""
    columns: Marks | None = None
    """attnum and xmin of all columns at the last catalog check; None before the first check."""
    unread: UnreadRows | None = None
    """Set if the log has rows that cannot be applied. Until the next catalog check, no further change is applied to the
    mirror."""
    reported: str = ""
    """What the last catalog check reported about the table; empty if it reported nothing."""
    former: TableName | None = None
    """Set while the mirror of a renamed table is still in the folder of the table's old name, from which it will be
    moved. The value is the old name."""
    listed_from: Lsn | None = ZERO
    """From this LSN on, it is certain that the source has the table under its present name, and not as a partition.
    None if this is not known until the next catalog check. Points below this LSN do not list the table, because the
    table may have had another name, or rows of a partition that its mirror never gets."""

    @property
    def followed(self) -> bool:
        return self.state.readable

    @property
    def known_columns(self) -> Marks:
        """attnum and xmin of all columns at the last catalog check or, before the first check of this run, as stored
        with the table's state."""
        return self.table.marks.columns if self.columns is None else self.columns

    def shown(self, lsn: Lsn) -> bool:
        """Whether the source, at ``lsn``, certainly had the table under its name and with the structure of its mirror.
        Only then may a consistent point at ``lsn`` list the table."""
        if self.reshaping or self.since_columns is not None or self.listed_from is None:
            return False
        return self.listed_from <= lsn and self.table.since <= lsn

    @property
    def needs_catalog_check(self) -> bool:
        """Whether the table is followed, and needs a catalog check before its changes are applied or a point lists
        it."""
        lacks = self.since_columns is not None and self.replay_lsn >= self.since_columns[0] and not self.reshaping
        return self.followed and (lacks or self.unread is not None or self.listed_from is None)
