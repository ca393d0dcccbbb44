"""Whether an error concerns one table or all tables: checks every error class of pgcdc, and every SQLSTATE with a
special meaning.

``WAITS``: the error concerns one table, which is tried again. ``ASIDE``: one table, which is set aside. ``ALL``: all
tables, so the run ends.
"""

from __future__ import annotations

import errno

import pyarrow as pa
import pytest

from pgcdc_assets import errors
from pgcdc_assets.errors import PgcdcError
from pgcdc_assets.failures import Whose, of_one_table, whose
from pgcdc_assets.source.connect.failures import ServerError
from pgcdc_assets.source.snapshot.reading import INTERRUPTED

WAITS = {"CopyBlocked", "CopyOutdated", "RightLacking"}
ASIDE = {
    "LakeError", "CommitLost", "TornLog", "MergeMismatch", "NotRepairable",
    "ProtocolError", "IdentityMismatch", "SourceFailed", "NotReached", "FeedGap",
}  # fmt: skip
ALL = {
    "PgcdcError", "UsageError", "SettingsError", "WrongSource", "BadRange", "RangeGap", "UnknownTable", "SetupNeeded",
    "MachineError", "StoreFailed", "UnknownFormat", "LockHeld", "LeaseLost", "SourceUnavailable", "SourceNotReady",
    "SetupRefused", "SlotMissing", "SlotLost", "SlotActive", "SlotAhead", "PreparedLost", "LogAhead",
    "WrongLake", "WrongInstance", "EmptyPublication", "LogCorrupt", "LogConflict", "ReceiverDied", "SparkDied",
    "RegistryUnreachable", "RegistryRefused",
}  # fmt: skip


def _kinds(kind: type[PgcdcError]) -> set[type[PgcdcError]]:
    return {kind}.union(*(_kinds(below) for below in kind.__subclasses__() if below.__module__ == errors.__name__))


def test_for_every_error_class_it_is_defined_which_tables_it_concerns() -> None:
    found: dict[Whose, set[str]] = {one: set() for one in Whose}
    for kind in _kinds(PgcdcError):
        found[whose(kind.__new__(kind))].add(kind.__name__)
    assert found == {Whose.WAITS: WAITS, Whose.ASIDE: ASIDE, Whose.ALL: ALL}


OF_A_COPY = {
    "42501": Whose.WAITS,  # a missing right on table, schema or a function of the row filter; row-level security
    "55P03": Whose.WAITS,  # a lock
    "42P01": Whose.WAITS,  # dropped or renamed
    "3F000": Whose.WAITS,  # its schema was dropped or renamed
    "42703": Whose.WAITS,  # a column was dropped or renamed
    "57014": Whose.WAITS,  # cancelled, because another session waits for the table
    "40001": Whose.WAITS,  # a standby's replay has priority
    "40P01": Whose.WAITS,  # a deadlock
    "42704": Whose.ASIDE,  # a type is missing
    "42883": Whose.ASIDE,  # a function is missing
    "58P01": Whose.ASIDE,  # an extension's library or a table's file is missing
    "58030": Whose.ASIDE,  # a block cannot be read
    "XX001": Whose.ASIDE,  # damaged data
    "XX002": Whose.ASIDE,  # a damaged index
    "XX000": Whose.ASIDE,  # an internal error, as after a type was dropped
    "22012": Whose.ASIDE,  # a row filter divides by zero
    "22021": Whose.ASIDE,  # bytes that are invalid in the encoding
    "22P05": Whose.ASIDE,  # a character that has no equivalent in UTF-8
    "54000": Whose.ASIDE,  # a row that is too large
    "0A000": Whose.ASIDE,  # not supported for this table
    "53100": Whose.ALL,  # the source's disk is full
    "53200": Whose.ALL,  # the source has no memory
    "53300": Whose.ALL,  # too many connections
    "57P01": Whose.ALL,  # the session was terminated; a copy is tried again a few times
    "57P02": Whose.ALL,
    "57P03": Whose.ALL,
    "08006": Whose.ALL,  # the connection was lost
    "28000": Whose.ALL,
    "28P01": Whose.ALL,
    "3D000": Whose.ALL,
}
"""By SQLSTATE of a failed statement on one table: whether the error concerns that table or all tables."""


@pytest.mark.parametrize(("state", "expected"), OF_A_COPY.items(), ids=OF_A_COPY)
def test_sqlstate_of_a_failed_copy_shows_whether_one_table_or_all_are_affected(state: str, expected: Whose) -> None:
    error = ServerError(state, "refused").of_table("public.t")
    # A copy that such a SQLSTATE interrupts fails later with CopyBlocked or CopyOutdated, which concern one table. This
    # does not apply if the source is unreachable.
    found = Whose.WAITS if state in INTERRUPTED and whose(error) is not Whose.ALL else whose(error)
    assert found is expected


def test_error_about_a_missing_right_that_names_no_table_concerns_all_tables() -> None:
    assert whose(ServerError("42501", "permission denied to start WAL sender").typed()) is Whose.ALL


OTHERS: list[tuple[BaseException, Whose]] = [
    (OSError(errno.ENOSPC, "full"), Whose.ALL),
    (OSError(errno.EDQUOT, "quota"), Whose.ALL),
    (OSError(errno.EROFS, "read-only"), Whose.ALL),
    (OSError(errno.EMFILE, "too many files"), Whose.ALL),
    (OSError(errno.ENOMEM, "no memory"), Whose.ALL),
    (ConnectionResetError(errno.ECONNRESET, "reset"), Whose.ALL),
    (TimeoutError(), Whose.ALL),
    (FileNotFoundError(errno.ENOENT, "gone"), Whose.ASIDE),
    (PermissionError(errno.EACCES, "no"), Whose.ASIDE),
    (OSError(errno.EIO, "damaged"), Whose.ASIDE),
    (pa.ArrowInvalid("damaged"), Whose.ASIDE),
    (pa.ArrowNotImplementedError("unknown"), Whose.ASIDE),
    (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no"), Whose.ASIDE),
    (MemoryError(), Whose.ASIDE),
    (TypeError("a fault of this program"), Whose.ALL),
    (KeyboardInterrupt(), Whose.ALL),
]


@pytest.mark.parametrize(("error", "expected"), OTHERS, ids=lambda one: repr(one)[:40])
def test_errors_of_python_and_libraries_concern_one_table_or_all_tables(error: BaseException, expected: Whose) -> None:
    assert (of_one_table(error) is not None) is (expected is Whose.ASIDE)
