"""The contract of a target, which is the place that keeps the mirrors.

The flow (:mod:`pgcdc_assets.flow`) uses its mirrors only through this contract. Change log, feeds and points belong to
the flow. :class:`pgcdc_assets.mirror.delta.deltatarget.DeltaTarget` implements the contract for Delta tables.

**Generation.** Each copy of a table begins a new generation of its mirror. A generation holds exactly the rows that the
source had at the generation's ``replay_lsn``: the rows of the copy's consistent point, plus all changes applied since.

**Applied.** A table applies exactly the transactions with ``commit_lsn >= replay_lsn``. Rows and ``replay_lsn`` change
together, in one atomic step, both in a copy and in an apply. No reader sees the rows without their ``replay_lsn``, even
after a crash. So every call may be repeated: the target skips changes that its mirror already holds. It never infers
its position from rows.

**Set aside is a result.** A failure of one table alone (its file, value, commit or structure) is returned as that
table's result, with the reason as text. Its mirror does not change, and the other tables of the call continue. A raised
error concerns all tables (a full disk, a dead JVM) and ends the run of the sync; earlier commits stay. Calls about one
table (:meth:`Target.standing`, :meth:`Target.version` and the upkeep) raise; :func:`pgcdc_assets.failures.of_one_table`
then says whether the failure concerns that table alone.

**Committed is not yet durable.** What :meth:`Target.copy` and :meth:`Target.apply` commit can be read, but a power cut
may undo it. The log still holds these changes, and they are applied again. :meth:`Target.settle` makes commits durable.
The flow calls it before it records anything that depends on a commit: a copied table, the end of a repair, a point.

**Published.** :meth:`Target.publish` settles the versions that it gets, and makes one LSN readable as a consistent
point. As long as the point is kept, each table in the point can be read as the source was at this LSN, also after a
power cut.

**Version.** A number that the target assigns; it grows with each commit to a mirror. The flow stores versions, compares
them, counts with them, and passes them back. It assumes nothing else about them.

**Another writer** may also commit to a mirror. If it changed rows, :attr:`Target.changed` reports this until the table
is copied again. If the other writer's commit came first at every attempt, the table is ``outrun``: the next turn tries
again.

**Threads.** The run's thread makes all calls except :meth:`Target.copy`. A copy has its own thread; the run's thread
applies changes of other tables during that time, and may call :meth:`Target.cancel_copies`. The lake's lock is held all
the time, so there is only one flow.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import PgcdcError
from pgcdc_assets.feed.schema import FeedPart

if TYPE_CHECKING:
    from pgcdc_assets.log.reader import ChangeLog
    from pgcdc_assets.points.points import Point
    from pgcdc_assets.source.snapshot.export import Snapshot


@dataclass(frozen=True)
class Generation:
    """The snapshot copy that a mirror holds, and the LSN up to which changes were applied to it."""

    snapshot_lsn: Lsn
    """The copy's consistent point."""
    replay_lsn: Lsn
    """The effective position: the mirror's own recorded position, or the LSN of the newest point that lists this
    generation, whichever is larger."""
    version: int
    recorded: Lsn
    """The mirror's own recorded position. No change above it, and up to ``replay_lsn``, has an effect on its rows."""
    oid: int | None = None
    """OID of the source table whose rows the generation holds; None if the mirror does not record the OID."""
    followed: Table | None = None
    """The table as :meth:`Target.reshape` or :meth:`Target.rename` last recorded it; None if neither was called."""
    unlisted: bool = False
    """Whether no point has listed the mirror since :attr:`followed` changed. An older point that lists this name may
    then mean the rows of another table."""


@dataclass(frozen=True)
class CopyReport:
    """A table's copy. ``bytes``: size of the data files. ``seconds``: from the start of its job to its commit."""

    table: TableName
    consistent_point: Lsn
    rows: int
    bytes: int
    files: int
    seconds: float
    version: int


