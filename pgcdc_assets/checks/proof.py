"""Records the last comparison of each table by ``verify``, in one small file of the lake, for ``pgcdc metrics``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Self

from pgcdc_assets.checks.report import TableReport
from pgcdc_assets.core.formats import MALFORMED
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import StoreFailed, UsageError
from pgcdc_assets.store import storage


@dataclass(frozen=True)
class Proof:
    """The last comparison of a table. A table that could not be compared keeps its earlier proof."""

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
    """Record the tables that were compared. A lake that cannot be written makes no comparison fail."""
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
