"""Every situation that stops us, as one class: what, which object, which LSN, what to do.

Messages carry names, LSNs and counts; never row values, never secrets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

ROOM = "make room or mend it there, then run again: it goes on from what is durable"
"""The advice if the system refuses to write."""


class PgcdcError(Exception):
    """Base of all. ``str()`` is one line: ``thing: what, at LSN X/Y; do``."""

    retryable: ClassVar[bool] = False
    exit_code: ClassVar[int] = 1
    advice: ClassVar[str] = ""
    """What to do, if the raiser says nothing more precise."""

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
        """The error as plain values for another process, from which :func:`of_plain` makes the error again."""
        lsn = None if self.lsn is None else str(self.lsn)
        return {"class": type(self).__name__, "what": self.what, "thing": self.thing, "lsn": lsn, "do": self.do}

    @property
    def told(self) -> list[str]:
        """The lines of ``str()``."""
        return [str(self)]


# Usage and settings ---------------------------------------------------------------------------


class UsageError(PgcdcError):
    """A wrong argument or option."""

    exit_code = 2


class SettingsError(UsageError):
    """A setting that cannot be used; names the field."""


class WrongSource(SettingsError):
    """No source is named, or one that the project was not set up with; nothing was started or written."""


class WrongInstance(SettingsError):
    """A Dagster instance that belongs to another project; nothing was started or written."""

    advice = (
        "set DAGSTER_HOME to a folder of this project's own, or unset it: .dagster is used then; if that project is "
        "gone, delete all partitions of the assets `change_log` and `snapshot/...` in Dagster's UI"
    )


class WrongLake(SettingsError):
    """The lake is not the one that the project follows its source in; nothing was started or written."""


class BadRange(UsageError):
    """A text or key that is not an LSN range."""


class RangeGap(PgcdcError):
    """A range cannot be applied because ranges before it are missing; names them."""


class UnknownTable(PgcdcError):
    """A table that the catalog or the lake does not know."""

    advice = "see `pgcdc status` for the tables"


class SetupNeeded(PgcdcError):
    """Publication, slot or saved catalog does not exist yet."""

    advice = "run `pgcdc setup`"


class MachineError(PgcdcError):
    """Java missing or of a wrong version, no network on first use, no write access."""


class StoreFailed(MachineError):
    """An object store refuses, or does not answer. So it would for any other place, and no file is damaged by it."""

    advice = "nothing is lost: the next run goes on from what is durable"
    passing = False
    """Whether trying again may help."""


class UnknownFormat(PgcdcError):
    """A change log, ledger or saved catalog has a format that this version does not read."""

    advice = (
        "use the version of pgcdc that wrote it, or run `pgcdc teardown --lake` with that version "
        "and `pgcdc setup` with this one"
    )


class LockHeld(PgcdcError):
    """Another process writes to this lake; names pid and command."""

    advice = "wait for it, or stop it"


class LeaseLost(PgcdcError):
    """This process was not heard of for too long, and may not write to the lake any more."""

    retryable = True
    advice = "nothing is lost: whoever writes now goes on from what is durable"


# Source ---------------------------------------------------------------------------------------


class SourceUnavailable(PgcdcError):
    """The source cannot be reached, or the connection was lost."""

    retryable = True


class SourceFailed(PgcdcError):
    """The source reported an error that no other class describes; names its SQLSTATE."""


class SourceNotReady(PgcdcError):
    """The source lacks a setting, a right or a free slot or connection; says which, and what to change."""


class RightLacking(SourceNotReady):
    """Our role may not read one table. The table waits until it may; says which statement grants the right."""


class SetupRefused(SourceNotReady):
    """Lists everything that ``setup`` found to be wrong on the source; nothing was made.

    ``str()`` is one line if that is enough, else a line for each finding and for each statement that mends it.
    """

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
    """The slot was invalidated: the WAL it needs is gone. Only a new slot and new copies help."""


class SlotActive(PgcdcError):
    """Another process holds the slot; names its pid."""

    retryable = True


class SlotAhead(PgcdcError):
    """``confirmed_flush_lsn`` is above ``transform_lsn``: changes between the two are gone."""


class PreparedLost(PgcdcError):
    """A prepared transaction commits whose content is not in the lake, and never comes again."""


class IdentityMismatch(PgcdcError):
    """Another system, database, slot or timeline stands under the name that the log belongs to."""


class LogAhead(PgcdcError):
    """The log holds positions that this source's WAL has not reached: a restored backup."""


class EmptyPublication(PgcdcError):
    """The publication lists no table, or does not exist."""


class CopyBlocked(PgcdcError):
    """Open or prepared transactions prevent a snapshot; names pid, gid, age."""

    retryable = True


class CopyOutdated(PgcdcError):
    """A table was truncated, rewritten or dropped between the snapshot and its copy: take a new snapshot."""

    retryable = True


# Stream and log -------------------------------------------------------------------------------


class ProtocolError(PgcdcError):
    """A malformed, truncated or unknown message; names kind and LSN."""


class LogCorrupt(PgcdcError):
    """A segment is missing, damaged, or not what its commit says."""


class LogConflict(PgcdcError):
    """Another writer moved the log's position while we were writing."""


class ReceiverDied(PgcdcError):
    """The receiver process ended without a report."""

    retryable = True


# Lake -----------------------------------------------------------------------------------------


class SparkDied(PgcdcError):
    """The JVM ended while it was used: killed, or out of memory."""

    retryable = True
    advice = "run it again: nothing is half done; if the system ran out of memory, lower `spark.driver.memory`"


class LakeError(PgcdcError):
    """A mirror, feed or point in the lake is not what it must be."""


class CommitLost(LakeError):
    """Another writer took the commit's number first; nothing was committed, and looking again may help."""

    retryable = True


class TornLog(LakeError):
    """A commit or a checkpoint of a Delta log is incomplete, as a power cut may leave it."""

    advice = (
        "the next `pgcdc sync` puts it aside where nothing published rests on it; if it is still there then, "
        "restore the file, or move the table's folder away and copy it anew with `pgcdc snapshot`"
    )


class MergeMismatch(LakeError):
    """The rows of a mirror are not those that its changes require."""


class NotRepairable(LakeError):
    """A key's base image lies before the log and the copy: copy the table anew."""


def of_plain(plain: Mapping[str, str | None], *, otherwise: type[PgcdcError]) -> PgcdcError:
    """The error that another process had. ``otherwise``: its class, if this process cannot make one of the same
    class."""
    kind = globals().get(plain["class"] or "")
    if not (isinstance(kind, type) and issubclass(kind, PgcdcError) and kind.__init__ is PgcdcError.__init__):
        kind = otherwise
    return kind(plain["what"] or "", thing=plain["thing"], lsn=plain["lsn"], do=plain["do"])
