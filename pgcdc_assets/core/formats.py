"""The format of stored data: the change log, the ledgers and the saved catalog each record the format number."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Final

from pgcdc_assets.errors import LakeError, PgcdcError, UnknownFormat

FORMAT: Final = "1"
"""The only format that this version reads and writes."""
FORMAT_PROPERTY: Final = "pgcdc.format"
"""The property of a Delta table that states its format."""
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
"""Stored times count from this time."""


MALFORMED: Final = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""The exceptions that Python raises if stored data does not have the expected form."""


@contextmanager
def reading(thing: object, kind: type[PgcdcError] = LakeError, do: str | None = None) -> Iterator[None]:
    """Raises ``kind`` if the stored data that the block reads is damaged, or was written by another program."""
    try:
        yield
    except MALFORMED as error:
        raise kind(f"is damaged, and cannot be read: {type(error).__name__}", thing=str(thing), do=do) from error


def check_format(found: object, thing: str) -> None:
    """Raises UnknownFormat unless ``found``, the format that ``thing`` records, is FORMAT. ``found`` is None if
    ``thing`` records no format."""
    if found != FORMAT:
        stated = "states no format" if found is None else f"has format {found}"
        raise UnknownFormat(f"{stated}, but this version of pgcdc reads format {FORMAT}", thing=thing)
