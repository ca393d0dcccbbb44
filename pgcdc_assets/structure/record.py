"""All facts that the flow has about one table, in one immutable object that is replaced at each change.

| field | stored | set by |
|---|---|---|
| ``table`` | with the state | the copy; a change of structure; new columns that rows contained |
| ``state``, ``reason`` | with the state (``core/states.py``) | each change of the state |
| ``replay_lsn``, ``version``, ``unchanged_from`` | in the mirror | the copy and each turn |
| ``unread`` | no | the turn; the next catalog check clears it |
| ``reshaping`` | no | the begin and the end of a change of structure or name |
| ``refused``, ``since_columns``, ``columns``, ``reported`` | no | the catalog check |
| ``former`` | no: found again at each start | the start of a run, if the table was renamed |
| ``listed_from`` | no | the catalog check, the copy |
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.core.lsn import ZERO, Lsn
from pgcdc_assets.core.marks import Marks
from pgcdc_assets.core.names import TableName
from pgcdc_assets.core.states import TableState


class Strange(Enum):
    """Why rows of the log cannot be applied to the mirror yet."""

    STRUCTURE = auto()
    """The rows cannot be read with the structure of the mirror."""
    PARTITION = auto()
    """The rows belong to a partition that is not among the leaves recorded for the mirror."""
    ATTACHED = auto()
    """The stream sent the table's rows as rows of another table, of which the table was a partition for some time."""


@dataclass(frozen=True)
class UnreadRows:
    """Rows of the log that are not applied until the next catalog check has decided what happens to the mirror."""

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
    """The log has no change between this LSN and ``replay_lsn`` that the mirror records. None: the same as
    ``replay_lsn``."""
    reason: str | None = None
    """Why the table is set aside or waits, or that another writer changed rows of its mirror."""
    refused: bool = False
    """Whether the table is set aside because no mirror can contain it. A new copy would not help."""
    reshaping: bool = False
    """Whether the mirror's structure or folder is being changed. During this time nothing is applied or copied."""
    since_columns: tuple[Lsn, Marks] | None = None
    """Set while the mirror lacks new columns that are NULL in all older rows: an LSN at which the source certainly had
    these columns, and the :data:`Marks` of all columns at the catalog check that showed them."""
    columns: Marks | None = None
    """attnum and xmin of all columns at the last catalog check; None before the first check."""
    unread: UnreadRows | None = None
    """Rows of the log because of which nothing is applied to the mirror until the next catalog check."""
    reported: str = ""
    """What the last catalog check reported about the table; empty if it reported nothing."""
    former: TableName | None = None
    """The old name of a renamed table. The mirror is still in the folder of this old name, and will be moved."""
    listed_from: Lsn | None = ZERO
    """From this LSN on, the source certainly has the table under its present name, and not as a partition. None until
    the next catalog check sets the LSN. A point may not list a table at an LSN at which the table had another name,
    even if its mirror has all rows."""

    @property
    def followed(self) -> bool:
        return self.state.readable

    @property
    def known_columns(self) -> Marks:
        """attnum and xmin of all columns at the last catalog check, or else as stored with the state."""
        return self.table.marks.columns if self.columns is None else self.columns

    @property
    def needs_catalog_check(self) -> bool:
        """Whether a followed table needs a check before its changes are applied, or before a point lists it."""
        lacks = self.since_columns is not None and self.replay_lsn >= self.since_columns[0] and not self.reshaping
        return self.followed and (lacks or self.unread is not None)