@dataclass
class CopyCount:
    """The progress of copies, to be shown to people. The copies' thread writes it, and any thread may read it."""

    tables: int = 0
    copied: int = 0
    """How many of the tables are committed."""
    bytes: int = 0
    """Size of the tables on the source's disk; 0 until it is known."""
    read: Callable[[], tuple[int, int]] = lambda: (0, 0)
    """Returns how many rows, and how many of ``bytes``, were read."""


Failures = dict[TableName, PgcdcError]
"""Tables that were not copied, and why."""


@dataclass(frozen=True)
class Applied:
    """The result of an apply for one table; counts are rows of the mirror."""

    table: Table
    """The table as the feed's part describes it, including new columns."""
    version: int
    """The mirror's version; -1 if the mirror was not read, or could not be read."""
    replay_lsn: Lsn
    """The mirror's position after the apply: the end of the applied changes. Unchanged if the table is set aside."""
    inserted: int = 0
    updated: int = 0
    deleted: int = 0
    seconds: float = 0.0
    set_aside: tuple[Lsn, str] | None = None
    """Set if the mirror and the changes contradict each other, or if one of them cannot be read: the first LSN
    concerned, and the reason."""
    outrun: bool = False
    """Whether another writer's commit came first at every attempt. Nothing was applied; the next turn tries again."""


@dataclass(frozen=True)
class Freed:
    """What was deleted from a mirror: number and size of its data files. Zero if only the log became shorter."""

    files: int
    bytes: int


