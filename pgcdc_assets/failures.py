"""Decides whose failure an error is: one table's, which waits or is set aside with the reason, or everybody's, which
ends the run.

A failure is one table's if only its files, commits, values, rights or statements can cause it. It is everybody's if the
next table would meet it as well: a full disk, a dead JVM, a lost source, a damaged change log, a fault of this program.
:data:`WHOSE` is the table of our own errors. An error of the source gets its class by its SQLSTATE, in
:mod:`pgcdc_assets.source.connect.failures`. Spark's workers import this module, so it imports no Delta.
"""

from __future__ import annotations

import errno
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum, auto
from typing import Final, Self, TypeVar

import pyarrow as pa

from pgcdc_assets.core.location import Location
from pgcdc_assets.errors import (
    ROOM,
    CommitLost,
    CopyBlocked,
    CopyOutdated,
    IdentityMismatch,
    LakeError,
    MachineError,
    PgcdcError,
    ProtocolError,
    RightLacking,
    SourceFailed,
)

Result = TypeVar("Result")

ATTEMPTS: Final = 3
"""Attempts to commit to a mirror that somebody else commits to as well."""


class Whose(Enum):
    """Whom an error concerns, and what becomes of it."""

    WAITS = auto()
    """One table, which waits: it is tried again by itself."""
    ASIDE = auto()
    """One table, which is set aside until a person has mended it."""
    ALL = auto()
    """Everybody: the run ends."""


WHOSE: Final[dict[type[PgcdcError], Whose]] = {
    CopyBlocked: Whose.WAITS,
    CopyOutdated: Whose.WAITS,
    RightLacking: Whose.WAITS,
    LakeError: Whose.ASIDE,
    ProtocolError: Whose.ASIDE,
    IdentityMismatch: Whose.ASIDE,
    # The source refuses a statement about one table.
    SourceFailed: Whose.ASIDE,
    PgcdcError: Whose.ALL,
}
"""By the nearest of the error's classes. These are errors of one table's statements, files and rows: an error of the
connection, the stream or the change log has no table to be set aside, and ends the run in any case."""
_OF_THE_MACHINE: Final = frozenset({
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM,
})  # fmt: skip
_WRITING: Final = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_BY_RUST: Final = re.compile(r"\(os error (\d+)\)")
"""The system's error number, which delta-rs gives in its text alone."""


def whose(error: PgcdcError) -> Whose:
    """Whose failure an error of ours is."""
    return next(WHOSE[kind] for kind in type(error).__mro__ if kind in WHOSE)


def of_one_table(error: BaseException) -> str | None:
    """The failure in words, if one table is to be set aside for it; None if not.

    Texts of Arrow, Spark and Python are left out: they may quote values.
    """
    if isinstance(error, PgcdcError):
        return _named(error) if whose(error) is Whose.ASIDE else None
    if isinstance(error, MemoryError):
        return "the memory was not enough for it"
    if isinstance(error, OSError):
        return None if _of_the_machine(error) else _system(error)
    if isinstance(error, (pa.ArrowException, ValueError)):
        return f"cannot be read: {type(error).__name__}"
    return _by_spark(error)


class contained:  # noqa: N801 (used as a statement)
    """Contains a failure for which one table is to be set aside; others are raised.

    ``with contained() as failed: ...``, and then ``failed.reason`` is the failure in words, or None. Where the block
    returns, whatever comes after it has failed, and ``failed.told`` is the failure.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self.outrun = False
        """Whether another writer's commit came first, so that looking again may help."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if isinstance(error, Exception):
            self.reason, self.outrun = of_one_table(error), lost_race(error)
        return self.reason is not None

    @property
    def told(self) -> str:
        assert self.reason is not None
        return self.reason


def lost_race(error: BaseException) -> bool:
    """Whether another writer's commit came first, so that looking again may help."""
    if isinstance(error, (PgcdcError, OSError, ValueError, MemoryError, pa.ArrowException)):
        return isinstance(error, CommitLost)
    told = _by_spark(error)
    return told is not None and "CONCURRENT" in told


def again_after_lost_races(step: Callable[[], Result]) -> Result:
    """Run a step that looks and commits, again while others' commits come first; raises the last failure."""
    for _ in range(ATTEMPTS - 1):
        try:
            return step()
        except Exception as error:
            if not lost_race(error):
                raise
    return step()


def unreadable(path: Location, error: Exception) -> PgcdcError:
    """The error of a file that is not there or is damaged, in words, with its name."""
    if isinstance(error, OSError):
        if (refused := of_the_machine(error)) is not None:
            return refused
        if error.errno is not None:
            return LakeError(f"cannot be read: {os.strerror(error.errno)}", thing=str(path))
    return LakeError(f"cannot be read: {type(error).__name__}", thing=str(path))


def of_the_machine(error: OSError) -> MachineError | None:
    """The error, in words, if the system refuses this to every table alike; None if it refuses it to one."""
    return MachineError(_system(error), thing="lake", do=ROOM) if _of_the_machine(error) else None


@contextmanager
def machine_told(lake: Location) -> Iterator[None]:
    """Raise MachineError, with the folder, for what the system refuses to everybody, whichever library reports it."""
    try:
        yield
    except OSError as error:
        if (refused := of_the_machine(error)) is None:
            raise
        raise MachineError(refused.what, thing=str(lake), do=ROOM) from error
    except MachineError as error:
        if error.thing == "lake":
            raise MachineError(error.what, thing=str(lake), do=error.do or ROOM) from error
        raise
    except Exception as error:
        if (what := _refused_to_spark(error)) is None:
            raise
        scratch = os.environ.get("SPARK_LOCAL_DIRS") or tempfile.gettempdir()
        raise MachineError(what, thing=f"{lake}, or Spark's scratch folder in {scratch}", do=ROOM) from error


def _refused_to_spark(error: Exception) -> str | None:
    """What the system refused to a Spark job; only the text of the job's failure says it."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    if not isinstance(error, (PySparkException, Py4JError)):
        return None
    told = str(error)
    return next((text for text in map(os.strerror, _WRITING) if text in told), None)


def _by_spark(error: BaseException) -> str | None:
    """The error of Spark's driver for one statement, in words; None for others. A failure within a task is not one,
    because tasks return their failures as values."""
    # Imported here, because the receiver, which uses this module to read files, has no Spark.
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException, PythonException

    if isinstance(error, Exception) and _refused_to_spark(error) is not None:
        return None
    if isinstance(error, PySparkException) and not isinstance(error, PythonException):
        return f"Spark refuses: {error.getCondition() or type(error).__name__}"
    if isinstance(error, Py4JJavaError):
        return f"Spark refuses: {error.java_exception.getClass().getSimpleName()}"
    return None


def _of_the_machine(error: OSError) -> bool:
    return isinstance(error, (ConnectionError, TimeoutError)) or _number(error) in _OF_THE_MACHINE


def _number(error: OSError) -> int | None:
    told = None if error.errno is not None else _BY_RUST.search(str(error))
    return int(told[1]) if told else error.errno


def _named(error: PgcdcError) -> str:
    return f"{error.thing}: {error.what}" if error.thing else error.what


def _system(error: OSError) -> str:
    number = _number(error)
    said = "cannot be read" if number is None else os.strerror(number)
    return f"{error.filename}: {said}" if error.filename else said
