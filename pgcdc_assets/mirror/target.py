"""The contract of a target: what the flow asks of the place that keeps the mirrors, and what it may rely on.

The flow (:mod:`pgcdc_assets.flow`) knows the change log, the feeds and the points. It knows its mirrors by this page
alone. :class:`pgcdc_assets.mirror.delta.deltatarget.DeltaTarget` implements it for Delta tables.

**Generation.** Each copy of a table begins a new generation of its mirror. A generation holds exactly the rows that the
source had at its ``replay_lsn``: first those of the copy's consistent point, then also what was applied since.

**Applied.** A table applies a transaction exactly when ``commit_lsn >=`` its ``replay_lsn``. Rows and ``replay_lsn``
change together, in one atomic step of the target, in a copy as in an apply: nobody ever sees the one without the other,
not even after a crash. So every call may come twice. A run that died is followed by one that asks for the same again,
and the target passes over what its mirror holds already. It never infers its position from rows.

**Set aside is a result.** What fails for one table alone (its file, its value, its commit, its structure) comes back
as this table's part of the result, in words, and its mirror stays as it was. The other tables of the call go on. An
error that is raised concerns everybody (a full disk, a dead JVM) and ends the run; what was committed stands. The
questions about one table (:meth:`Target.standing`, :meth:`Target.version` and the upkeep) raise: the flow asks
:func:`pgcdc_assets.failures.of_one_table` whose failure it is.

**Committed is not yet durable.** What :meth:`Target.copy` and :meth:`Target.apply` have committed can be read, and a
power cut may take it: the log still holds it, and it is applied again. :meth:`Target.settle` makes it durable. The flow
asks for that before it records anything that rests on it: the state of a copied table, the end of a repair, a point.

**Published.** :meth:`Target.publish` makes one LSN readable: from then on, and for as long as the point is kept, each
table that it lists can be read as the source was at this LSN, also after a power cut. It first settles the versions
that it names.

**Version.** A number that the target gives: it grows with each commit to a mirror. The flow keeps it in points and
reports, compares it and counts by it, and hands it back; it knows nothing else of it.

**Another writer** may commit to a mirror, too. If it changed rows, :attr:`Target.changed` says so until the table is
copied anew. If its commits came first at every attempt, the table is ``outrun``: the next turn tries again.

**Threads.** The run's thread makes all calls but one: :meth:`Target.copy` runs in a thread of its own, while the run's
thread applies changes of other tables and may call :meth:`Target.cancel_copies`. The lake's lock is held throughout:
there is one flow.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.core.ranges import LsnRange
from pgcdc_assets.errors import PgcdcError
from pgcdc_assets.feed.schema import FeedPart

if TYPE_CHECKING:
    from pgcdc_assets.log.reader import ChangeLog
    from pgcdc_assets.points.points import Point
    from pgcdc_assets.source.snapshot.export import Snapshot


@dataclass(frozen=True)
class Generation:
    """The copy that a mirror holds, and how far changes were applied to it."""

    snapshot_lsn: Lsn
    """The copy's consistent point."""
    replay_lsn: Lsn
    """Effective: the larger of what the mirror itself records, and the newest point that lists this generation."""
    version: int
    oid: int | None = None
    """The OID of the table whose rows it has; None where nothing tells."""
    followed: Table | None = None
    """The table as the mirror's rows have it since the last :meth:`Target.reshape` or :meth:`Target.rename`; None
    before any."""
    unlisted: bool = False
    """Whether no point has listed the mirror since :attr:`followed` began: under its name one may list another
    table's rows."""


@dataclass(frozen=True)
class CopyReport:
    """``bytes`` is the size of the data files, ``seconds`` the time from the start of the table's job to its commit."""

    table: TableName
    consistent_point: Lsn
    rows: int
    bytes: int
    files: int
    seconds: float
    version: int


Failures = dict[TableName, PgcdcError]
"""Tables that were not copied, and why."""


@dataclass(frozen=True)
class Applied:
    """The result of an apply for one table; counts are rows of the mirror."""

    table: Table
    """The table as the feed's part has it: with the columns that appeared."""
    version: int
    """The version of the mirror; -1 if it was not looked at, or could not be."""
    replay_lsn: Lsn
    """The mirror's position now: the end of what was applied, or where it stood if it is set aside."""
    inserted: int = 0
    updated: int = 0
    deleted: int = 0
    seconds: float = 0.0
    set_aside: tuple[Lsn, str] | None = None
    """Set if the mirror and the changes disagree, or either cannot be read: from which LSN on, and how."""
    outrun: bool = False
    """Another writer's commits came first at every attempt: nothing was applied, and the next turn tries again."""


@dataclass(frozen=True)
class Freed:
    """What was deleted of a mirror: files of rows, and their size. Zero where only its history became shorter."""

    files: int
    bytes: int


