"""Decides whether an error concerns one table or all tables. If an error concerns one table, pgcdc records the reason,
and continues with the other tables. The table waits until pgcdc tries again, or is set aside until a person has fixed
the cause. If an error concerns all tables, the run ends.

An error concerns one table if only that table's files, commits, values, rights or statements can cause it. An error
concerns all tables if the next table would fail in the same way: a full disk, a dead JVM, a lost source, a damaged
change log, a bug of this program. :data:`WHOSE` lists our own errors. An error of the source gets its class by its
SQLSTATE, in :mod:`pgcdc_assets.source.connect.failures`. Spark's workers import this module, so it imports no Delta.
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

from pgcdc_assets.core.layout import Location
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
"""How many times a commit to a mirror is attempted, if another writer commits to the mirror at the same time."""


class Whose(Enum):
    """Which tables an error concerns, and what happens then."""

    WAITS = auto()
    """One table, which waits and is tried again automatically."""
    ASIDE = auto()
    """One table, which is set aside until a person has fixed the cause."""
    ALL = auto()
    """All tables: the run ends."""


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
"""For each class of errors, which tables it concerns. If a subclass is not listed, the entry of its nearest base class
applies. Only errors of one table's statements, files and rows are listed. All other errors, for example of the
connection, the stream or the change log, end the run."""
_OF_THE_MACHINE: Final = frozenset({
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM,
})  # fmt: skip
_WRITING: Final = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_BY_RUST: Final = re.compile(r"\(os error (\d+)\)")
"""Finds the operating system's error number, which delta-rs reports only in the text of its error."""


def whose(error: PgcdcError) -> Whose:
    """Which tables the error concerns, as :data:`WHOSE` says."""
    return next(WHOSE[kind] for kind in type(error).__mro__ if kind in WHOSE)


def of_one_table(error: BaseException) -> str | None:
    """The failure as text, if one table is set aside because of it; None otherwise. The texts of errors from Arrow,
    Spark and Python are left out, because they may quote values."""
    if isinstance(error, PgcdcError):
        return _named(error) if whose(error) is Whose.ASIDE else None
    if isinstance(error, MemoryError):
        return "there was not enough memory"
    if isinstance(error, OSError):
        return None if _of_the_machine(error) else _system(error)
    if isinstance(error, (pa.ArrowException, ValueError)):
        return f"cannot be read: {type(error).__name__}"
    return _by_spark(error)


class contained:  # noqa: N801 (used as a statement)
    """Suppresses a failure if one table must be set aside because of it (:func:`of_one_table`). Raises all other
    failures. After ``with contained() as failed: ...``, ``failed.reason`` is the failure as text, or None. A block that
    ends with ``return`` needs no check of ``failed.reason``: the code below it runs only after a failure, and uses
    ``failed.told``."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.outrun = False
        """Whether another writer's commit came first, so that a new attempt may succeed."""

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
    """Whether another writer's commit came first, so that a new attempt may succeed."""
    if isinstance(error, (PgcdcError, OSError, ValueError, MemoryError, pa.ArrowException)):
        return isinstance(error, CommitLost)
    told = _by_spark(error)
    return told is not None and "CONCURRENT" in told


def again_after_lost_races(step: Callable[[], Result]) -> Result:
    """Run a step that reads a table and commits to it. If another writer's commit comes first, run the step again.
    After :data:`ATTEMPTS` attempts in all, raise the last failure."""
    for _ in range(ATTEMPTS - 1):
        try:
            return step()
        except Exception as error:
            if not lost_race(error):
                raise
    return step()


def unreadable(path: Location, error: Exception) -> PgcdcError:
    """The error for a file that is missing or damaged. It names the file."""
    if isinstance(error, OSError):
        if (refused := of_the_machine(error)) is not None:
            return refused
        if error.errno is not None:
            return LakeError(f"cannot be read: {os.strerror(error.errno)}", thing=str(path))
    return LakeError(f"cannot be read: {type(error).__name__}", thing=str(path))


def of_the_machine(error: OSError) -> MachineError | None:
    """A MachineError, if the error (for example, a full disk) would also stop every other table; otherwise None."""
    return MachineError(_system(error), thing="lake", do=ROOM) if _of_the_machine(error) else None


@contextmanager
def machine_told(lake: Location) -> Iterator[None]:
    """If the block fails by an error of the operating system that concerns all tables, raise MachineError instead, with
    the folder's name. This includes errors that delta-rs, Arrow or Spark report."""
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
    """The error of the operating system that made a Spark job fail, such as a full disk. Only the text of the job's
    failure contains it. None if the job failed for another reason."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    if not isinstance(error, (PySparkException, Py4JError)):
        return None
    told = str(error)
    return next((text for text in map(os.strerror, _WRITING) if text in told), None)


def _by_spark(error: BaseException) -> str | None:
    """An error of Spark's driver about one statement, as text. None for any other error. Failures within tasks are not
    seen here, because tasks return them as values."""
    # Imported here and not at the top, because the receiver imports this module too, and must start without Spark.
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException, PythonException

    if isinstance(error, Exception) and _refused_to_spark(error) is not None:
        return None
    if isinstance(error, PySparkException) and not isinstance(error, PythonException):
        return f"Spark failed: {error.getCondition() or type(error).__name__}"
    if isinstance(error, Py4JJavaError):
        return f"Spark failed: {error.java_exception.getClass().getSimpleName()}"
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
