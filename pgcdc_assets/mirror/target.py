"""The contract of a target, which is the place that keeps the mirrors.

The flow (:mod:`pgcdc_assets.flow`), which controls the runs, uses mirrors only through this contract. The contract does
not cover change log, feeds and points. :class:`pgcdc_assets.mirror.delta.deltatarget.DeltaTarget` implements it for
Delta tables.

**Generation.** Each copy of a table begins a new generation of its mirror. A generation holds exactly the rows that the
source had at the generation's ``replay_lsn``: the rows of the copy's consistent point, plus all changes applied since.

**Applied.** An apply changes a mirror by exactly the transactions with ``commit_lsn >= replay_lsn``. Rows and
``replay_lsn`` change together, in one atomic step, both in a copy and in an apply. No reader sees rows without their
``replay_lsn``, even after a crash. So every call may be repeated: the target skips changes that the mirror already
holds. It never infers the position from rows.

**Set aside is a result.** If :meth:`Target.copy` or :meth:`Target.apply` fails for one table alone, because of its
files, values, commits or structure, the reason is returned as that table's result. Its mirror does not change, and the
other tables of the call continue. If the call raises an error, the error concerns all tables (a full disk, a dead JVM),
and ends the run of the sync; earlier commits stay. Calls about one table, such as :meth:`Target.standing`, raise any
error; :func:`pgcdc_assets.failures.of_one_table` then says whether it concerns that table alone.

**Committed is not yet durable.** What :meth:`Target.copy` and :meth:`Target.apply` commit can be read at once, but a
power cut may undo it. Lost changes are still in the log, and are applied again. :meth:`Target.settle` makes commits
durable. The flow calls it before it records anything that depends on a commit: a copied table, the end of a repair, a
point.

**Published.** :meth:`Target.publish` makes the versions that it gets durable, and adds a consistent point that lists
them. As long as the point is kept, each table in it can be read as it was on the source at the point's LSN, also after
a power cut.

**Version.** A number that the target assigns, and that grows with each commit to a mirror. The flow stores versions,
compares them, counts how many are new, and passes them back. It assumes nothing else about them.

**Another writer** may also commit to a mirror. If it changed rows, :attr:`Target.changed` reports this until the table
is copied again. If another writer's commit came first at every attempt of an apply, the table's result is ``outrun``,
and the next turn tries again.

**Threads.** The run's thread makes all calls except :meth:`Target.copy`, which is called in a thread of the copies.
During a copy, the run's thread applies changes of other tables, and may call :meth:`Target.cancel_copies`. The process
holds the lake's lock during all calls.
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
    """The position that the mirror itself records. Between this position and ``replay_lsn``, there is no change that
    this mirror lacks."""
    oid: int | None = None
    """OID of the source table whose rows the generation holds; None if the mirror does not record the OID."""
    followed: Table | None = None
    """The table as :meth:`Target.reshape`, :meth:`Target.rename`, or a :meth:`Target.apply` with new columns last
    recorded it. None if none of them did, or if an apply has added columns and has not applied its rows."""
    unlisted: bool = False
    """Whether no point has listed the mirror since :attr:`followed` changed. An older point may list a mirror of this
    name, but that mirror may have had the rows of another table."""


@dataclass(frozen=True)
class CopyReport:
    """A committed copy of a table. ``bytes``: size of its data files. ``seconds``: from the start of its Spark job to
    its commit."""

    table: TableName
    consistent_point: Lsn
    rows: int
    bytes: int
    files: int
    seconds: float
    version: int


@dataclass
class CopyCount:
    """The progress of copies, to be shown to people. Only the copies' thread changes it, and any thread may read it."""

    tables: int = 0
    copied: int = 0
    """How many of the tables are committed."""
    bytes: int = 0
    """Size of the tables on the source's disk; 0 until it is known."""
    read: Callable[[], tuple[int, int]] = lambda: (0, 0)
    """Returns how many rows and how many bytes were read up to now."""


