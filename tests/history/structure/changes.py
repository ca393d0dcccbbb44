"""Schema changes of the source, as SQL, some with an undo.

Each function here makes a schema change for tables of the current catalog, or returns None if no table allows the
change. PostgreSQL may still refuse the change, which is not a failure.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.history.structure.source import Column, Schemas, Table
from tests.history.values import HOSTILE, default


@dataclass(frozen=True)
class SchemaChange:
    """A schema change. ``on``: OID of the changed table, which the next writes prefer. ``alone``: whether the
    statements cannot be run in a transaction block."""

    do: tuple[str, ...]
    undo: tuple[str, ...] = ()
    on: int = 0
    alone: bool = False


@dataclass(frozen=True)
class Site:
    """What the functions of this module need: the current tables, the publication, and the random generator."""

    tables: Sequence[Table]
    chance: random.Random
    schemas: Schemas
    publication: str
    scope: str
    """How the publication lists its tables: ``tables``, ``all`` or ``schema``, see ``SCOPES`` of :mod:`~.generate`."""
    via_root: bool
    reader: str
    """The role with which pgcdc connects to the source."""
    few: bool
    """Whether this role needs a GRANT to read a table. If not, the role may read all tables."""

    def pick(self, among: Sequence[Table]) -> Table | None:
        return self.chance.choice(list(among)) if among else None

    @property
    def plain(self) -> list[Table]:
        return [table for table in self.tables if table.parent is None and not table.partitioned]

    @property
    def roots(self) -> list[Table]:
        return [table for table in self.tables if table.partitioned]

    @property
    def leaves(self) -> list[Table]:
        return [table for table in self.tables if table.parent is not None]

    @property
    def whole(self) -> list[Table]:
        """Tables that have their own mirror: all tables except partitions."""
        return [*self.plain, *self.roots]

    @property
    def odd(self) -> list[Table]:
        """Tables of :attr:`whole` that are partitioned or have no key. If there are none, all of :attr:`whole`."""
        return [table for table in self.whole if table.partitioned or not table.key] or self.whole

    @property
    def storing(self) -> list[Table]:
        return [*self.plain, *self.leaves]

    def column(self, table: Table, *types: str) -> Column | None:
        columns = [column for type_ in types for column in table.typed(type_)]
        return self.chance.choice(columns) if columns else None

    def fresh(self, stem: str) -> str:
        return f"{stem}{self.chance.randrange(1000)}"


ALL_KINDS = "insert, update, delete, truncate"
FIRST_NEW = 3
"""The lowest number of a partition that a schema change creates: ``p3`` and higher."""

Build = Callable[[Site], SchemaChange | None]
CHANGES: dict[str, Build] = {}
"""The functions of this module by the name that a step uses."""


def _change(build: Build) -> Build:
    CHANGES[build.__name__.strip("_").replace("_", " ")] = build
    return build


# Names ------------------------------------------------------------------------------------------


@_change
def rename(site: Site) -> SchemaChange | None:
    table = site.pick(site.tables)
    if table is None:
        return None
    name = f"{table.name[:20]}_x"
    away = f'"{table.schema}"."{name}"'
    return SchemaChange(
        (f'ALTER TABLE {table.sql} RENAME TO "{name}"',),
        (f'ALTER TABLE {away} RENAME TO "{table.name}"',), table.oid,
    )  # fmt: skip


@_change
def swap_tables(site: Site) -> SchemaChange | None:
    alike = [one for one in site.plain if len([o for o in site.plain if _shape(o) == _shape(one)]) > 1]
    one = site.pick(alike)
    other = site.pick([o for o in alike if one and o is not one and _shape(o) == _shape(one)])
    if one is None or other is None or one.schema != other.schema:
        return None
    swap = (
        f'ALTER TABLE {one.sql} RENAME TO "between"',
        f'ALTER TABLE {other.sql} RENAME TO "{one.name}"',
        f'ALTER TABLE "{one.schema}"."between" RENAME TO "{other.name}"',
    )
    return SchemaChange(swap, swap, one.oid)


@_change
def set_schema(site: Site) -> SchemaChange | None:
    table = site.pick(site.tables)
    if table is None:
        return None
    other = site.schemas.away if table.schema == site.schemas.app else site.schemas.app
    return SchemaChange(
        (f"ALTER TABLE {table.sql} SET SCHEMA {other}",),
        (f'ALTER TABLE {other}."{table.name}" SET SCHEMA {table.schema}',), table.oid,
    )  # fmt: skip


@_change
def rename_column(site: Site) -> SchemaChange | None:
    table = site.pick(site.whole)
    column = site.column(table, "integer", "text") if table else None
    if table is None or column is None:
        return None
    return SchemaChange(
        (f'ALTER TABLE {table.sql} RENAME "{column.name}" TO "{column.name}_x"',),
        (f'ALTER TABLE {table.sql} RENAME "{column.name}_x" TO "{column.name}"',), table.oid,
    )  # fmt: skip


@_change
def swap_columns(site: Site) -> SchemaChange | None:
    table = site.pick([table for table in site.whole if len(table.typed("integer")) > 1])
    if table is None:
        return None
    a, b = (column.name for column in site.chance.sample(table.typed("integer"), 2))
    swap = tuple(
        f'ALTER TABLE {table.sql} RENAME "{old}" TO "{new}"' for old, new in ((a, "between"), (b, a), ("between", b))
    )
    return SchemaChange(swap, swap, table.oid)


# Types ------------------------------------------------------------------------------------------


@_change
def rename_value(site: Site) -> SchemaChange | None:
    old = site.chance.choice(("sad", "so so", "glad"))
    table = next((table for table in site.tables if table.typed("comp")), None)
    return SchemaChange(
        (f"ALTER TYPE {site.schemas.app}.mood RENAME VALUE '{old}' TO '{old}_x'",),
        (f"ALTER TYPE {site.schemas.app}.mood RENAME VALUE '{old}_x' TO '{old}'",), table.oid if table else 0,
    )  # fmt: skip


@_change
def add_attribute(site: Site) -> SchemaChange | None:
    type_, name = site.chance.choice(("comp", "part")), site.fresh("z")
    table = next((table for table in site.tables if table.typed("comp")), None)
    return SchemaChange(
        (f"ALTER TYPE {site.schemas.app}.{type_} ADD ATTRIBUTE {name} int CASCADE",),
        (f"ALTER TYPE {site.schemas.app}.{type_} DROP ATTRIBUTE {name} CASCADE",), table.oid if table else 0,
    )  # fmt: skip


@_change
def drop_attribute(site: Site) -> SchemaChange | None:
    type_, name = site.chance.choice((("comp", "b"), ("part", "n")))
    return SchemaChange((f"ALTER TYPE {site.schemas.app}.{type_} DROP ATTRIBUTE {name} CASCADE",))


# Columns ----------------------------------------------------------------------------------------


@_change
def add_column(site: Site) -> SchemaChange | None:
    table, name = site.pick(site.whole), site.fresh("k")
    kind = site.chance.choice(
        ("int", "text", "int DEFAULT 7", "text NOT NULL DEFAULT 'd'", "int DEFAULT (random() * 9)::int",
         "int GENERATED ALWAYS AS (1 + 1) STORED", "serial")
    )  # fmt: skip
    if table is None:
        return None
    return SchemaChange(
        (f"ALTER TABLE {table.sql} ADD {name} {kind}",), (f"ALTER TABLE {table.sql} DROP {name}",), table.oid
    )


@_change
def drop_column(site: Site) -> SchemaChange | None:
    """Drops a column. The undo adds the column again, without its values."""
    table = site.pick(site.whole)
    column = site.column(table, "integer", "text") if table else None
    if table is None or column is None:
        return None
    return SchemaChange(
        (f'ALTER TABLE {table.sql} DROP "{column.name}"',),
        (f'ALTER TABLE {table.sql} ADD "{column.name}" {column.type}',), table.oid,
    )  # fmt: skip


@_change
def add_constant(site: Site) -> SchemaChange | None:
    """Adds a column with a constant default or with no default. PostgreSQL rewrites no row for this."""
    table, name = site.pick(site.odd), site.fresh("k")
    kind = site.chance.choice(("int DEFAULT 7", "text NOT NULL DEFAULT 'd'", "int", "numeric(9, 2) DEFAULT 'NaN'"))
    if table is None:
        return None
    return SchemaChange(
        (f"ALTER TABLE {table.sql} ADD {name} {kind}",), (f"ALTER TABLE {table.sql} DROP {name}",), table.oid
    )


@_change
def make_anew(site: Site) -> SchemaChange | None:
    """Replaces a column by a new column of the same name, which has the same value in all rows."""
    table = site.pick(site.odd)
    column = site.column(table, "integer", "text") if table else None
    if table is None or column is None:
        return None
    anew = f'DROP "{column.name}", ADD "{column.name}" {column.type} DEFAULT \'3\''
    return SchemaChange((f"ALTER TABLE {table.sql} {anew}",), (), table.oid)


@_change
def drop_one(site: Site) -> SchemaChange | None:
    """Drops a column, so that rows that differ only in this column become equal."""
    table = site.pick(site.odd)
    column = site.column(table, "integer", "text", "numeric(9,2)") if table else None
    if table is None or column is None or len(table.columns) < 3:
        return None
    return SchemaChange((f'ALTER TABLE {table.sql} DROP "{column.name}"',), (), table.oid)


@_change
def other_text(site: Site) -> SchemaChange | None:
    table = site.pick(site.odd)
    column = site.column(table, "text") if table else None
    if table is None or column is None:
        return None
    change = f'ALTER TABLE {table.sql} ALTER "{column.name}" TYPE'
    return SchemaChange((f"{change} varchar",), (f"{change} text",), table.oid)


@_change
def drop_expression(site: Site) -> SchemaChange | None:
    found = [(table, column) for table in site.plain for column in table.columns if column.generated]
    if not found:
        return None
    table, column = site.chance.choice(found)
    return SchemaChange((f'ALTER TABLE {table.sql} ALTER "{column.name}" DROP EXPRESSION',), (), table.oid)


@_change
def alter_type(site: Site) -> SchemaChange | None:
    table = site.pick(site.whole)
    column = site.column(table, "integer") if table else None
    if table is None or column is None:
        return None
    type_ = site.chance.choice(("bigint", f'int USING "{column.name}" + 1', "text", "numeric(12, 2)"))
    return SchemaChange(
        (f'ALTER TABLE {table.sql} ALTER "{column.name}" TYPE {type_}',),
        (f'ALTER TABLE {table.sql} ALTER "{column.name}" TYPE int USING "{column.name}"::int',), table.oid,
    )  # fmt: skip


# Keys -------------------------------------------------------------------------------------------


@_change
def drop_key(site: Site) -> SchemaChange | None:
    table = site.pick([table for table in site.plain if table.key])
    if table is None:
        return None
    return SchemaChange(
        (f'ALTER TABLE {table.sql} DROP CONSTRAINT "{table.key}"',), (f"ALTER TABLE {table.sql} ADD PRIMARY KEY (id)",),
        table.oid,
    )  # fmt: skip


@_change
def add_key(site: Site) -> SchemaChange | None:
    table = site.pick([table for table in site.whole if not table.key])
    if table is None:
        return None
    return SchemaChange(
        (
            f"DELETE FROM {table.sql} a USING {table.sql} b WHERE a.id = b.id AND a.ctid > b.ctid",
            f"ALTER TABLE {table.sql} ADD PRIMARY KEY (id)",
        ),
        (),
        table.oid,
    )


@_change
def move_key(site: Site) -> SchemaChange | None:
    table = site.pick([table for table in site.whole if table.key])
    column = site.column(table, "integer") if table else None
    if table is None or column is None:
        return None
    return SchemaChange(
        (f'ALTER TABLE {table.sql} DROP CONSTRAINT "{table.key}", ADD PRIMARY KEY (id, "{column.name}")',), (),
        table.oid,
    )  # fmt: skip


@_change
def identity(site: Site) -> SchemaChange | None:
    table = site.pick(site.storing)
    if table is None:
        return None
    how = site.chance.choice(("FULL", "DEFAULT", "NOTHING"))
    return SchemaChange(
        (f"ALTER TABLE {table.sql} REPLICA IDENTITY {how}",), (f"ALTER TABLE {table.sql} REPLICA IDENTITY DEFAULT",),
        table.oid,
    )  # fmt: skip


# Storage ----------------------------------------------------------------------------------------


@_change
def unlogged(site: Site) -> SchemaChange | None:
    """Makes a table UNLOGGED. PostgreSQL refuses this if the publication lists the table itself."""
    table = site.pick(site.storing)
    if table is None:
        return None
    return SchemaChange((f"ALTER TABLE {table.sql} SET UNLOGGED",), (f"ALTER TABLE {table.sql} SET LOGGED",), table.oid)


@_change
def vacuum_full(site: Site) -> SchemaChange | None:
    table = site.pick(site.storing)
    return SchemaChange((f"VACUUM FULL {table.sql}",), (), table.oid, alone=True) if table else None


@_change
def cluster(site: Site) -> SchemaChange | None:
    table = site.pick([table for table in site.storing if table.key])
    return SchemaChange((f'CLUSTER {table.sql} USING "{table.key}"',), (), table.oid) if table else None


@_change
def truncate(site: Site) -> SchemaChange | None:
    table = site.pick(site.tables)
    return SchemaChange((f"TRUNCATE {table.sql}",), (), table.oid) if table else None


# Partitions -------------------------------------------------------------------------------------


@_change
def attach(site: Site) -> SchemaChange | None:
    root = site.pick(site.roots)
    loose = site.pick([table for table in site.plain if table.place is not None])
    if root is None or loose is None:
        return None
    return SchemaChange((_attach(root, loose),), (f"ALTER TABLE {root.sql} DETACH PARTITION {loose.sql}",), loose.oid)


@_change
def detach(site: Site) -> SchemaChange | None:
    return _detached(site, "")


@_change
def detach_concurrently(site: Site) -> SchemaChange | None:
    return _detached(site, " CONCURRENTLY")


@_change
def new_partition(site: Site) -> SchemaChange | None:
    """Creates a partition. The undo drops the partition with its rows. If partitions are published via their root,
    there is no undo."""
    root, place = site.pick(site.roots), FIRST_NEW + site.chance.randrange(3)
    if root is None:
        return None
    name = f'{site.schemas.app}."p{place}"'
    bounds = f"FROM ({place}0) TO ({place + 1}0)"
    return SchemaChange(
        (
            f"CREATE TABLE {name} PARTITION OF {root.sql} (CHECK (id / 10 = {place})) FOR VALUES {bounds}",
            f"INSERT INTO {root.sql} (id) VALUES ({place}1)",
        ),
        () if site.via_root else (f"DROP TABLE {name}",),
        root.oid,
    )


@_change
def unlogged_partition(site: Site) -> SchemaChange | None:
    """Creates an UNLOGGED partition. The stream has no rows of the partition until the undo makes it LOGGED."""
    root, place = site.pick(site.roots), FIRST_NEW + site.chance.randrange(3)
    if root is None:
        return None
    name = f'{site.schemas.app}."p{place}"'
    return SchemaChange(
        (
            f"CREATE UNLOGGED TABLE {name} PARTITION OF {root.sql} FOR VALUES FROM ({place}0) TO ({place + 1}0)",
            f"INSERT INTO {root.sql} (id) VALUES ({place}1)",
        ),
        (
            f"UPDATE {name} SET id = {place}2 WHERE id = {place}1",
            f"ALTER TABLE {name} SET LOGGED",
            f"INSERT INTO {root.sql} (id) VALUES ({place}3)",
        ),
        root.oid,
    )


# Whole tables -----------------------------------------------------------------------------------


@_change
def drop_and_make(site: Site) -> SchemaChange | None:
    """Replaces the table by a new table with the same name and columns."""
    table = site.pick([table for table in site.plain if table.schema == site.schemas.app])
    if table is None:
        return None
    return SchemaChange(
        (
            f"CREATE TABLE {site.schemas.app}.spare (LIKE {table.sql} INCLUDING ALL)",
            f"DROP TABLE {table.sql}",
            f'ALTER TABLE {site.schemas.app}.spare RENAME TO "{table.name}"',
            f"INSERT INTO {table.sql} (id) VALUES ({(table.place or 0) * 10 + 5})",
        )
    )


@_change
def swap_deploy(site: Site) -> SchemaChange | None:
    """Creates a copy of a table, with its rows. The copy takes the table's name, and the original table gets a
    different name."""
    table = site.pick(site.plain)
    if table is None:
        return None
    new, old = f'"{table.schema}".fresh', f"{table.name[:20]}_old"
    names = ", ".join(f'"{column.name}"' for column in table.columns if not column.generated)
    return SchemaChange(
        (f"CREATE TABLE {new} (LIKE {table.sql} INCLUDING ALL)",
         f"INSERT INTO {new} ({names}) SELECT {names} FROM {table.sql}",
         f'ALTER TABLE {table.sql} RENAME TO "{old}"', f'ALTER TABLE {new} RENAME TO "{table.name}"'),
        (f'ALTER TABLE {table.sql} RENAME TO fresh', f'ALTER TABLE "{table.schema}"."{old}" RENAME TO "{table.name}"'),
        table.oid,
    )  # fmt: skip


@_change
def new_table(site: Site) -> SchemaChange | None:
    name = f"{site.schemas.app}.{site.fresh('t')}"
    return SchemaChange(
        (
            f"CREATE TABLE {name} (id int PRIMARY KEY, n int, m int, s text)",
            f"INSERT INTO {name} VALUES (1, 1, 1, 'new')",
        ),
        (f"DROP TABLE {name}",),
    )


@_change
def drop_table(site: Site) -> SchemaChange | None:
    table = site.pick([*site.plain, *site.leaves])
    return SchemaChange((f"DROP TABLE {table.sql}",)) if table and len(site.plain) > 2 else None


# Publications -----------------------------------------------------------------------------------


@_change
def unpublish(site: Site) -> SchemaChange | None:
    """Removes a table or schema from the publication. The undo adds the table or schema again."""
    if site.scope == "schema":
        change = f'ALTER PUBLICATION "{site.publication}" %s TABLES IN SCHEMA {site.schemas.app}'
        return SchemaChange((change % "DROP",), (change % "ADD",))
    table = site.pick(site.storing)
    if site.scope == "all" or table is None:
        return None
    change = f'ALTER PUBLICATION "{site.publication}" %s TABLE ONLY {table.sql}'
    return SchemaChange((change % "DROP",), (change % "ADD",), table.oid)


@_change
def leave_out(site: Site) -> SchemaChange | None:
    """Excludes some operations (insert, update, delete, truncate) from the publication."""
    change = f"ALTER PUBLICATION \"{site.publication}\" SET (publish = '%s')"
    some = site.chance.choice(("insert, update, delete", "insert, update, truncate", "insert, delete", "insert",
                               "update, delete, truncate"))  # fmt: skip
    return SchemaChange((change % some,), (change % ALL_KINDS,))


# Rights and defaults ----------------------------------------------------------------------------


@_change
def revoke(site: Site) -> SchemaChange | None:
    """Revokes the rights on a table or schema from the role with which pgcdc connects. Sometimes the role keeps the
    right to read the column ``id``."""
    table = site.pick(site.tables)
    if not site.few or table is None:
        return None
    what, on = site.chance.choice((("SELECT", table.sql), ("SELECT", table.sql), ("USAGE", f"SCHEMA {table.schema}")))
    some = f"GRANT SELECT (id) ON {table.sql} TO {site.reader}"
    return SchemaChange(
        (f"REVOKE {what} ON {on} FROM {site.reader}", *([some] * site.chance.randrange(2))),
        (f"GRANT {what} ON {on} TO {site.reader}",),
        table.oid,
    )


@_change
def grant(site: Site) -> SchemaChange | None:
    """Grants the role with which pgcdc connects the right to read all tables. New tables lack this right until then."""
    return SchemaChange(granted(site.schemas, site.reader)) if site.few else None


@_change
def change_default(site: Site) -> SchemaChange | None:
    change, role = site.chance.choice(HOSTILE), site.chance.choice((None, site.reader))
    return SchemaChange((default(f"SET {change}", role),), (default(f"RESET {change.split()[0]}", role),))


def granted(schemas: Schemas, reader: str) -> tuple[str, ...]:
    names = ", ".join(schemas.both)
    return f"GRANT USAGE ON SCHEMA {names} TO {reader}", f"GRANT SELECT ON ALL TABLES IN SCHEMA {names} TO {reader}"


def _shape(table: Table) -> tuple[str, ...]:
    return tuple(column.type for column in table.columns)


def _attach(root: Table, leaf: Table) -> str:
    place = leaf.place or 0
    return f"ALTER TABLE {root.sql} ATTACH PARTITION {leaf.sql} FOR VALUES FROM ({place}0) TO ({place + 1}0)"


def _detached(site: Site, how: str) -> SchemaChange | None:
    root, leaf = site.pick(site.roots), site.pick([leaf for leaf in site.leaves if leaf.place is not None])
    if root is None or leaf is None:
        return None
    detach = f"ALTER TABLE {root.sql} DETACH PARTITION {leaf.sql}{how}"
    return SchemaChange((detach,), (_attach(root, leaf),), leaf.oid, alone=bool(how))