class Target(Protocol):
    """The mirrors of one stream's tables. The module's docstring says what each call promises."""

    # State --------------------------------------------------------------------------------------

    def refusal(self, table: Table) -> str | None:
        """Why no mirror can hold the table, as text; None if a mirror can hold it."""

    def recover(self, names: Iterable[TableName]) -> Mapping[str, tuple[str, ...]]:
        """Repair what a power cut damaged in these mirrors. Called once, before all other calls. Returns the names of
        files that the repair put aside, by the mirror's folder."""

    def standing(self, name: TableName) -> Generation | None:
        """The mirror's generation; None if no copy was committed. IdentityMismatch if another stream owns it."""

    def version(self, name: TableName) -> int:
        """The mirror's newest version, even if another writer committed it; -1 if there is no mirror."""

    def rows(self, name: TableName) -> int | None:
        """The row count of the mirror's newest version; None if there is no mirror, or its files do not record it."""

    @property
    def changed(self) -> Mapping[TableName, str]:
        """Mirrors whose rows another writer changed since their copy, with a description of the change. Includes only
        changes that :meth:`recover` and :meth:`settle` have read."""

    # Copy ---------------------------------------------------------------------------------------

    def copy(
        self, tables: Sequence[Table], snapshot: Snapshot, on_table: Callable[[CopyReport], None],
        count: CopyCount | None = None,
    ) -> Failures:  # fmt: skip
        """Begin a new generation of each table with the rows of the snapshot. Returns which tables failed, and why.
        Readers see a mirror's old state until its copy is committed to the mirror. ``on_table`` is called in the
        calling thread after the commit of each table. CopyOutdated and CopyBlocked mean that another session altered or
        locked the table during the copy; another copy may succeed."""

    def cancel_copies(self) -> None:
        """Make a running copy fail soon. The flow repeats this call until the copy has ended, because a call between
        two steps of the copy has no effect."""

    # Apply --------------------------------------------------------------------------------------

    def apply(self, parts: Sequence[FeedPart], upto: Lsn, known: Mapping[TableName, Table]) -> list[Applied]:
        """Apply these parts of the feeds up to ``upto``, a transaction boundary. Each mirror starts from its own
        position. Tables without changes left to apply are not in the result. ``known``: the tables with the columns
        that their mirrors last had. If ``known`` lacks a column, the column is new and is added to the mirror. If the
        mirror lacks a known column, another writer removed it, and the table is set aside."""

    def repair(self, log: ChangeLog, table: Table, span: LsnRange, replay_lsn: Lsn) -> Applied:
        """Derive the effect of ``span`` again from the log, and merge it into the mirror. The mirror is at
        ``replay_lsn`` before and after. Raises NotRepairable if the log lacks a needed value: no value is guessed."""

    def reshape(self, before: Table, after: Table, *, by_metadata: bool) -> int:
        """Change the structure of a mirror from its own rows, without the source; returns its version after the change.

        Columns are identified by attnum. A column that ``before`` lacks gets its ``missing`` value in all rows. Rows of
        leaves that ``after`` lacks are deleted. Rows and structure change in one atomic step, the position stays, and
        :attr:`Generation.followed` then has the new structure. The flow must ensure that no point below the structure
        change lists the new version, because its rows have the new structure even if they are older than the change.
        ``by_metadata``: rows are not rewritten if the target can express the change without that.
        """

    def comment(self, table: Table) -> int:
        """Write the comments of the table and its columns to the mirror; returns the mirror's version, which stays the
        same if the mirror already has these comments. Rows and position do not change. A new copy has the comments from
        its commit on. :meth:`reshape` and :meth:`rename` keep them. A comment that the source removed is removed. A
        comment by another writer stays if the source has no comment there."""

    def rename(self, former: TableName, table: Table, version: int, position: Lsn) -> int:
        """Continue the mirror of a renamed table under its new name; returns its version there.

        In one atomic step, the rows and columns that ``version`` has at the former name become a generation of the new
        name, copied at ``position``. This generation replaces everything that the new name held. No row is read. The
        mirror at the former name does not change, and may already hold another table's rows. Raises LakeError if the
        new name holds a copy of another table at the same position to which changes were applied since: the two
        generations could not be distinguished.
        """

    # Publish ------------------------------------------------------------------------------------

    def settle(self, versions: Mapping[TableName, int]) -> None:
        """Make these versions durable, for all tables together. LakeError for a version that holds no copy."""

    def publish(
        self,
        lsn: Lsn,
        versions: Mapping[TableName, int],
        changed: Mapping[TableName, str],
        messages: Lsn | None = None,
        beside: Point | None = None,
    ) -> None:
        """Add a consistent point of these versions. The whole point is durable when this returns. ``changed``: the
        tables whose rows another writer has changed, and how. ``messages``: the position of the feed of messages, if
        that feed is complete to ``lsn``. ``beside``: an existing point. The new point also lists the other tables of
        that point, with the same versions."""

    # Upkeep -------------------------------------------------------------------------------------

    def unmoved(self, name: TableName, version: int) -> int | None:
        """The mirror's newest version, if it holds the same rows as ``version``. None if changes or a new copy were
        committed after ``version``, if ``version`` can no longer be read, or if there is no mirror."""

    def upkeep(self, name: TableName, table: Table | None, published: int, may_begin: Callable[[], bool]) -> bool:
        """Keep a mirror cheap to read, and keep its promised versions readable. Does nothing unless the mirror is
        :meth:`unmoved` since its published version. Returns whether the mirror's rows were written to other files;
        ``may_begin`` is called before such a rewrite, and can prevent it. ``table``: as the mirror has it, if known."""

    def keeps(self, name: TableName) -> bool:
        """Whether there is a mirror of this name. IdentityMismatch if it belongs to another owner."""

    def forget(self, name: TableName) -> Freed:
        """Delete a whole mirror. After a kill, either :meth:`keeps` still reports the mirror, or nothing is left."""

    def delete_unneeded(
        self, name: TableName, promised: Collection[int], grace: timedelta, may_begin: Callable[[], bool]
    ) -> Freed | None:
        """Delete the files that no kept version needs. Kept versions are the promised versions, versions younger than
        ``grace``, and the newest version. A kill at any moment is harmless. None if there was nothing to delete, or if
        ``may_begin`` returned False. Deletes nothing and raises LakeError if a kept version needs the files."""
