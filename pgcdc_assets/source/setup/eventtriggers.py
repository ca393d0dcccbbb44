"""Event triggers that put changes of structure into the stream: ``pgcdc setup --ddl``.

They emit a transactional logical message with the facts of each published table that a statement touched, so that a
change is known at the exact LSN of its transaction, and with the facts of its own time. The functions and the mark
stand in a schema of our own, one for each slot.

They never make a statement of the source fail: whatever goes wrong in them becomes a WARNING. They read the catalog
alone, and hold no lock that anybody waits for.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from typing import Any, Final

import psycopg
from psycopg import sql

from pgcdc_assets.core.prefixes import structure_prefix
from pgcdc_assets.source.connect.connection import APPLICATION
from pgcdc_assets.source.setup.findings import Finding
from pgcdc_assets.source.setup.noting import bodies

CHANGED: Final = (
    "ALTER TABLE", "CREATE TABLE", "CREATE TABLE AS", "SELECT INTO", "CREATE SCHEMA", "ALTER SCHEMA", "ALTER TYPE",
    "ALTER DOMAIN", "CREATE PUBLICATION", "ALTER PUBLICATION",
)  # fmt: skip
"""The statements after which the function for ``ddl_command_end`` is called."""
DROPPED: Final = (
    "DROP TABLE", "DROP SCHEMA", "DROP TYPE", "DROP DOMAIN", "DROP OWNED", "DROP EXTENSION", "DROP PUBLICATION",
)  # fmt: skip
"""Those for ``sql_drop``. What ALTER TABLE drops, the other function sees."""
REWRITTEN: Final = ("ALTER TABLE", "ALTER TYPE")
"""Those for ``table_rewrite``, which tells what a new relfilenode does not: TRUNCATE and VACUUM FULL make one, too."""

_MARK = re.compile(r"Made by pgcdc_assets for slot (\w+), version (\w+)")
_LONGEST: Final = 63
"""Bytes of a name in PostgreSQL."""

_THERE = """
SELECT obj_description(n.oid, 'pg_namespace'),
       ARRAY(SELECT e.evtname::text || ' ' || e.evtenabled::text FROM pg_catalog.pg_event_trigger e
             JOIN pg_catalog.pg_proc p ON p.oid = e.evtfoid WHERE p.pronamespace = n.oid)
FROM pg_catalog.pg_namespace n WHERE n.nspname = %s
"""
_ALWAYS = "A"
"""pg_event_trigger.evtenabled after ENABLE ALWAYS: whatever session_replication_role says."""
_MAY = """
SELECT EXISTS (SELECT FROM pg_catalog.pg_roles r WHERE r.rolname = %(role)s AND r.rolsuper)
    OR EXISTS (SELECT FROM pg_catalog.pg_roles r JOIN pg_catalog.pg_roles m ON m.rolname = ANY(%(managed)s)
               WHERE r.rolname = %(role)s AND pg_has_role(r.oid, m.oid, 'MEMBER'))
