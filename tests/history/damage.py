"""Damage to a mirror, by delta-rs and by hand: rows that a range changed are other, gone, or back again."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder, write_deltalake

from pgcdc_assets.core.ranges import LsnRange
from tests.history.tables import Spec, quoted

_COMMIT_LSN = "_pgcdc_commit_lsn"


def damage(path: Path, spec: Spec, span: LsnRange, before: int | None, pick: int) -> set[str]:
    """What was done: ``changed``, ``removed`` or ``added``. ``before``: the mirror's version as the span begins."""
    done: set[str] = set()
    touched = f"{_COMMIT_LSN} >= {int(span.start)} AND {_COMMIT_LSN} < {int(span.end)}"
    revived = _gone(path, spec, span, before) if pick % 3 == 0 and before is not None else None
    if revived is not None and revived.num_rows:
        write_deltalake(str(path), revived, mode="append")
        done.add("added")
    table = DeltaTable(str(path))
    if pick % 3 == 1:
        if table.update({quoted(spec.values[-1].name): "NULL"}, predicate=touched)["num_updated_rows"]:
            done.add("changed")
    elif pick % 3 == 2 and table.delete(touched)["num_deleted_rows"]:
        done.add("removed")
    return done


def _gone(path: Path, spec: Spec, span: LsnRange, before: int | None) -> pa.Table:
    """Rows of ``before`` whose keys are no more, and were deleted by the span."""
    key = ", ".join(quoted(column.name) for column in spec.key)
    query = QueryBuilder().register("old", DeltaTable(str(path), version=before)).register("now", DeltaTable(str(path)))
    same = " AND ".join(f"old.{quoted(c.name)} = now.{quoted(c.name)}" for c in spec.key)
    return pa.table(query.execute(f"SELECT old.* FROM old LEFT ANTI JOIN now ON {same} ORDER BY {key}").read_all())
