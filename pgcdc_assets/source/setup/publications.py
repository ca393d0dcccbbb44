"""Creates our two publications, marks them as ours by a comment, and updates the tables that they list. Which tables
these are depends on the setting ``tables`` and on replica identities."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

import psycopg
from psycopg import sql

from pgcdc_assets.core.encoding import marked
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import CopyBlocked
from pgcdc_assets.settings import Settings
from pgcdc_assets.source.catalog.published import GENERATED_SINCE, MARK
from pgcdc_assets.source.setup.selection import wanted_tables
from pgcdc_assets.source.slot.blockers import OnWait, alterers
from pgcdc_assets.source.slot.slot import slot_status

_MARK = re.compile(MARK + r"(\w+)(, with the slot)?(?:, which reads publication (.+))?", re.DOTALL)
_LOCK_SECONDS = 2
"""lock_timeout in seconds for one table. Adding a table to a publication waits for DDL, VACUUM or an index build on the
table (SHARE UPDATE EXCLUSIVE), but not for writers. We hold no other table's lock during the wait, so we delay sessions
on this table only. The timeout is longer than deadlock_timeout (default: a second), after which PostgreSQL cancels an
autovacuum that we wait for."""
_BRIEF_SECONDS = 0.1
"""lock_timeout in seconds for a table that is added while a sync runs. If it expires, a later call tries again."""
_PATIENCE_SECONDS = 30
"""Setup gives up if it could change no table of a publication for this many seconds, because the tables are locked."""

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
    """A publication, and what its comment says about its origin. ``slot``: the slot for which we made the publication;
    None if we did not make it. ``with_slot``: whether we also made that slot. ``reads`` is set if this publication
    lists no table and only marks the slot as ours. It names the publication that the slot reads, which somebody else
    made."""

    name: str
    slot: str | None = None
    with_slot: bool = False
    reads: str | None = None

    @property
    def maker(self) -> str:
        """Who made the publication, in words for a finding on a publication that is not ours."""
        return "was not made by pgcdc" if self.slot is None else f"was made by pgcdc for slot {self.slot}"

    def statements(self, server_version: int, operations: str) -> list[sql.Composed]:
        """Returns the statements that create the publication, without tables. Leaves are published under their own
        names. Stored generated columns are published since PostgreSQL 18."""
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
    """Returns the slots of other projects that read the publication. Finds only slots that setup has marked by a
    publication of its own (:attr:`OwnPublication.reads`)."""
    rows = conn.execute(_MARKED, [MARK]).fetchall()
    slots = {one.slot for one in (_of_comment(*row) for row in rows) if one.reads == name and one.slot != slot}
    return [found for (found,) in conn.execute(_SLOTS, [list(slots)])]


def _of_comment(name: str, comment: str | None) -> OwnPublication:
    match = _MARK.fullmatch(comment or "")
    return OwnPublication(name, match[1], bool(match[2]), match[3]) if match else OwnPublication(name)


def made_by_us(publication: OwnPublication, slot: str) -> bool:
    """Whether we made the publication for this slot. False for a publication that we made for another slot."""
    return publication.slot == slot


def inserts_name(publication: str) -> str:
    """Returns the name of the publication for tables without a usable replica identity. PostgreSQL truncates names to
    63 bytes, so the given name is truncated first, to keep the suffix."""
    return publication.encode()[: 63 - len("_inserts")].decode(errors="ignore") + "_inserts"


@dataclass(frozen=True)
class Changes:
    """The changes that setup has to make to publications: ``make`` names the missing publications, and ``alter`` the
    publications whose tables must change. Both need more rights than reading the tables."""

    make: Sequence[str] = ()
    alter: Sequence[str] = ()
    tables: Sequence[int] = ()
    """OIDs of the relations that have to be added to publications."""


@dataclass(frozen=True)
class _Listing:
    """A relation, our publications that list it, and our publications that should list it."""

    oid: int
    table: int
    """OID of the relation's table: the root of a leaf, otherwise the relation itself."""
    name: TableName
    listed: frozenset[str]
    wanted: frozenset[str]


