"""What the flow knows of one table: one object, replaced at each change.

| field | stored | set by |
|---|---|---|
| ``table`` | with the state | the copy; a change of structure; new columns that rows brought |
| ``state``, ``reason`` | with the state (``core/states.py``) | whoever changes the state |
| ``replay_lsn``, ``version`` | in the mirror | the copy and each turn |
| ``stray``, ``unread`` | no | the turn, until a look answers it |
| ``reshaping`` | no | the change of a structure or a name, until it has ended |
| ``refused``, ``since_columns``, ``columns``, ``told`` | no | the look at the catalog |
| ``former`` | no: found again at the start | the start of a run, if the table was renamed |
| ``listed_from`` | no | the look at the catalog, the copy |
"""

from __future__ import annotations

from dataclasses import dataclass

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.core.lsn import ZERO, Lsn
from pgcdc_assets.core.marks import Marks
from pgcdc_assets.core.names import TableName
from pgcdc_assets.core.states import TableState


@dataclass(frozen=True)
class TableRecord:
    table: Table
    """The table as its mirror has it."""
    state: TableState
    replay_lsn: Lsn = ZERO
    """The effective position: what lies below it is applied, or known to hold nothing for this table."""
    version: int = -1
    """The mirror's version at ``replay_lsn``."""
    reason: str | None = None
    """What is wrong with it: why it was set aside or waits, or that another writer changed rows of its mirror."""
    refused: bool = False
    """Set aside because it cannot be mirrored at all: no copy brings it back."""
    reshaping: bool = False
    """Its mirror's structure, or place, is being changed: nothing is applied to it, and no copy begins, before that has
    ended."""
    since_columns: tuple[Lsn, Marks] | None = None
    """Set once the catalog has shown columns that came without a value, and no row has brought them so far: from where
    on they were certainly there, and the marks of all columns then."""
    columns: Marks | None = None
    """The columns' rows in the catalog as the last look showed them; None before the first one."""
    stray: str | None = None
    """Rows came of a partition that the mirror does not know, in words: the next look tells whether the table can go
    on; until then it stands where it is."""
    unread: str | None = None
    """A row came under a structure that the mirror does not have, in words: the next look tells how the table goes on;
    until then it stands where it is."""
    told: str = ""
    """What the last look showed of the table, as it was reported."""
    former: TableName | None = None
    """The name under which the mirror stands that is to go on as this table's, in place of a copy: in ``version``, at
    ``replay_lsn``."""
    listed_from: Lsn | None = ZERO
    """From there on the source certainly has the table under its name, by itself and not as a partition; None: from the
    next look on. The mirror of a table that was renamed and renamed back has the rows of every LSN in between, but the
    table had another name then."""

    @property
    def followed(self) -> bool:
        return self.state.readable

    @property
    def known_columns(self) -> Marks:
        """The columns' rows in the catalog as they were seen last."""
        return self.table.marks.columns if self.columns is None else self.columns

    @property
    def waits_for_look(self) -> bool:
        """Whether the table stands still, or points do not list it, until a look tells how it goes on."""
        if self.stray is not None or self.unread is not None:
            return True
        lacks = self.since_columns is not None and self.replay_lsn >= self.since_columns[0]
        return self.followed and lacks and not self.reshaping
