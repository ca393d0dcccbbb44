"""The errors of this project: one class for each situation that stops a command. An error says what happened, to which
object, at which LSN, and what to do next. Messages contain names, LSNs and counts, and never row values or secrets."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import ClassVar

ROOM = "free space or fix the problem there, then run the command again: it continues where it stopped"
"""The advice if the operating system refuses to write."""


class PgcdcError(Exception):
    """The base class. ``str()`` is ``thing: what, at LSN X/Y; do``, in one line (several for :class:`SetupRefused`)."""

    retryable: ClassVar[bool] = False
    exit_code: ClassVar[int] = 1
    advice: ClassVar[str] = ""
    """What to do next, if the error is raised without its own advice (``do``)."""

    def __init__(self, what: str, *, thing: str | None = None, lsn: object = None, do: str | None = None) -> None:
        self.what = what
        self.thing = thing
        self.lsn = lsn
        self.do = do or self.advice
        super().__init__(what)

    def __str__(self) -> str:
        text = f"{self.thing}: {self.what}" if self.thing else self.what
        if self.lsn is not None:
            text += f", at LSN {self.lsn}"
        return f"{text}; {self.do}" if self.do else text

    def to_plain(self) -> dict[str, str | None]:
        """The error as plain values, for another process. :func:`of_plain` is the inverse."""
        lsn = None if self.lsn is None else str(self.lsn)
        return {"class": type(self).__name__, "what": self.what, "thing": self.thing, "lsn": lsn, "do": self.do}

    @property
    def told(self) -> list[str]:
        """The lines of ``str()``."""
        return [str(self)]

    @property
    def docs(self) -> str:
        """The place in the documentation that describes the error."""
        kind = next(kind for kind in type(self).__mro__ if kind.__module__ == __name__)
        return f"docs/reference/errors.md#{re.sub('(?<!^)(?=[A-Z])', '-', kind.__name__).lower()}"


# Usage and settings ---------------------------------------------------------------------------


class UsageError(PgcdcError):
    """A command got a wrong argument or option. Correct the command; ``pgcdc COMMAND --help`` shows its options."""

    exit_code = 2


class SettingsError(UsageError):
    """A setting, or a line of ``pgcdc.yaml``, cannot be used. Correct the setting that the message names."""


class WrongSource(SettingsError):
    """The settings name no source, or a source or slot that is not the project's. Nothing was started or written. Set
    ``source`` and ``slot`` to the project's own, or use a new folder for another source or slot."""


class WrongInstance(SettingsError):
    """In the Dagster instance, another project uses this source's name. Nothing was started or written. Give each
    project its own ``DAGSTER_HOME``."""

    advice = (
        "set DAGSTER_HOME to a folder of this project, or unset it to use .dagster; if the other project is gone, "
        "delete all partitions of the assets `change_log` and `snapshot/...` in Dagster's UI"
    )


class WrongLake(SettingsError):
    """The lake is not this project's lake, or has lost its change log. Nothing was started or written. Set ``lake`` to
    the project's lake, or restore the lake."""


class BadRange(UsageError):
    """A text is not an LSN range. Write the range as ``X/Y..X/Y``, or use the key of a partition of the asset
    ``change_log`` in Dagster."""


class RangeGap(PgcdcError):
    """The LSN ranges have a gap: the change log lacks a part of a range, a range is not a partition in Dagster, or the
    ranges are not adjacent. Choose adjacent ranges that the change log contains."""


class UnknownTable(PgcdcError):
    """The catalog or the lake does not contain the table. Check its name in ``pgcdc status``."""

    advice = "see `pgcdc status` for the tables"


class SetupNeeded(PgcdcError):
    """The publication, the slot, the saved catalog or the change log does not exist yet. Run ``pgcdc setup``, then
    ``pgcdc sync``."""

    advice = "run `pgcdc setup`"


class MachineError(PgcdcError):
    """This machine lacks Java, disk space, memory, a free port, write access, or the network for the first download.
    Provide what the message names, and run the command again."""