@dataclass(frozen=True)
class OwnPair:
    """Our two publications. ``name`` publishes all changes of its tables. ``inserts`` publishes only inserts and
    truncates, of tables without a usable replica identity.

    Each table is added in a separate transaction, which locks the table against DDL and then checks its key again. So a
    table whose key was dropped just before is not added. One transaction for all tables would wait for DDL on one table
    while its locks on the other tables block other sessions.
    """

    conn: psycopg.Connection[Any]
    name: str
    slot: str
    patterns: Sequence[str]

    @classmethod
    def of(cls, conn: psycopg.Connection[Any], settings: Settings) -> Self:
        return cls(conn, settings.publication, settings.slot, settings.tables)

    @property
    def inserts(self) -> str:
        return inserts_name(self.name)

    @property
    def operations(self) -> dict[str, str]:
        return {self.name: "insert, update, delete, truncate", self.inserts: "insert, truncate"}

    def is_foreign(self) -> bool:
        """Whether somebody else made the publication ``name``. pgcdc then uses it unchanged, and makes neither of its
        own two publications."""
        publication = read_publication(self.conn, self.name)
        return publication is not None and not made_by_us(publication, self.slot)

    def write(
        self, on_wait: OnWait | None = None, making: Callable[[list[str]], None] = lambda things: None
    ) -> list[str]:
        """Creates the two publications, or updates their tables. Returns what was created or changed. ``making`` is
        called with the publications right before their creation is committed. ``on_wait`` is called every few seconds
        with the transactions whose locks prevent that a table is added or removed."""
        done = [f"publication {made}" for made in self._make(making)]
        changed: set[str] = set()
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while misplaced := self._misplaced():
            settled = [relation for relation in misplaced if self._settle(relation)]
            changed |= {publication for relation in settled for publication in relation.listed ^ relation.wanted}
            if settled:
                deadline = time.monotonic() + _PATIENCE_SECONDS
            elif time.monotonic() > deadline:
                raise _blocked(self.conn, misplaced[0])
            elif on_wait is not None:
                on_wait(alterers(self.conn, [relation.oid for relation in misplaced]))
        return done + [f"tables of publication {one}" for one in sorted(changed) if f"publication {one}" not in done]

    def add_new(self, known: Callable[[], Container[int]]) -> list[TableName]:
        """Adds selected tables that neither of our publications lists, and returns their names.

        If the publication lists the leaves of a partitioned table, and not the table itself, new leaves are added if
        their updates can be published. ``known`` returns the OIDs of relations that were listed earlier. These
        relations are not added again, because somebody removed them on purpose. ``known`` is called only if a relation
        is not listed. Adds nothing if somebody else made the publication, if our role may not change it, or on a
        standby. A locked table is left for the next call.
        """
        publication = read_publication(self.conn, self.name)
        if publication is None or not made_by_us(publication, self.slot):
            return []
        unlisted = [relation for relation in self._misplaced(keeps=True) if not relation.listed]
        before = known() if unlisted else ()
        done: list[TableName] = []
        for relation in unlisted:
            # If one table cannot be added, the other tables are still added. `pgcdc status` names the table that is
            # missing.
            with suppress(psycopg.Error):
                if relation.oid not in before and self._settle(relation, _BRIEF_SECONDS, keeps=True):
                    done.append(relation.name)
        return done

    def needed(self) -> Changes:
        """Returns the changes that :meth:`write` would make."""
        misplaced, lacking = self._misplaced(), self._lacking()
        altered = {one for relation in misplaced for one in relation.listed ^ relation.wanted}
        return Changes(lacking, sorted(altered - {*lacking}), [one.oid for one in misplaced if one.wanted - one.listed])

    def statements(self) -> list[sql.Composed]:
        """Returns the statements that :meth:`write` would run, as a script for a user with more rights than ours."""
        version, with_slot = self.conn.info.server_version, self._with_slot()
        made = [
            statement for name in self._lacking()
            for statement in OwnPublication(name, self.slot, with_slot).statements(version, self.operations[name])
        ]  # fmt: skip
        return made + [statement for relation in self._misplaced() for statement in _moves(relation)]

    def _with_slot(self) -> bool:
        publication = read_publication(self.conn, self.name)
        return publication.with_slot if publication else slot_status(self.conn, self.slot) is None

    def _misplaced(self, only: int | None = None, *, keeps: bool = False) -> list[_Listing]:
        """Returns the relations that must be added to, or removed from, one of our publications. ``only``: the OID of
        the one table to check. With ``keeps``, relations that are already listed stay in their publication."""
        listed: dict[int, frozenset[str]] = defaultdict(frozenset)
        names: dict[int, TableName] = {}
        for oid, schema, name, publication in self.conn.execute(_LISTED, [[self.name, self.inserts]]):
            listed[oid] |= {publication}
            names[oid] = TableName(schema, name)
        plan = wanted_tables(self.conn, self.patterns, only, listed.keys() if keeps else ())
        wanted = {
            relation.oid: (item.oid, relation.name, frozenset({self.name if item.follows_updates else self.inserts}))
            for item in plan for relation in item.relations
        }  # fmt: skip
        every = [_Listing(oid, table, name, listed[oid], places) for oid, (table, name, places) in wanted.items()]
        every += [_Listing(oid, oid, names[oid], places, frozenset()) for oid, places in listed.items()
                  if places and oid not in wanted and only in (None, oid) and not marked(str(names[oid]))]  # fmt: skip
        return sorted((one for one in every if one.listed != one.wanted), key=lambda one: one.name)

    def _make(self, making: Callable[[list[str]], None]) -> list[str]:
        """Creates both publications in one transaction. If one were created later, the stream would fail on the WAL
        that was written before its creation."""
        with_slot = self._with_slot()
        with self.conn.transaction():
            lacking = self._lacking()
            for name in lacking:
                OwnPublication(name, self.slot, with_slot).create(self.conn, self.operations[name])
            if lacking:
                making([f"publication {name}" for name in lacking])
        return lacking

    def _lacking(self) -> list[str]:
        return [name for name in self.operations if read_publication(self.conn, name) is None]

    def _settle(self, relation: _Listing, lock_seconds: float = _LOCK_SECONDS, *, keeps: bool = False) -> bool:
        """Lists one relation in the right publication. Returns False, and changes nothing, if the relation is locked or
        another session has changed it in the meantime."""
        try:
            with self.conn.transaction() as scope:
                self.conn.execute("SELECT set_config('lock_timeout', %s, true)", [str(int(lock_seconds * 1000))])
                for statement in _moves(relation):
                    self.conn.execute(statement)
                if any(one.oid == relation.oid for one in self._misplaced(relation.table, keeps=keeps)):
                    raise psycopg.Rollback(scope)
                return True
        except (psycopg.errors.LockNotAvailable, psycopg.errors.UndefinedTable, psycopg.errors.UndefinedObject,
                psycopg.errors.DuplicateObject):  # fmt: skip
            pass
        return False


def _blocked(conn: psycopg.Connection[Any], relation: _Listing) -> CopyBlocked:
    who = ", ".join(str(one) for one in alterers(conn, [relation.oid])) or "a session that has just ended"
    return CopyBlocked(f"cannot be published, because it is altered or locked by {who}", thing=f"table {relation.name}",
                       do="run the command again when that transaction has ended")  # fmt: skip


def _moves(relation: _Listing) -> list[sql.Composed]:
    """Returns the statements that list a relation in the right publication and in no other publication of ours."""
    return [
        _alter(publication, verb, relation.name)
        for verb, publications in (
            ("DROP", relation.listed - relation.wanted), ("ADD", relation.wanted - relation.listed)
        )
        for publication in sorted(publications)
    ]  # fmt: skip


def _alter(publication: str, verb: str, table: TableName) -> sql.Composed:
    """Uses ONLY. Otherwise an inheritance parent would be listed with its children, which were not checked."""
    return sql.SQL("ALTER PUBLICATION {} {} TABLE ONLY {}").format(
        sql.Identifier(publication), sql.SQL(verb), sql.Identifier(table.schema, table.name)
    )