"""
_MANAGED: Final = ("rds_superuser", "cloudsqlsuperuser", "azure_pg_admin")
"""Managed services let members of a role of their own make event triggers."""


class Noting(StrEnum):
    """Whether changes of structure are put into the stream."""

    ABSENT = "absent"
    CURRENT = "current"
    DISABLED = "disabled"
    """Somebody has disabled, or removed, one of them."""
    OUTDATED = "outdated"
    """Made by another version, or for other publications."""


@dataclass(frozen=True)
class EventTriggers:
    """Those of one slot. ``publications``: whose tables they describe."""

    slot: str
    publications: Sequence[str]

    @property
    def schema(self) -> str:
        return f"{APPLICATION}_{self.slot}"[: _LONGEST - len("_rewritten")]

    @property
    def names(self) -> dict[str, str]:
        """By function."""
        return {function: f"{self.schema}_{function}" for function in ("changed", "dropped", "rewritten")}

    def statements(self, conn: psycopg.Connection[Any]) -> list[sql.Composed]:
        """The statements that make them, or bring them up to date."""
        made = self._made(conn)
        mark = f"Made by {APPLICATION} for slot {self.slot}, version {_digest(conn, made)}"
        comment = sql.SQL("COMMENT ON SCHEMA {} IS {}").format(sql.Identifier(self.schema), mark)
        return [*made, comment]

    def removal(self) -> list[sql.Composed]:
        """The triggers first: what is being dropped must not call a function that is gone."""
        dropped = [sql.SQL("DROP EVENT TRIGGER IF EXISTS {}").format(sql.Identifier(n)) for n in self.names.values()]
        return [*dropped, sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(self.schema))]

    def state(self, conn: psycopg.Connection[Any]) -> Noting:
        found = self._found(conn)
        if found is None:
            return Noting.ABSENT
        version, enabled = found
        if any(enabled.get(name) != _ALWAYS for name in self.names.values()):
            return Noting.DISABLED
        return Noting.CURRENT if version == _digest(conn, self._made(conn)) else Noting.OUTDATED

    def noted(self, conn: psycopg.Connection[Any]) -> bool:
        """Whether changes are put into the stream, by this version or another one."""
        found = self._found(conn)
        return found is not None and all(found[1].get(name) == _ALWAYS for name in self.names.values())

    def make(self, conn: psycopg.Connection[Any]) -> list[str]:
        """Make what is lacking or out of date; says what it made."""
        if self.state(conn) is Noting.CURRENT:
            return []
        with conn.transaction():
            for statement in self.statements(conn):
                conn.execute(statement)
        return [f"event triggers {', '.join(self.names.values())}"]

    def remove(self, conn: psycopg.Connection[Any]) -> list[str]:
        """Remove them; says what it removed. psycopg.errors.InsufficientPrivilege where the role may not."""
        if self._found(conn) is None:
            return []
        with conn.transaction():
            for statement in self.removal():
                conn.execute(statement)
        return [f"event triggers {', '.join(self.names.values())}"]

    def _found(self, conn: psycopg.Connection[Any]) -> tuple[str, dict[str, str]] | None:
        """Their version, and by name whether each is enabled; None where there are none of this slot."""
        row = conn.execute(_THERE, [self.schema]).fetchone()
        mark = _MARK.fullmatch(row[0] or "") if row else None
        if row is None or mark is None or mark[1] != self.slot:
            return None
        return mark[2], dict(text.rsplit(" ", 1) for text in row[1])

    def _made(self, conn: psycopg.Connection[Any]) -> list[sql.Composed]:
        schema = sql.Identifier(self.schema)
        found = bodies(conn, self.schema, structure_prefix(self.slot), self.publications)
        return [
            *self.removal(),
            sql.SQL("CREATE SCHEMA {}").format(schema),
            *(sql.SQL("CREATE FUNCTION {}.{} {} AS {}").format(schema, sql.SQL(head), sql.SQL(how), body)
              for head, how, body in found),
            *self._triggers("changed", "ddl_command_end", CHANGED),
            *self._triggers("dropped", "sql_drop", DROPPED),
            *self._triggers("rewritten", "table_rewrite", REWRITTEN),
        ]  # fmt: skip

    def _triggers(self, function: str, event: str, tags: Sequence[str]) -> list[sql.Composed]:
        name = sql.Identifier(self.names[function])
        made = sql.SQL("CREATE EVENT TRIGGER {} ON {} WHEN TAG IN ({}) EXECUTE FUNCTION {}.{}()").format(
            name, sql.SQL(event), sql.SQL(", ").join(map(sql.Literal, tags)), sql.Identifier(self.schema),
            sql.Identifier(function),
        )  # fmt: skip
        return [made, sql.SQL("ALTER EVENT TRIGGER {} ENABLE ALWAYS").format(name)]


def trigger_findings(conn: psycopg.Connection[Any], triggers: EventTriggers, role: str) -> list[Finding]:
    """A finding if the triggers are lacking or out of date, and the role may not make them."""
    row = conn.execute(_MAY, {"role": role, "managed": list(_MANAGED)}).fetchone()
    if row == (True,) or triggers.state(conn) is Noting.CURRENT:
        return []
    return [Finding("error", f"role {role}", "may not make event triggers",
                    "let a superuser run what `pgcdc setup --ddl --sql` prints")]  # fmt: skip


def _digest(conn: psycopg.Connection[Any], made: Sequence[sql.Composed]) -> str:
    return sha256("\n".join(statement.as_string(conn) for statement in made).encode()).hexdigest()[:12]