class StoreFailed(MachineError):
    """The object store refuses a request or does not answer. No file is damaged. Check the store's address, the
    credentials and the network, and run the command again."""

    advice = "nothing is lost: the next run continues where this one stopped"
    passing = False
    """Whether another attempt may succeed."""


class UnknownFormat(PgcdcError):
    """A file of the lake, or the saved catalog, has a format that this version of pgcdc does not read. Use the version
    of pgcdc that wrote it, or start again with a new lake."""

    advice = (
        "use the version of pgcdc that wrote it, or run `pgcdc teardown --lake` with that version "
        "and `pgcdc setup` with this one"
    )


class LockHeld(PgcdcError):
    """Another process writes to this lake. Wait for the process that the message names, or stop it."""

    advice = "wait for that process, or stop it"


class LeaseLost(PgcdcError):
    """The process lost its lease (the right to write to the lake), because it was suspended or could not reach the
    lake. It no longer writes, and no data is lost. Run the command again if no other process has taken over."""

    retryable = True
    advice = "nothing is lost: the process that now writes to the lake continues where this one stopped"


# Source ---------------------------------------------------------------------------------------


class SourceUnavailable(PgcdcError):
    """The source cannot be reached, or the connection was lost. Check that the server runs and that the address is
    right; a run in follow mode connects again by itself."""

    retryable = True


class SourceFailed(PgcdcError):
    """The source reported an error that no other class describes. The message has its SQLSTATE, which the PostgreSQL
    manual explains."""


class SourceNotReady(PgcdcError):
    """The source lacks a setting, a right, a free slot or a free connection. Change on the source what the message
    names, and run the command again."""


class RightLacking(SourceNotReady):
    """pgcdc's role has no right to read one table. Run the ``GRANT`` statement of the message; the next run then
    copies the table."""


class SetupRefused(SourceNotReady):
    """Setup found something wrong on the source, and created nothing. The message has a line for each finding and for
    each statement that fixes it. Run these statements, then ``pgcdc setup`` again."""

    def __init__(self, lines: Sequence[str], do: str | None = None) -> None:
        super().__init__("is not ready", thing="source", do=do)
        self.lines = tuple(lines)

    def __str__(self) -> str:
        return "\n".join(self.told)

    @property
    def told(self) -> list[str]:
        if len(self.lines) == 1:
            return list(self.lines)
        rest = [self.do] if self.do else []
        return ["the source is not ready, and nothing was created:", *(f"  {line}" for line in [*self.lines, *rest])]


class SlotMissing(PgcdcError):
    """The replication slot does not exist. If it was dropped, the changes since then are lost, and all tables must be
    copied again, as the message says."""


class SlotLost(PgcdcError):
    """The source has invalidated the slot and removed WAL that the slot needs. Changes are lost. Create a new slot and
    copy all tables again, as the message says. To avoid this, raise ``max_slot_wal_keep_size``."""


class SlotActive(PgcdcError):
    """Another process reads the slot. Wait until the process that the message names has ended, or end it."""

    retryable = True


class SlotAhead(PgcdcError):
    """The slot was confirmed up to an LSN (``confirmed_flush_lsn``) above the end of the change log. The changes
    between these LSNs are lost, for example because another program read the slot. Copy all tables again, as the
    message says."""


class PreparedLost(PgcdcError):
    """A prepared transaction was committed, but its changes are not in the lake, and the source does not send them
    again. Copy all tables again, as the message says."""


class IdentityMismatch(PgcdcError):
    """Source, slot, change log and Delta tables do not belong together, or the slot has a wrong plugin or
    ``two_phase``. Set ``source``, ``slot`` and ``lake`` to those of one project."""


class LogAhead(PgcdcError):
    """The change log is ahead of the source's WAL, because the source was restored to an earlier time. Start again with
    a new lake, as the message says."""


class EmptyPublication(PgcdcError):
    """The publication lists no table, or was missing for some time. Add tables or run ``pgcdc setup``. If changes were
    lost, copy all tables again, as the message says."""


