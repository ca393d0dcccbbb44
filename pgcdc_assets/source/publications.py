"""Publications of our own: their mark, and keeping their tables as the settings and identities say."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import SourceFailed
from pgcdc_assets.source.published import GENERATED_SINCE
from pgcdc_assets.source.wanted import Wanted, wanted_tables

_MARK = re.compile(r"Made by pgcdc_assets for slot (\w+)(, with the slot)?")
_LOCK_SECONDS = 30
"""Adding a table waits for DDL, VACUUM or an index build on it (SHARE UPDATE EXCLUSIVE), not for writers."""
_ATTEMPTS = 3

_LISTED = """
SELECT n.nspname::text, c.relname::text
FROM pg_catalog.pg_publication_rel r
JOIN pg_catalog.pg_publication p ON p.oid = r.prpubid
JOIN pg_catalog.pg_class c ON c.oid = r.prrelid
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE p.pubname = %s
"""


@dataclass(frozen=True)
class Publication:
    """A publication's name and mark. ``slot`` None: not made by us. ``with_slot``: we made that slot as well."""

    name: str
    slot: str | None = None
    with_slot: bool = False

    def create(self, conn: psycopg.Connection[Any], operations: str) -> None:
        """Empty, leaves as themselves; stored generated columns too, where the server can (18)."""
        options = [sql.SQL("publish = {}").format(operations), sql.SQL("publish_via_partition_root = false")]
        if conn.info.server_version >= GENERATED_SINCE:
            options.append(sql.SQL("publish_generated_columns = stored"))
        name = sql.Identifier(self.name)
        conn.execute(sql.SQL("CREATE PUBLICATION {} WITH ({})").format(name, sql.SQL(", ").join(options)))
        mark = f"Made by pgcdc_assets for slot {self.slot}" + (", with the slot" if self.with_slot else "")
        conn.execute(sql.SQL("COMMENT ON PUBLICATION {} IS {}").format(name, mark))


def read_publication(conn: psycopg.Connection[Any], name: str) -> Publication | None:
    row = conn.execute(
        "SELECT obj_description(oid, 'pg_publication') FROM pg_catalog.pg_publication WHERE pubname = %s", [name]
    ).fetchone()
    if row is None:
        return None
    match = _MARK.fullmatch(row[0] or "")
    return Publication(name, match[1], bool(match[2])) if match else Publication(name)


def made_by_us(publication: Publication, slot: str) -> bool:
    """Another slot's publication is somebody else's, though it bears our mark."""
    return publication.slot == slot


def inserts_name(publication: str) -> str:
    """The publication of tables without usable identity. PostgreSQL cuts names at 63 bytes; so do we, in front."""
    return publication.encode()[: 63 - len("_inserts")].decode(errors="ignore") + "_inserts"


def write_ours(
    conn: psycopg.Connection[Any], name: str, slot: str, patterns: Sequence[str], *, with_slot: bool
) -> list[str]:
    """Make our pair of publications, or bring their tables up to date; says what it made or changed.

    In one transaction, and checked once more at its end: while it adds a table it holds a lock that
    keeps DDL off, so a key dropped meanwhile cannot leave an unpublishable table behind.
    """
    for _ in range(_ATTEMPTS):
        with conn.transaction() as scope:
            conn.execute("SELECT set_config('lock_timeout', %s, true)", [str(_LOCK_SECONDS * 1000)])
            plan = wanted_tables(conn, patterns)
            done = _write(conn, name, Publication(name, slot, with_slot), "insert, update, delete, truncate", plan)
            insert_only = Publication(inserts_name(name), slot, with_slot)
            done += _write(conn, insert_only.name, insert_only, "insert, truncate", plan)
            if _same(plan, wanted_tables(conn, patterns)):
                return done
            raise psycopg.Rollback(scope)
    raise SourceFailed("tables change their keys while they are being published", thing=f"publication {name}",
                       do="run again")  # fmt: skip


def _same(one: Sequence[Wanted], other: Sequence[Wanted]) -> bool:
    return [(item.table, _names([item]), item.reason) for item in one] == [
        (item.table, _names([item]), item.reason) for item in other
    ]


def _write(
    conn: psycopg.Connection[Any], name: str, publication: Publication, operations: str, plan: Sequence[Wanted]
) -> list[str]:
    target = _names(item for item in plan if item.follows_updates == ("update" in operations))
    done: list[str] = []
    if read_publication(conn, name) is None:
        publication.create(conn, operations)
        done.append(f"publication {name}")
    listed = {TableName(*row) for row in conn.execute(_LISTED, [name])}
    for verb, tables in (("DROP", listed - target), ("ADD", target - listed)):
        if tables:
            conn.execute(_alter(name, verb, sorted(tables)))
            if not done:
                done.append(f"tables of publication {name}")
    return done


def _alter(name: str, verb: str, tables: Sequence[TableName]) -> sql.Composed:
    """ONLY: an inheritance parent would bring its children, whose identities nobody has looked at."""
    listed = sql.SQL(", ").join(sql.SQL("ONLY {}").format(sql.Identifier(t.schema, t.name)) for t in tables)
    return sql.SQL("ALTER PUBLICATION {} {} TABLE {}").format(sql.Identifier(name), sql.SQL(verb), listed)


def _names(plan: Iterable[Wanted]) -> set[TableName]:
    return {relation.name for item in plan for relation in item.relations}
