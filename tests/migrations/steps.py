"""The migrations: schema changes in the SQL that Rails, Django, Alembic and Flyway send."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum


class Base(StrEnum):
    KEYED = "keyed"
    PARTED = "partitioned"
    """A partitioned table of which a column was dropped. One partition was created before the drop, the other
    partitions after it."""


class Result(StrEnum):
    FOLLOWED = "followed"
    """The expected result: the sync changes the mirror without copying the table again."""
    COPIED = "copied by itself"
    """The expected result: the sync copies the table again, because PostgreSQL rewrote the rows, or because row
    messages do not show which columns they have."""


@dataclass(frozen=True)
class Migration:
    """``sql``: statements on table ``t`` in its own schema. ``late``: the result that is expected instead of ``result``
    if the catalog is read only after rows with the old and the new columns were written. None if the same result is
    expected then."""

    tool: str
    what: str
    sql: tuple[str, ...]
    result: Result = Result.FOLLOWED
    late: Result | None = None
    since: int = 14
    """The first PostgreSQL version that supports the statements."""
    base: Base = Base.KEYED

    @property
    def name(self) -> str:
        return f"{self.tool}: {self.what}{f', {self.base}' * (self.base is not Base.KEYED)}"

    @property
    def table(self) -> str:
        """The SQL that creates the table with its rows."""
        if self.base is Base.PARTED:
            return _made(", gone int, PRIMARY KEY (id)", " PARTITION BY RANGE (id)", *_PARTS)
        return BASE


_PARTS = (
    "CREATE TABLE t_low PARTITION OF t FOR VALUES FROM (0) TO (4)", "ALTER TABLE t DROP gone",
    "CREATE TABLE t_mid PARTITION OF t FOR VALUES FROM (4) TO (8)", "CREATE TABLE t_rest PARTITION OF t DEFAULT",
)  # fmt: skip


def _made(more: str, how: str, *statements: str) -> str:
    """Returns ``BASE`` without its primary key, with ``more`` at the end of the list of columns, ``how`` after that
    list, and ``statements`` before the INSERT."""
    text = BASE.replace("id bigint PRIMARY KEY", "id bigint NOT NULL").replace(
        "last text\n);", f"last text{more}\n){how};"
    )
    head, rows = text.split("INSERT", 1)
    return f"{head}{'; '.join(statements)}; INSERT{rows}"


BASE = """
CREATE TYPE mood AS ENUM ('sad', 'ok');
CREATE DOMAIN short AS varchar(30);
CREATE TABLE t (
  id bigint PRIMARY KEY, name varchar(20) DEFAULT 'n', note text, qty integer, price numeric(10,2), at timestamptz,
  flag boolean, data jsonb, m mood, label short, code varchar(10), last text
);
INSERT INTO t SELECT g, 'name ' || g, 'note ' || g, g, g / 4.0, '2024-01-01', g % 2 = 0, '{}', 'sad', 'l' || g,
  'c' || g, 'last' FROM generate_series(1, 8) g