class CopyBlocked(PgcdcError):
    """Open or prepared transactions prevent a snapshot, or lock a table. End the transactions that the message names,
    and run the command again."""

    retryable = True


class CopyOutdated(PgcdcError):
    """A table was truncated, rewritten, altered or dropped after the snapshot, before its copy ended. Run the
    command again, which takes a new snapshot."""

    retryable = True


# Stream and log -------------------------------------------------------------------------------


class ProtocolError(PgcdcError):
    """A message of the stream, or a row of a copy, is malformed or unknown. Please report this, with the text of the
    error."""


class LogCorrupt(PgcdcError):
    """A file of the change log is missing, damaged, or not as its commit describes it. Restore the file, or start again
    with a new lake."""

    advice = "restore the file from a copy of the lake, or start again with a new lake"


class LogConflict(PgcdcError):
    """Another writer changed the change log while this process wrote to it. Let only one project write to a lake."""

    advice = "let only one project write to this lake, then run the command again"


class ReceiverDied(PgcdcError):
    """The process that receives changes ended without a report, for example because the system ran out of memory. Run
    the command again; it continues where it stopped."""

    retryable = True
    advice = "run the command again: it continues where it stopped"


# Lake -----------------------------------------------------------------------------------------


class SparkDied(PgcdcError):
    """Spark's JVM ended while it was in use: it was killed, or ran out of memory. Run the command again, if necessary
    with a lower ``spark.driver.memory``."""

    retryable = True
    advice = "run the command again: nothing is half done; if the system ran out of memory, lower `spark.driver.memory`"


class LakeError(PgcdcError):
    """A mirror, feed or consistent point in the lake is missing, damaged, or not as expected. To repair a mirror, copy
    its table again with ``pgcdc snapshot``."""


class NotReached(LakeError):
    """The lake did not reach the requested LSN in the given time. Check with ``pgcdc status`` that a sync runs, or wait
    longer."""

    retryable = True


class FeedGap(LakeError):
    """A change feed lacks changes above the requested LSN, or the feed of messages lacks messages. Read the mirror, or
    all messages that are left, at a consistent point, then what is new above that point."""


class RegistryUnreachable(PgcdcError):
    """The catalog of query engines (setting ``registry``) does not answer, or rejects every request. Replication
    continues, and pgcdc tries again at each consistent point. Check the catalog's address and credentials."""

    retryable = True
    advice = "replication continues; pgcdc tries again at the next consistent point"


class RegistryRefused(PgcdcError):
    """The catalog of query engines (setting ``registry``) refuses one table. Replication continues. The message says
    what to change in the catalog."""


class CommitLost(LakeError):
    """Another writer committed first under the same version number. Nothing was committed. Run the command again, and
    let only one process write to the lake."""

    retryable = True


class TornLog(LakeError):
    """A commit or a checkpoint of a Delta log is incomplete, for example after a power cut. Run ``pgcdc sync``, which
    moves the incomplete file aside if no consistent point needs it."""

    advice = (
        "the next `pgcdc sync` moves the file aside if no consistent point needs it; otherwise restore the file, or "
        "move the table's folder away and copy the table again with `pgcdc snapshot`"
    )


class MergeMismatch(LakeError):
    """The rows of a mirror do not fit the changes that are applied to it, for example because another program changed
    the mirror. Copy the table again with ``pgcdc snapshot``."""


class NotRepairable(LakeError):
    """A table cannot be repaired from the change log, for example because the log no longer has a row's earlier values.
    Copy the table again with ``pgcdc snapshot``."""


def of_plain(plain: Mapping[str, str | None], *, otherwise: type[PgcdcError]) -> PgcdcError:
    """Recreates an error that another process sent as :meth:`PgcdcError.to_plain`. If the error's class is not known
    here, or needs other arguments, the result has the class ``otherwise``."""
    kind = globals().get(plain["class"] or "")
    if not (isinstance(kind, type) and issubclass(kind, PgcdcError) and kind.__init__ is PgcdcError.__init__):
        kind = otherwise
    return kind(plain["what"] or "", thing=plain["thing"], lsn=plain["lsn"], do=plain["do"])
