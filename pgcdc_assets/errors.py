"""The errors of this project: one class for each situation that stops a command. An error says what happened, to which
object, at which LSN, and what to do next. Messages hold names, LSNs and counts; never row values, never secrets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

ROOM = "make room or mend it there, then run again: it goes on from what is durable"
"""The advice if the operating system refuses to write."""


class PgcdcError(Exception):
    """The base class. ``str()`` is one line: ``thing: what, at LSN X/Y; do``."""

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


# Usage and settings ---------------------------------------------------------------------------


class UsageError(PgcdcError):
    """A command got a wrong argument or option."""

    exit_code = 2


class SettingsError(UsageError):
    """A setting has a value that cannot be used; names the setting."""


class WrongSource(SettingsError):
    """The settings name no source, or not the source that the project was set up with. Nothing was started or
    written."""


class WrongInstance(SettingsError):
    """The Dagster instance belongs to another project. Nothing was started or written."""

    advice = (
        "set DAGSTER_HOME to a folder of this project's own, or unset it: .dagster is used then; if that project is "
        "gone, delete all partitions of the assets `change_log` and `snapshot/...` in Dagster's UI"
    )


class WrongLake(SettingsError):
    """The lake is not this project's own lake. Nothing was started or written."""


class BadRange(UsageError):
    """A text or key that is not an LSN range."""


class RangeGap(PgcdcError):
    """Ranges have a gap: the log lacks part of a range, a range is not registered, or the second of two ranges does not
    begin where the first range ends. Names the ranges or LSNs."""


class UnknownTable(PgcdcError):
    """The catalog or the lake does not contain the table."""

    advice = "see `pgcdc status` for the tables"


class SetupNeeded(PgcdcError):
    """Publication, slot or saved catalog does not exist yet."""

    advice = "run `pgcdc setup`"


class MachineError(PgcdcError):
    """This machine lacks something: Java, a usable version of Java, the network on first use, or write access."""


class StoreFailed(MachineError):
    """An object store refuses a request, or does not answer. This concerns all files, and no file is damaged."""

    advice = "nothing is lost: the next run goes on from what is durable"
    passing = False
    """Whether another attempt may succeed."""


class UnknownFormat(PgcdcError):
    """A change log, ledger or saved catalog has a format that this version does not read."""

    advice = (
        "use the version of pgcdc that wrote it, or run `pgcdc teardown --lake` with that version "
        "and `pgcdc setup` with this one"
    )


class LockHeld(PgcdcError):
    """Another process writes to this lake; names its pid and command."""

    advice = "wait for it, or stop it"


class LeaseLost(PgcdcError):
    """This process did not renew its lease in time, and may no longer write to the lake."""

    retryable = True
    advice = "nothing is lost: whoever writes now goes on from what is durable"


# Source ---------------------------------------------------------------------------------------


class SourceUnavailable(PgcdcError):
    """The source cannot be reached, or the connection was lost."""

    retryable = True


class SourceFailed(PgcdcError):
    """The source reported an error that no other class describes; names its SQLSTATE."""


class SourceNotReady(PgcdcError):
    """The source lacks a setting, a right, a free slot or a free connection. Says which, and what to change."""


class RightLacking(SourceNotReady):
    """Our role may not read one table. The table waits until the right is granted. Says which statement grants it."""


class SetupRefused(SourceNotReady):
    """Lists everything that ``setup`` found to be wrong on the source. Nothing was created. ``str()`` is one line for
    one finding, otherwise a line for each finding and for each statement that fixes a finding."""

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
        return ["the source is not ready, and nothing was made:", *(f"  {line}" for line in [*self.lines, *rest])]


class SlotMissing(PgcdcError):
    """The replication slot does not exist."""


class SlotLost(PgcdcError):
    """The slot was invalidated, and the WAL that it needs was removed. Only a new slot and new copies help."""


class SlotActive(PgcdcError):
    """Another process holds the slot; names its pid."""

    retryable = True


class SlotAhead(PgcdcError):
    """``confirmed_flush_lsn`` is above ``transform_lsn``: the changes between these LSNs are gone."""


class PreparedLost(PgcdcError):
    """A prepared transaction was committed, but its content is not in the lake. The source will not send it again."""


class IdentityMismatch(PgcdcError):
    """The source's system, database, slot or timeline is not the one that the change log records."""


class LogAhead(PgcdcError):
    """The log has positions that the source's WAL has not reached, because the source was restored from a backup."""


class EmptyPublication(PgcdcError):
    """The publication lists no table, or does not exist."""


class CopyBlocked(PgcdcError):
    """Open or prepared transactions prevent a snapshot; names their pid or gid, and their age."""

    retryable = True


class CopyOutdated(PgcdcError):
    """A table was truncated, rewritten or dropped between the snapshot and its copy. A new snapshot is needed."""

    retryable = True


# Stream and log -------------------------------------------------------------------------------


class ProtocolError(PgcdcError):
    """A message of the stream is malformed, truncated or unknown; names its kind and LSN."""


class LogCorrupt(PgcdcError):
    """A segment of the change log is missing, damaged, or differs from what its commit says."""


class LogConflict(PgcdcError):
    """Another writer changed the log's position while this process was writing."""


class ReceiverDied(PgcdcError):
    """The receiver process ended without a report."""

    retryable = True


# Lake -----------------------------------------------------------------------------------------


class SparkDied(PgcdcError):
    """The JVM ended while it was in use: it was killed, or ran out of memory."""

    retryable = True
    advice = "run it again: nothing is half done; if the system ran out of memory, lower `spark.driver.memory`"


class LakeError(PgcdcError):
    """A mirror, feed or point in the lake is missing, damaged, or not as it must be."""


class NotReached(LakeError):
    """The lake did not reach an LSN within the time that the caller allowed."""

    retryable = True


class FeedGap(LakeError):
    """A change feed lacks changes above the requested LSN. Read the mirror at a point, and continue at its LSN."""


class RegistryUnreachable(PgcdcError):
    """The catalog in which mirrors are registered does not answer, or answers that it cannot serve any request."""

    retryable = True
    advice = "replication goes on; the next points try again"


class RegistryRefused(PgcdcError):
    """The catalog in which mirrors are registered refuses one table."""


class CommitLost(LakeError):
    """Another writer committed first under the commit's number. Nothing was committed. A new attempt may succeed."""

    retryable = True


class TornLog(LakeError):
    """A commit or a checkpoint of a Delta log is incomplete. A power cut may be the cause."""

    advice = (
        "the next `pgcdc sync` puts it aside where nothing published rests on it; if it is still there then, "
        "restore the file, or move the table's folder away and copy it anew with `pgcdc snapshot`"
    )


class MergeMismatch(LakeError):
    """The rows of a mirror do not fit the changes that are applied to it."""


class NotRepairable(LakeError):
    """A table cannot be repaired from the change log, for example because neither the log nor the copy has a key's old
    row. The table must be copied again."""


def of_plain(plain: Mapping[str, str | None], *, otherwise: type[PgcdcError]) -> PgcdcError:
    """Recreates an error from another process. If its own class cannot be created here, its class is ``otherwise``."""
    kind = globals().get(plain["class"] or "")
    if not (isinstance(kind, type) and issubclass(kind, PgcdcError) and kind.__init__ is PgcdcError.__init__):
        kind = otherwise
    return kind(plain["what"] or "", thing=plain["thing"], lsn=plain["lsn"], do=plain["do"])
