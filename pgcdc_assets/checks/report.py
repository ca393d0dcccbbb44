"""The reports of ``verify``: the result for each table, and the exit code. The last result of each table is also
recorded, in one small file of the lake, for ``pgcdc metrics``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Self

from typing_extensions import TypedDict

from pgcdc_assets.core.formats import MALFORMED
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import StoreFailed, UsageError
from pgcdc_assets.store import storage


class ExampleDocument(TypedDict):
    """A row that is not the same in source and mirror."""

    kind: str
    """``different``, ``missing`` (in the mirror) or ``extra`` (in the mirror)."""
    key: dict[str, str | None]
    """The values of the key by column, or of all columns if the table has no key."""
    columns: list[str]
    """The columns that differ, if the kind is ``different``."""


class ComparedDocument(TypedDict):
    """The comparison of one table."""

    name: str
    """Schema and name."""
    verdict: str
    """``equal``, ``unknown`` (unpublished updates and deletes could explain all differences), ``differs``,
    ``not_compared`` or ``failed``."""
    lsn: str | None
    """Source and mirror were compared as they were at this LSN."""
    source_rows: int
    """Rows of the source."""
    mirror_rows: int
    """Rows of the mirror."""
    missing: int
    """Rows that only the source has."""
    extra: int
    """Rows that only the mirror has."""
    different: int
    """Rows with the same key but other values."""
    reason: str | None
    """Why the table was not compared, or why its rows may differ."""
    examples: list[ExampleDocument]


class VerifyDocument(TypedDict):
    """What ``pgcdc verify --json`` prints."""

    ok: bool
    """Whether every verdict is ``equal`` or ``unknown``."""
    tables: list[ComparedDocument]


@dataclass(frozen=True)
class Example:
    """An example of a row that differs. It is identified by its key, or by all its values if the table has no key."""

    kind: str
    """``different``, ``missing`` (in the mirror) or ``extra`` (in the mirror)."""
    key: dict[str, str | None]
    columns: tuple[str, ...] = ()
    """The columns that differ, if the kind is ``different``."""


class Verdict(StrEnum):
    """What the comparison of a table found."""

    EQUAL = "equal"
    UNKNOWN = "unknown"
    """The table's updates and deletes are not published, and could explain all differences. Whether they are the cause
    is not known."""
    DIFFERS = "differs"
    NOT_COMPARED = "not_compared"
    """The table could not be compared: it is set aside, waits for a copy, or was altered or locked at each try."""
    FAILED = "failed"
    """One side could not be read, and another attempt would not help."""


@dataclass(frozen=True)
class TableReport:
    """The result of comparing one table at ``lsn``. ``reason``: why there is no result, or why rows may differ."""

    table: TableName
    source_rows: int = 0
    mirror_rows: int = 0
    missing: int = 0
    extra: int = 0
    different: int = 0
    examples: tuple[Example, ...] = ()
    reason: str | None = None
    compared: bool = True
    failed: bool = False
    updates_seen: bool = True
    lsn: Lsn | None = None

    @property
    def verdict(self) -> Verdict:
        if not self.compared:
            return Verdict.FAILED if self.failed else Verdict.NOT_COMPARED
        if self.equal:
            return Verdict.EQUAL
        return Verdict.UNKNOWN if self.explained else Verdict.DIFFERS

    @property
    def equal(self) -> bool:
        return self.compared and not (self.missing or self.extra or self.different)

    @property
    def explained(self) -> bool:
        """Whether unpublished updates and deletes could explain the whole difference. A delete leaves one extra row in
        the mirror. An update leaves one extra row and one missing row. If more rows are missing than extra, rows were
        lost."""
        return self.compared and not self.updates_seen and self.missing <= self.extra and not self.different

    def to_json(self) -> ComparedDocument:
        return {
            "name": str(self.table),
            "verdict": self.verdict.value,
            "lsn": None if self.lsn is None else str(self.lsn),
            "source_rows": self.source_rows,
            "mirror_rows": self.mirror_rows,
            "missing": self.missing,
            "extra": self.extra,
            "different": self.different,
            "reason": self.reason,
            "examples": [{"kind": e.kind, "key": e.key, "columns": list(e.columns)} for e in self.examples],
        }


@dataclass(frozen=True)
class VerifyReport:
    """The results for all tables. Tables may be compared at different LSNs."""

    tables: tuple[TableReport, ...]

    @property
    def ok(self) -> bool:
        """Whether every table is equal, or its unpublished updates and deletes could explain all differences."""
        return all(table.equal or table.explained for table in self.tables)

    @property
    def exit_code(self) -> int:
        """0: ok. 1: a table differs, or could not be read. 3: no table differs, but some could not be compared."""
        if any(table.verdict in (Verdict.DIFFERS, Verdict.FAILED) for table in self.tables):
            return 1
        return 0 if self.ok else 3

    def to_json(self) -> VerifyDocument:
        return {"ok": self.ok, "tables": [table.to_json() for table in self.tables]}


@dataclass(frozen=True)
class Proof:
    """The recorded result of a table's last comparison. A ``verify`` that cannot compare the table does not replace
    it."""

    lsn: Lsn
    equal: bool
    """Whether the sides were equal, or unpublished updates and deletes could explain all differences."""
    at: datetime

    def to_json(self) -> dict[str, Any]:
        return {"lsn": int(self.lsn), "equal": self.equal, "at": self.at.isoformat()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return cls(Lsn(data["lsn"]), bool(data["equal"]), datetime.fromisoformat(data["at"]))


def keep_proofs(layout: Layout, reports: Iterable[TableReport]) -> None:
    """Record the results of the tables that were compared. If the lake cannot be written, nothing is recorded, and no
    error is raised."""
    now = datetime.now(UTC)
    found = {report.table: Proof(report.lsn, report.equal or report.explained, now) for report in reports
             if report.compared and report.lsn is not None}  # fmt: skip
    if found:
        told = {str(name): proof.to_json() for name, proof in (read_proofs(layout) | found).items()}
        with suppress(OSError, StoreFailed):
            storage.replace(layout.proofs, json.dumps(told, indent=1).encode())


def read_proofs(layout: Layout) -> dict[TableName, Proof]:
    """The last comparison of each table; empty before the first comparison, or if the file cannot be read."""
    try:
        told = json.loads(storage.read(layout.proofs))
        return {TableName.parse(name): Proof.from_json(data) for name, data in told.items()}
    except (OSError, UsageError, *MALFORMED):
        return {}