"""
"""The SQL that creates the table ``t`` of a migration with the base ``KEYED``, with its rows."""

_TYPED = (
    ("integer", "7"), ("bigint", "7000000000"), ("smallint", "3"), ("boolean", "true"), ("text", "'it''s'"),
    ("varchar(50)", "''"), ("numeric(12,3)", "1.500"), ("numeric", "0.10"), ("double precision", "0.1"),
    ("real", "'NaN'"), ("date", "'2024-02-29'"), ("timestamp", "'2024-01-01 00:00:00.123'"),
    ("timestamptz", "'2024-01-01 00:00:00+02'"), ("uuid", "'6b3e0e0e-0000-4000-8000-00000000abcd'"),
    ("jsonb", """'{"a": [1, null]}'"""), ("json", "'[ 1 ]'"), ("bytea", "'\\x00ff'"), ("inet", "'10.0.0.1/8'"),
    ("interval", "'1 day'"), ("integer[]", "'{1,2}'"), ("text[]", """'{a,NULL,"b c"}'"""), ("char(5)", "'ab'"),
    ("time", "'12:00'"), ("mood", "'ok'"), ("short", "'s'"), ("numeric(5,1)", "'NaN'"), ("date", "'infinity'"),
    ("timestamptz", "now()"),
)  # fmt: skip
"""Types with a constant default, including constants that do not fit the mirror's type. ``now()`` is constant within a
statement."""

_EACH_ROW = ("double precision DEFAULT random()", "uuid DEFAULT gen_random_uuid()", "serial",
             "timestamptz DEFAULT clock_timestamp()", "bigint GENERATED ALWAYS AS IDENTITY",
             "integer GENERATED ALWAYS AS (qty * 2) STORED")  # fmt: skip


def migrations(version: int) -> list[Migration]:
    """The migrations that this version of PostgreSQL supports."""
    found = [*_columns(), *_defaults_of_each_row(), *_names(), *_drops(), *_types(), *_rules(), *_keys(), *_mixed()]
    assert len({one.name for one in found}) == len(found)
    return [one for one in found if one.since <= version]


def on_other_bases(version: int) -> list[Migration]:
    """The migrations that change columns, each with a partitioned table as its base."""
    found = [*_columns(), *_names(), *_drops(), *_types(), *_mixed()]
    chosen = [one for one in found if one.since <= version and one.what != "rename the key"]
    return [replace(one, base=Base.PARTED) for one in chosen]


def _columns() -> Iterator[Migration]:
    for type_, value in _TYPED:
        what = f"add {type_} = {value}"
        yield Migration("Rails", what, (f'ALTER TABLE "t" ADD "x" {type_} DEFAULT {value} NOT NULL',))
        yield Migration("Django", what, (f'BEGIN; ALTER TABLE "t" ADD COLUMN "x" {type_} DEFAULT {value} NOT NULL; '
                                         'ALTER TABLE "t" ALTER COLUMN "x" DROP DEFAULT; COMMIT',))  # fmt: skip
        yield Migration("Alembic", what, (f"ALTER TABLE t ADD COLUMN x {type_} DEFAULT {value}",))
        if value == "now()":
            filled: tuple[str, ...] = (f"ALTER TABLE t ADD x {type_}", f"UPDATE t SET x = {value} WHERE x IS NULL")
        else:
            filled = (f"BEGIN; ALTER TABLE t ADD COLUMN x {type_}; UPDATE t SET x = {value}; "
                      "ALTER TABLE t ALTER COLUMN x SET NOT NULL; COMMIT",)  # fmt: skip
        yield Migration("Flyway", f"{what}, filled", filled)
    yield Migration("Rails", "add timestamps", (
        'ALTER TABLE "t" ADD "created_at" timestamp(6) DEFAULT CURRENT_TIMESTAMP NOT NULL, '
        'ADD "updated_at" timestamp(6) DEFAULT CURRENT_TIMESTAMP NOT NULL',))  # fmt: skip
    yield Migration("Rails", "add reference", (
        "CREATE TABLE owners (id bigint PRIMARY KEY)", 'ALTER TABLE "t" ADD "owner_id" bigint',
        'CREATE INDEX "i" ON "t" ("owner_id")',
        'ALTER TABLE "t" ADD CONSTRAINT "fk" FOREIGN KEY ("owner_id") REFERENCES "owners" ("id")'))  # fmt: skip
    yield Migration("Flyway", "add three at once", (
        "ALTER TABLE t ADD a int DEFAULT 1, ADD b text, ADD c numeric(6,2) NOT NULL DEFAULT 2.5",))  # fmt: skip
    yield Migration("Flyway", "add, other default at once", (
        "ALTER TABLE t ADD a int DEFAULT 1; ALTER TABLE t ALTER a SET DEFAULT 2",))  # fmt: skip
    yield Migration("Flyway", "add under an odd name", ('ALTER TABLE t ADD "a (b), c" int DEFAULT 3',))
    yield Migration("Flyway", "add without values under an odd name", ('ALTER TABLE t ADD "a=b" int',))


def _defaults_of_each_row() -> Iterator[Migration]:
    for tool, table in (("Rails", '"t"'), ("Alembic", "t")):
        for column in _EACH_ROW:
            yield Migration(tool, f"add {column}", (f"ALTER TABLE {table} ADD COLUMN x {column}",), Result.COPIED)


def _names() -> Iterator[Migration]:
    for column in ("name", "qty", "price", "at", "data", "last"):
        for tool, name in (("Rails", f'"{column}"'), ("Django", f'"{column}"'), ("Alembic", column)):
            yield Migration(tool, f"rename {column}", (f'ALTER TABLE "t" RENAME COLUMN {name} TO "x"',))
    yield Migration("Flyway", "rename twice", ("ALTER TABLE t RENAME qty TO x", "ALTER TABLE t RENAME x TO y"))
    yield Migration("Flyway", "rename and back", ("ALTER TABLE t RENAME qty TO x", "ALTER TABLE t RENAME x TO qty"))
    yield Migration("Flyway", "swap two names", (
        "BEGIN; ALTER TABLE t RENAME note TO x; ALTER TABLE t RENAME last TO note; "
        "ALTER TABLE t RENAME x TO last; COMMIT",))  # fmt: skip
    yield Migration("Flyway", "rename the key", ("ALTER TABLE t RENAME id TO key",))
    yield Migration("Flyway", "rename in upper case", ('ALTER TABLE t RENAME name TO "NAME"',))


def _drops() -> Iterator[Migration]:
    for column in ("name", "qty", "price", "at", "data", "last"):
        yield Migration("Rails", f"remove {column}", (f'ALTER TABLE "t" DROP COLUMN "{column}"',))
        yield Migration("Django", f"remove {column}", (f'ALTER TABLE "t" DROP COLUMN "{column}" CASCADE',))
    yield Migration("Alembic", "drop two", ("ALTER TABLE t DROP COLUMN qty", "ALTER TABLE t DROP COLUMN note"))
    yield Migration("Flyway", "drop and add under one name", (
        "BEGIN; ALTER TABLE t DROP note; ALTER TABLE t ADD note text; COMMIT",))  # fmt: skip
    yield Migration("Flyway", "drop and add with another type", (
        "ALTER TABLE t DROP note", "ALTER TABLE t ADD note int DEFAULT 3"))  # fmt: skip
    yield Migration("Flyway", "drop the last and add it again", (
        "BEGIN; ALTER TABLE t DROP last; ALTER TABLE t ADD last text; COMMIT",),
        Result.COPIED)  # fmt: skip


def _types() -> Iterator[Migration]:
    kept = (("name", "varchar(40)"), ("name", "varchar"), ("name", "text"), ("price", "numeric(14,2)"),
            ("label", "varchar"), ("code", "short"), ("note", "varchar"))  # fmt: skip
    for column, type_ in kept:
        yield Migration("Rails", f"{column} to {type_}", (f'ALTER TABLE "t" ALTER COLUMN "{column}" TYPE {type_}',))
        yield Migration("Alembic", f"{column} to {type_}", (f"ALTER TABLE t ALTER COLUMN {column} TYPE {type_}",))
    rewritten = (("qty", "bigint"), ("qty", "text"), ("price", "numeric(12,4)"), ("price", "numeric"),
                 ("at", "timestamp"), ("flag", 'integer USING "flag"::integer'), ("data", "json"),
                 ("name", "char(40)"), ("label", "varchar(30)"),
                 ("qty", 'integer USING "qty" + 1'), ("m", 'text USING "m"::text'))  # fmt: skip
    for column, type_ in rewritten:
        yield Migration("Django", f"{column} to {type_}",
                        (f'ALTER TABLE "t" ALTER COLUMN "{column}" TYPE {type_}',), Result.COPIED)  # fmt: skip


def _rules() -> Iterator[Migration]:
    for tool, what, sql in (
        (
            "Rails",
            "null: false",
            'UPDATE "t" SET "qty" = 0 WHERE "qty" IS NULL; ALTER TABLE "t" ALTER COLUMN "qty" SET NOT NULL',
        ),
        ("Rails", "default", """ALTER TABLE "t" ALTER COLUMN "name" SET DEFAULT 'other'"""),
        ("Rails", "index", 'CREATE UNIQUE INDEX CONCURRENTLY "i" ON "t" ("id", "name")'),
        ("Django", "drop default", 'ALTER TABLE "t" ALTER COLUMN "name" DROP DEFAULT'),
        ("Django", "check", 'ALTER TABLE "t" ADD CONSTRAINT "c" CHECK ("qty" > -1000000)'),
        ("Alembic", "check not valid", "ALTER TABLE t ADD CONSTRAINT c CHECK (qty > 0) NOT VALID"),
        ("Alembic", "comment", "COMMENT ON COLUMN t.qty IS 'how many'"),
        ("Alembic", "unique", "ALTER TABLE t ADD CONSTRAINT u UNIQUE (id, name)"),
        ("Flyway", "storage", "ALTER TABLE t ALTER note SET STORAGE EXTERNAL"),
        ("Flyway", "statistics", "ALTER TABLE t ALTER note SET STATISTICS 500"),
        ("Flyway", "domain's check", "ALTER DOMAIN short ADD CHECK (VALUE <> 'never')"),
        ("Flyway", "vacuum full", "VACUUM FULL t"),
        ("Flyway", "value of an enum", "ALTER TYPE mood ADD VALUE 'glad'"),
        ("Flyway", "identity full", "ALTER TABLE t REPLICA IDENTITY FULL"),
    ):
        yield Migration(tool, what, (sql,))
    yield Migration("Django", "null and not null", (
        'UPDATE "t" SET "qty" = 0 WHERE "qty" IS NULL; ALTER TABLE "t" ALTER COLUMN "qty" SET NOT NULL',
        'ALTER TABLE "t" ALTER COLUMN "qty" DROP NOT NULL', 'UPDATE "t" SET "qty" = NULL WHERE "id" < 4'))  # fmt: skip
    yield Migration("Rails", "add and remove comments", (
        """COMMENT ON TABLE "t" IS 'all of it'; COMMENT ON COLUMN "t"."qty" IS 'how many'""",
        'ALTER TABLE "t" RENAME COLUMN "qty" TO "number"', 'COMMENT ON TABLE "t" IS NULL'))  # fmt: skip
    yield Migration("Flyway", "value of an enum renamed", ("ALTER TYPE mood RENAME VALUE 'sad' TO 'down'",),
                    Result.COPIED)  # fmt: skip


def _keys() -> Iterator[Migration]:
    yield Migration("Flyway", "replace the key", (
        "BEGIN; UPDATE t SET code = '' WHERE code IS NULL; ALTER TABLE t DROP CONSTRAINT t_pkey; "
        "ALTER TABLE t ADD PRIMARY KEY (id, code); COMMIT",),
        Result.COPIED)  # fmt: skip


def _mixed() -> Iterator[Migration]:
    yield Migration("Rails", "replace a column under its name", (
        'ALTER TABLE "t" ADD "qty_new" bigint', 'UPDATE "t" SET "qty_new" = "qty"',
        'BEGIN; ALTER TABLE "t" DROP COLUMN "qty"; ALTER TABLE "t" RENAME COLUMN "qty_new" TO "qty"; COMMIT',
    ))  # fmt: skip
    yield Migration("Flyway", "all at once", (
        "BEGIN; ALTER TABLE t DROP note; ALTER TABLE t RENAME last TO note; ALTER TABLE t ADD last int DEFAULT 4; "
        "ALTER TABLE t ALTER name TYPE text; ALTER TABLE t ALTER price TYPE numeric(16,2); COMMIT",))  # fmt: skip
    yield Migration("Flyway", "add, write, drop", (
        "ALTER TABLE t ADD x int DEFAULT 1", "UPDATE t SET x = 2 WHERE id < 3", "ALTER TABLE t DROP x"))  # fmt: skip
    yield Migration("Flyway", "add, truncate", ("ALTER TABLE t ADD x int DEFAULT 1", "TRUNCATE t"),
                    Result.COPIED)  # fmt: skip
    yield Migration("Flyway", "add, roll back, add", ("BEGIN; ALTER TABLE t ADD x int DEFAULT 1; ROLLBACK",
                                              "ALTER TABLE t ADD x int DEFAULT 2"))  # fmt: skip
    yield Migration("Flyway", "five in a row", tuple(f"ALTER TABLE t ADD x{n} int DEFAULT {n}" for n in range(5)))