class Target(Protocol):
    """The mirrors of one stream's tables. The module's docstring says what each call promises."""

    # Standing -----------------------------------------------------------------------------------

    def refusal(self, table: Table) -> str | None:
        """Why no mirror can hold the table as it is, in words; None where one can."""

    def recover(self, names: Iterable[TableName]) -> Mapping[str, tuple[str, ...]]:
        """Mend what a power cut left of these mirrors. Called once, before anything else is asked.

        Returns the names of the files that were put aside for that, by place.
        """

    def standing(self, name: TableName) -> Generation | None:
        """Where the mirror stands; None where no copy was committed. IdentityMismatch if it is another stream's."""

    def version(self, name: TableName) -> int:
        """The mirror's version now, whoever made it; -1 where there is no mirror."""

    @property
    def changed(self) -> Mapping[TableName, str]:
        """Mirrors whose rows another writer changed since their copy, as far as :meth:`recover` and :meth:`settle`
        have seen, in words."""

    # Copy ---------------------------------------------------------------------------------------

    def copy(self, tables: Sequence[Table], snapshot: Snapshot, on_table: Callable[[CopyReport], None]) -> Failures:
        """Begin a generation of each table with the rows that the snapshot shows; returns which failed, and why.

        A mirror stays readable as it was until its copy is committed. ``on_table`` hears of each commit at once, in
        the calling thread. CopyOutdated and CopyBlocked are failures of tables that somebody altered or locked
        meanwhile: another copy may help.
        """

    def cancel_copies(self) -> None:
        """Make a copy that is under way fail soon. The flow calls this again and again until the copy has ended,
        because the copy may be between two steps."""

    # Apply --------------------------------------------------------------------------------------

    def apply(self, parts: Sequence[FeedPart], upto: Lsn, known: Mapping[TableName, Table]) -> list[Applied]:
        """Bring the mirrors of these feeds' parts to ``upto``, a transaction boundary, each from where it stands.

        Tables for which nothing is left to do are not in the result. ``known``: the tables as their mirrors last took
        them. The mirror gets a column that appeared since. A known column that the mirror lacks was removed by another
        writer, and sets the table aside.
        """

    def repair(self, log: ChangeLog, table: Table, span: LsnRange, replay_lsn: Lsn) -> Applied:
        """Derive what ``span`` did again from the log, and merge it; the mirror stands at ``replay_lsn`` before and
        after.

        NotRepairable where the log does not hold enough: nothing is guessed.
        """

    def reshape(self, before: Table, after: Table, *, by_metadata: bool) -> int:
        """Give a mirror another structure by its own rows; returns its version then. Its position stays.

        Columns are the same by attnum. A column that ``before`` lacks has its ``missing`` in all rows. Rows and
        structure change together, in one atomic step, and :attr:`Generation.followed` tells the structure. The rows are
        then as the source's would be, had the structure changed before them: it is up to the flow that no point lists
        them below the change. Rows of leaves that ``after`` lacks go. ``by_metadata``: rows are not written anew where
        the target can say without that what changed.
        """

    def comment(self, table: Table) -> int:
        """Give the mirror the comments of the table and of its columns; returns its version then, which is the same as
        before if it has them. Neither its rows nor its position change.

        A new copy has them from its commit on, and they stay through :meth:`reshape` and :meth:`rename`. One that the
        source has no more goes; one that another writer made, where the source has none, stays.
        """

    def rename(self, former: TableName, table: Table, version: int, position: Lsn) -> int:
        """Let the mirror of a table that was renamed go on under its new name; returns its version there.

        The rows are not read: they and the columns that ``version`` has at the former name become, in one atomic step,
        a generation of the new name that was copied at ``position``, in place of whatever was there. The former name
        keeps what it has, and may hold another table's rows by now. Raises LakeError if the new name has another
        table's copy at that position, which has gone on since: nothing would tell the two apart.
        """

    # Publish ------------------------------------------------------------------------------------

    def settle(self, versions: Mapping[TableName, int]) -> None:
        """Make these versions durable, for all tables together. LakeError for one that holds no copy."""

    def publish(
        self,
        lsn: Lsn,
        versions: Mapping[TableName, int],
        changed: Mapping[TableName, str],
        messages: Lsn | None = None,
        beside: Point | None = None,
    ) -> None:
        """Add a consistent point of these versions; all of it is durable when this returns.

        ``changed``: those of the tables whose rows another writer has changed, and how. ``messages``: where the feed of
        messages stands, if it is complete to ``lsn``. ``beside``: a point; the new one lists its other tables as it
        does.
        """

    # Upkeep -------------------------------------------------------------------------------------

    def unmoved(self, name: TableName, version: int) -> int | None:
        """The mirror's version now, if it holds the same as that earlier one; None if it has taken changes or a copy
        since, if the earlier one cannot be read any more, or if there is no mirror."""

    def upkeep(self, name: TableName, table: Table | None, published: int, may_begin: Callable[[], bool]) -> bool:
        """Keep a mirror cheap to read, and what its readers are promised readable, if it is :meth:`unmoved` since its
        published version. Does nothing to a mirror that has moved.

        Returns whether the mirror's rows were written to other files; ``may_begin`` is asked before that. ``table``: as
        the mirror has it, if that is known.
        """

    def keeps(self, name: TableName) -> bool:
        """Whether there is a mirror of this name. IdentityMismatch if it is somebody else's."""

    def forget(self, name: TableName) -> Freed:
        """Delete a mirror whole. A kill at any point leaves what is still :meth:`keeps`, or nothing."""

    def let_go(
        self, name: TableName, promised: Collection[int], grace: timedelta, may_begin: Callable[[], bool]
    ) -> Freed | None:
        """Delete the files that neither the promised versions need, nor those younger than ``grace``, nor the newest.

        A kill at any point is harmless. None if there was nothing to delete, or ``may_begin`` said no. LakeError if a
        version that stays could not be read without the files; then nothing is deleted.
        """
