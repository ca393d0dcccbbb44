"""Publications of our own: their mark, and keeping their tables as the settings and identities say."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from pgcdc_assets.core.encoding import marked
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import CopyBlocked
from pgcdc_assets.source.catalog.published import GENERATED_SINCE, MARK
from pgcdc_assets.source.setup.rights import Changes
from pgcdc_assets.source.setup.selection import wanted_tables
from pgcdc_assets.source.slot.blockers import alterers
from pgcdc_assets.source.slot.creation import OnWait

_MARK = re.compile(MARK + r"(\w+)(, with the slot)?(?:, which reads publication (.+))?", re.DOTALL)
_LOCK_SECONDS = 2
"""lock_timeout for one table. Adding it waits for DDL, VACUUM or an index build on it (SHARE UPDATE EXCLUSIVE), not for
writers. We hold no other lock meanwhile, so whoever waits behind us waits for those alone. An autovacuum gives way to a
session that waits for longer than deadlock_timeout, a second by default."""
_BRIEF_SECONDS = 0.1
"""lock_timeout for a table that is listed while a run goes on, which tries again."""
_PATIENCE_SECONDS = 30
"""Seconds to go on without a table that could be listed."""

_LISTED = """
SELECT r.prrelid, n.nspname::text, c.relname::text, p.pubname::text
FROM pg_catalog.pg_publication_rel r
JOIN pg_catalog.pg_publication p ON p.oid = r.prpubid
JOIN pg_catalog.pg_class c ON c.oid = r.prrelid
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE p.pubname = ANY(%s)
"""
_MARKED = """
SELECT pubname::text, obj_description(oid, 'pg_publication') FROM pg_catalog.pg_publication
WHERE starts_with(obj_description(oid, 'pg_publication'), %s)
"""
_SLOTS = "SELECT slot_name::text FROM pg_catalog.pg_replication_slots WHERE slot_name = ANY(%s) ORDER BY 1"


@dataclass(frozen=True)
class OwnPublication:
    """A publication's name and mark. ``slot`` is None if we did not make it. ``with_slot``: we made that slot as
    well. ``reads``: the publication of somebody else that the slot reads, if this one only marks the slot as ours."""

    name: str
    slot: str | None = None
    with_slot: bool = False
    reads: str | None = None

    def statements(self, server_version: int, operations: str) -> list[sql.Composed]:
        """The statements that make it: without tables, leaves as themselves, and with stored generated columns if the
        server can (18)."""
        options = [sql.SQL("publish = {}").format(operations), sql.SQL("publish_via_partition_root = false")]
        if server_version >= GENERATED_SINCE:
            options.append(sql.SQL("publish_generated_columns = stored"))
        name = sql.Identifier(self.name)
        mark = f"{MARK}{self.slot}" + (", with the slot" if self.with_slot else "")
        mark += f", which reads publication {self.reads}" if self.reads else ""
        return [
            sql.SQL("CREATE PUBLICATION {} WITH ({})").format(name, sql.SQL(", ").join(options)),
            sql.SQL("COMMENT ON PUBLICATION {} IS {}").format(name, mark),
        ]

    def create(self, conn: psycopg.Connection[Any], operations: str) -> None:
        for statement in self.statements(conn.info.server_version, operations):
            conn.execute(statement)


def read_publication(conn: psycopg.Connection[Any], name: str) -> OwnPublication | None:
    row = conn.execute(
        "SELECT obj_description(oid, 'pg_publication') FROM pg_catalog.pg_publication WHERE pubname = %s", [name]
    ).fetchone()
    if row is None:
        return None
    return _of_comment(name, row[0])


def readers(conn: psycopg.Connection[Any], name: str, slot: str) -> list[str]:
    """Slots of other projects that read the publication, as far as their setup has marked them."""
    rows = conn.execute(_MARKED, [MARK]).fetchall()
    slots = {one.slot for one in (_of_comment(*row) for row in rows) if one.reads == name and one.slot != slot}
    return [found for (found,) in conn.execute(_SLOTS, [list(slots)])]


def _of_comment(name: str, comment: str | None) -> OwnPublication:
    match = _MARK.fullmatch(comment or "")
    return OwnPublication(name, match[1], bool(match[2]), match[3]) if match else OwnPublication(name)


def made_by_us(publication: OwnPublication, slot: str) -> bool:
    """Whether we made the publication for this slot. Another slot's publication is somebody else's, though it bears our
    mark."""
    return publication.slot == slot


def inserts_name(publication: str) -> str:
    """The publication of tables without usable identity. PostgreSQL cuts names at 63 bytes, so we cut the given name
    first."""
    return publication.encode()[: 63 - len("_inserts")].decode(errors="ignore") + "_inserts"


def write_ours(
    conn: psycopg.Connection[Any], name: str, slot: str, patterns: Sequence[str], *, with_slot: bool,
    on_wait: OnWait | None = None, making: Callable[[list[str]], None] = lambda things: None,
) -> list[str]:  # fmt: skip
    """Make our pair of publications, or bring their tables up to date; says what it made or changed.

    ``making`` is called with the publications right before they are there.
    ``on_wait`` is called every few seconds with who alters or locks a table that cannot be listed for that reason.

    Each table is listed in a transaction of its own, and checked once more at its end: while a table is added, a lock
    keeps DDL off it, so a key that was dropped meanwhile cannot leave an unpublishable table behind. If one transaction
    listed all tables, its locks on the first ones would keep everybody waiting who comes after the DDL that it waits
    for.
    """
    pair = _Pair(name, inserts_name(name), patterns)
    done = [f"publication {made}" for made in _make(conn, pair, slot, making, with_slot=with_slot)]
    changed: set[str] = set()
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while misplaced := pair.misplaced(conn):
        settled = [relation for relation in misplaced if _settle(conn, pair, relation)]
        changed |= {publication for relation in settled for publication in relation.listed ^ relation.wanted}
        if settled:
            deadline = time.monotonic() + _PATIENCE_SECONDS
        elif time.monotonic() > deadline:
            raise _blocked(conn, misplaced[0])
        elif on_wait is not None:
            on_wait(alterers(conn, [relation.oid for relation in misplaced]))
    return done + [f"tables of publication {one}" for one in sorted(changed) if f"publication {one}" not in done]


def publish_new(
    conn: psycopg.Connection[Any], name: str, slot: str, patterns: Sequence[str], known: Callable[[], Container[int]]
) -> list[TableName]:  # fmt: skip
    """List in our publications the tables that are meant and that neither lists yet; returns their names. A partitioned
    table that is listed by its leaves gets the new ones of these, if their updates can be published.

    ``known``: relations that were listed before, by OID; whoever took one of them out has had a reason. It is asked if
    any is not listed. Nothing is done to a publication that somebody else made, nor where the server refuses it: the
    role may not, or it is a standby. A table that is locked is left for the next call.
    """
    publication = read_publication(conn, name)
    if publication is None or not made_by_us(publication, slot):
        return []
    pair = _Pair(name, inserts_name(name), patterns, keeps=True)
    unlisted = [relation for relation in pair.misplaced(conn) if not relation.listed]
    before = known() if unlisted else ()
    done: list[TableName] = []
    for relation in unlisted:
        # A table that cannot be listed is that table's trouble; `status` names it.
        with suppress(psycopg.Error):
            if relation.oid not in before and _settle(conn, pair, relation, _BRIEF_SECONDS):
                done.append(relation.name)
    return done


def needed(conn: psycopg.Connection[Any], name: str, patterns: Sequence[str]) -> Changes:
    """The changes that :func:`write_ours` would make."""
    pair = _Pair(name, inserts_name(name), patterns)
    misplaced = pair.misplaced(conn)
    lacking = _lacking(conn, pair)
    altered = {one for relation in misplaced for one in relation.listed ^ relation.wanted}
    return Changes(lacking, sorted(altered - {*lacking}), [one.oid for one in misplaced if one.wanted - one.listed])


def script(
    conn: psycopg.Connection[Any], name: str, slot: str, patterns: Sequence[str], *, with_slot: bool
) -> list[sql.Composed]:
    """The statements that :func:`write_ours` would run, for somebody who has the rights."""
    pair = _Pair(name, inserts_name(name), patterns)
    made = [
        statement
        for lacking in _lacking(conn, pair)
        for statement in OwnPublication(lacking, slot, with_slot).statements(
            conn.info.server_version, pair.operations[lacking]
        )
    ]
    return made + [statement for relation in pair.misplaced(conn) for statement in _moves(relation)]


@dataclass(frozen=True)
class _Listing:
    """One relation, which of our publications list it, and which should."""

    oid: int
    table: int
    """Oid of the table whose storage it is."""
    name: TableName
    listed: frozenset[str]
    wanted: frozenset[str]


@dataclass(frozen=True)
class _Pair:
    """Our publications: ``name`` has the tables followed in full, ``inserts`` those without usable identity."""

    name: str
    inserts: str
    patterns: Sequence[str]
    keeps: bool = False
    """What is listed stays where it is."""

    @property
    def operations(self) -> dict[str, str]:
        return {self.name: "insert, update, delete, truncate", self.inserts: "insert, truncate"}

    def misplaced(self, conn: psycopg.Connection[Any], only: int | None = None) -> list[_Listing]:
        """The relations that are not listed as they should be; with ``only``, those of one table."""
        listed: dict[int, frozenset[str]] = defaultdict(frozenset)
        names: dict[int, TableName] = {}
        for oid, schema, name, publication in conn.execute(_LISTED, [[self.name, self.inserts]]):
            listed[oid] |= {publication}
            names[oid] = TableName(schema, name)
        plan = wanted_tables(conn, self.patterns, only, listed.keys() if self.keeps else ())
        wanted = {
            relation.oid: (item.oid, relation.name, frozenset({self.name if item.follows_updates else self.inserts}))
            for item in plan for relation in item.relations
        }  # fmt: skip
        every = [_Listing(oid, table, name, listed[oid], places) for oid, (table, name, places) in wanted.items()]
        every += [_Listing(oid, oid, names[oid], places, frozenset()) for oid, places in listed.items()
                  if places and oid not in wanted and only in (None, oid) and not marked(str(names[oid]))]  # fmt: skip
        return sorted((one for one in every if one.listed != one.wanted), key=lambda one: one.name)


def _make(
    conn: psycopg.Connection[Any], pair: _Pair, slot: str, making: Callable[[list[str]], None], *, with_slot: bool
) -> list[str]:
    """Make both at once, without tables: START_REPLICATION fails on WAL older than any of them."""
    with conn.transaction():
        lacking = _lacking(conn, pair)
        for name in lacking:
            OwnPublication(name, slot, with_slot).create(conn, pair.operations[name])
        if lacking:
            making([f"publication {name}" for name in lacking])
    return lacking


def _lacking(conn: psycopg.Connection[Any], pair: _Pair) -> list[str]:
    return [name for name in pair.operations if read_publication(conn, name) is None]


def _settle(
    conn: psycopg.Connection[Any], pair: _Pair, relation: _Listing, lock_seconds: float = _LOCK_SECONDS
) -> bool:
    """List one relation where it belongs; returns False if it is locked, or changed meanwhile, or if another session
    has listed it."""
    try:
        with conn.transaction() as scope:
            conn.execute("SELECT set_config('lock_timeout', %s, true)", [str(int(lock_seconds * 1000))])
            for statement in _moves(relation):
                conn.execute(statement)
            if any(one.oid == relation.oid for one in pair.misplaced(conn, relation.table)):
                raise psycopg.Rollback(scope)
            return True
    except (psycopg.errors.LockNotAvailable, psycopg.errors.UndefinedTable, psycopg.errors.UndefinedObject,
            psycopg.errors.DuplicateObject):  # fmt: skip
        pass
    return False


def _blocked(conn: psycopg.Connection[Any], relation: _Listing) -> CopyBlocked:
    who = ", ".join(str(one) for one in alterers(conn, [relation.oid])) or "somebody who has just left"
    return CopyBlocked(f"cannot be published, for it is altered or locked by {who}", thing=f"table {relation.name}",
                       do="run again when that transaction has ended")  # fmt: skip


def _moves(relation: _Listing) -> list[sql.Composed]:
    """The statements that list a relation where it belongs, and nowhere else."""
    return [
        _alter(publication, verb, relation.name)
        for verb, publications in (
            ("DROP", relation.listed - relation.wanted), ("ADD", relation.wanted - relation.listed)
        )
        for publication in sorted(publications)
    ]  # fmt: skip


def _alter(publication: str, verb: str, table: TableName) -> sql.Composed:
    """The statement says ONLY: an inheritance parent would bring its children, whose identities nobody has checked."""
    return sql.SQL("ALTER PUBLICATION {} {} TABLE ONLY {}").format(
        sql.Identifier(publication), sql.SQL(verb), sql.Identifier(table.schema, table.name)
    )