Failures = dict[TableName, PgcdcError]
"""Tables that were not copied, and why."""


@dataclass(frozen=True)
class Applied:
    """The result of an apply for one table; counts are rows of the mirror."""

    table: Table
    """The table, including new columns that the applied rows have."""
    version: int
    """The mirror's version after the apply; -1 if the mirror was not read, or could not be read."""
    replay_lsn: Lsn
    """The mirror's position after the apply: the end of the applied changes. Unchanged if the table is set aside."""
    inserted: int = 0
    updated: int = 0
    deleted: int = 0
    seconds: float = 0.0
    set_aside: tuple[Lsn, str] | None = None
    """None if the changes were applied. Otherwise the LSN at which the table must be set aside, and the reason: changes
    and mirror contradict each other, or one of them cannot be read."""
    outrun: bool = False
    """Whether another writer's commit came first at every attempt. Nothing was applied; the next turn tries again."""


@dataclass(frozen=True)
class Freed:
    """Number and size of the data files that were deleted from a mirror; zero if only its Delta log became shorter."""

    files: int
    bytes: int


class Target(Protocol):
    """The mirrors of the tables of one source and slot. The module's docstring says what all calls promise."""

    # State --------------------------------------------------------------------------------------

    def refusal(self, table: Table) -> str | None:
        """Why no mirror can hold the table, as text; None if a mirror can hold it."""

    def recover(self, names: Iterable[TableName]) -> Mapping[str, tuple[str, ...]]:
        """Repair what a power cut has damaged in these mirrors. Called once, before all other calls. Returns the former
        names of the files that the repair has renamed, by the mirror's folder."""

    def standing(self, name: TableName) -> Generation | None:
        """The mirror's generation; None if no copy was committed. IdentityMismatch if the mirror belongs to another
        source or slot."""

    def version(self, name: TableName) -> int:
        """The mirror's newest version, even if another writer committed it; -1 if there is no mirror."""

    def rows(self, name: TableName) -> int | None:
        """The row count of the mirror's newest version; None if there is no mirror, or its files do not record it."""

    @property
    def changed(self) -> Mapping[TableName, str]:
        """The mirrors whose rows another writer has changed since their copy, with a description of the change.
        :meth:`recover` and :meth:`settle` find such changes, so newer commits are not included."""

    # Copy ---------------------------------------------------------------------------------------

    def copy(
        self, tables: Sequence[Table], snapshot: Snapshot, on_table: Callable[[CopyReport], None],
        count: CopyCount | None = None,
    ) -> Failures:  # fmt: skip
        """Begin a new generation of each table with the rows of the snapshot. Returns which tables failed, and why.
        Readers see a mirror's old state until its copy is committed. ``on_table`` is called in the calling thread after
        the commit of each table. The failures CopyOutdated and CopyBlocked mean that another session altered or locked
        the table during the copy, so that a later copy may succeed."""

    def cancel_copies(self) -> None:
        """Make a copy or a change of structure in progress fail soon. The flow repeats this call until the work has
        ended, because a call between two of its Spark jobs has no effect."""

    # Apply --------------------------------------------------------------------------------------

    def apply(self, parts: Sequence[FeedPart], upto: Lsn, known: Mapping[TableName, Table]) -> list[Applied]:
        """Apply these parts of the feeds up to ``upto``, a boundary. Each mirror starts from its own position. A table
        that has already applied its part is not in the result. ``known``: the tables with the columns that their
        mirrors last had. A column of the feed that ``known`` lacks is new, and is added to the mirror.
        :attr:`Generation.followed` then has this column. If the mirror lacks a column that is in ``known``, another
        writer has removed it, and the table is set aside."""

    def repair(self, log: ChangeLog, table: Table, span: LsnRange, replay_lsn: Lsn) -> Applied:
        """Compute again, from the log, the rows that changed in the range ``span``, and merge them into the mirror. The
        mirror is at ``replay_lsn`` before and after. Raises NotRepairable if the log lacks a value that is needed."""

    def reshape(self, before: Table, after: Table, *, by_metadata: bool) -> int:
        """Change the structure of a mirror from its own rows, without the source; returns its version after the change.

        Columns are identified by attnum. A column that ``before`` lacks gets its ``missing`` value in all rows. Rows of
        leaf partitions that ``after`` lacks are deleted. Rows and structure change in one atomic step, and the position
        stays. :attr:`Generation.followed` then has the new structure. All rows of the new version have the new
        structure. So the flow must not list this version in a point below the LSN of the change on the source.
        ``by_metadata``: if possible, change only metadata, and rewrite no rows.
        """

    def comment(self, table: Table) -> int:
        """Write the comments of the table and its columns to the mirror; returns the mirror's version, which stays the
        same if the mirror already has these comments. Rows and position do not change. If the source has no comment in
        a place, an earlier comment from the source is removed there, but a comment by another writer stays.
        :meth:`copy` also writes the comments; :meth:`reshape` and :meth:`rename` keep them."""

    def rename(self, former: TableName, table: Table, version: int, position: Lsn) -> int:
        """Continue the mirror of a renamed table under its new name; returns its version there.

        In one atomic step, the mirror of the new name gets the rows and columns that ``version`` of the ``former``
        mirror has. The mirror of the new name then counts as copied at ``position``; everything that it held before is
        replaced. No row is read. The former mirror does not change; its newest version may already hold another table's
        rows. Raises LakeError if the mirror of the new name holds a copy of another table that was made at the same
        position, and has applied changes since: the two generations could not be distinguished.
        """

    # Publish ------------------------------------------------------------------------------------

    def settle(self, versions: Mapping[TableName, int]) -> None:
        """Make these versions durable, for all tables together. LakeError if a mirror has no committed copy in the
        given version."""

    def publish(
        self,
        lsn: Lsn,
        versions: Mapping[TableName, int],
        changed: Mapping[TableName, str],
        messages: Lsn | None = None,
        beside: Point | None = None,
    ) -> None:
        """Add a consistent point at ``lsn`` that lists these versions. The point and the versions are durable when this
        returns. ``changed``: the tables whose rows another writer has changed, and how. ``messages``: the position of
        the feed of messages, if that feed is complete to ``lsn``. ``beside``: an existing point; its other tables are
        also listed in the new point, with the same versions and the same changes by other writers."""

    # Upkeep -------------------------------------------------------------------------------------

    def unmoved(self, name: TableName, version: int) -> int | None:
        """The mirror's newest version, if only its files were rewritten or repaired since ``version``. None if it has
        another copy, position or structure, if ``version`` can no longer be read, or if there is no mirror."""

    def upkeep(self, name: TableName, table: Table | None, published: int, may_begin: Callable[[], bool]) -> bool:
        """Rewrite a mirror's small files if it has many, and protect the versions that points name. Does nothing unless
        the mirror is :meth:`unmoved` since ``published``, the version that the newest point names. Returns whether
        files were rewritten. ``may_begin`` is called before files are rewritten; if it returns False, they are not.
        ``table``: the table with the mirror's columns; without it, nothing is rewritten."""

    def keeps(self, name: TableName) -> bool:
        """Whether there is a mirror of this name. IdentityMismatch if it belongs to another source or slot."""

    def forget(self, name: TableName) -> Freed:
        """Delete a whole mirror. If this is killed, :meth:`keeps` still reports the mirror until nothing is left."""

    def delete_unneeded(
        self, name: TableName, promised: Collection[int], grace: timedelta, may_begin: Callable[[], bool]
    ) -> Freed | None:
        """Delete the files that no kept version needs. Kept are the ``promised`` versions, which points name, versions
        younger than ``grace``, and the newest version. None if there was nothing to delete, or if ``may_begin``
        returned False. Deletes nothing and raises LakeError if it is not certain which files the kept versions need. A
        kill at any moment is harmless."""
