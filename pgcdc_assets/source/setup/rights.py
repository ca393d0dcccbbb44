"""Checks the rights of a role on the source. Generates the statements that the role cannot run itself: grants of
missing rights, and one script for the owner of the tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, LiteralString

import psycopg

from pgcdc_assets.core.names import TableName
from pgcdc_assets.settings import Settings
from pgcdc_assets.source.catalog.published import read_published
from pgcdc_assets.source.connect.connection import APPLICATION, connect
from pgcdc_assets.source.setup.findings import Finding, named, server_findings
from pgcdc_assets.source.setup.publications import Changes, OwnPair, OwnPublication, read_publication
from pgcdc_assets.source.setup.selection import stored_tables, wanted_tables
from pgcdc_assets.source.setup.tablefindings import pattern_findings

_REPLICATION_ROLES = ["rds_replication", "rds_superuser"]
"""Roles of Amazon RDS, where no one can set the attribute REPLICATION. Members of these roles may replicate."""

# A role that does not exist yet has the rights of PUBLIC, which is OID 0.
_ROLE = """
WITH role AS (
  SELECT coalesce(r.oid, 0) AS oid, r.oid IS NOT NULL AS there, coalesce(r.rolsuper, false) AS super,
         coalesce(r.rolbypassrls, false) AS bypass, coalesce(r.rolreplication, false) AS replication
  FROM (SELECT) AS one LEFT JOIN pg_catalog.pg_roles r ON r.rolname = %(role)s
), mine AS (
  SELECT o.oid FROM role r, pg_catalog.pg_roles o WHERE CASE WHEN r.there THEN pg_has_role(r.oid, o.oid, 'USAGE') END
), managed AS (
  SELECT o.oid FROM role r, pg_catalog.pg_roles o
  WHERE o.rolname = ANY(%(managed)s) AND CASE WHEN r.there THEN pg_has_role(r.oid, o.oid, 'MEMBER') END
)
"""
_RIGHTS: LiteralString = (
    _ROLE
    + """
SELECT r.super OR r.replication OR EXISTS (SELECT FROM managed), has_database_privilege(r.oid, d.oid, 'CREATE'),
       has_database_privilege(r.oid, d.oid, 'CONNECT'), quote_ident(d.datname)
FROM role r, pg_catalog.pg_database d WHERE d.datname = current_database()
"""
)
_TABLE_RIGHTS: LiteralString = (
    _ROLE  # noqa: S608  (put together of our own constants)
    + """
SELECT c.oid, c.oid::regclass::text, quote_ident(n.nspname), has_schema_privilege(r.oid, n.oid, 'USAGE'),
       has_table_privilege(r.oid, c.oid, 'SELECT'), o.owns,
       c.relrowsecurity AND NOT r.super AND NOT r.bypass AND (c.relforcerowsecurity OR NOT o.owns)
FROM role r, pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace,
     LATERAL (SELECT c.relowner IN (SELECT oid FROM mine) AS owns) o
WHERE c.oid = ANY(%(tables)s) ORDER BY 2
"""
)
_NOT_OWNED: LiteralString = (
    _ROLE  # noqa: S608
    + """
SELECT p.pubname::text FROM role r, pg_catalog.pg_publication p
WHERE p.pubname = ANY(%(names)s) AND NOT r.super AND p.pubowner NOT IN (SELECT oid FROM mine) ORDER BY 1
"""
)
_STATEMENTS = 10
"""The most statements that the text about one table contains."""
BY_OWNER = "let the owner run the script of `pgcdc setup --sql`"


def rights_findings(
    conn: psycopg.Connection[Any], tables: Sequence[int], changes: Changes, *, role: str
) -> list[Finding]:
    """Returns findings on the rights that ``role`` needs: to replicate, to connect, to read ``tables`` (OIDs), and to
    make ``changes``. The role need not exist yet."""
    asked = {"role": role, "managed": _REPLICATION_ROLES}
    ((may_replicate, create, may_connect, database),) = conn.execute(_RIGHTS, asked)
    thing, name = f"role {role}", quoted_role(conn, role)
    found: list[Finding] = []
    if not may_replicate:
        found.append(Finding("error", thing, "may not replicate", sql=(f"ALTER ROLE {name} REPLICATION;",)))
    if not may_connect:
        found.append(Finding("error", thing, f"may not connect to database {database}",
                             sql=(f"GRANT CONNECT ON DATABASE {database} TO {name};",)))  # fmt: skip
    rows = _table_rights(conn, tables, role)
    foreign = [table for oid, table, _, _, _, owner, *_ in rows if oid in changes.tables and not owner]
    return [
        *found, *_reading(rows, role, name), *_publishing(conn, changes, foreign, role, None if create else database)
    ]  # fmt: skip


def reading_findings(conn: psycopg.Connection[Any], tables: Sequence[int], *, role: str) -> list[Finding]:
    """Returns findings on the right of ``role`` to read these relations."""
    return _reading(_table_rights(conn, tables, role), role, quoted_role(conn, role))


def lacking_rights(conn: psycopg.Connection[Any], tables: Mapping[TableName, Sequence[int]]) -> dict[TableName, str]:
    """Returns the tables that our role may not read, each with a reason and the statements that grant the right.
    ``tables``: for each table, the OIDs of the relations that store its rows."""
    ((role,),) = conn.execute("SELECT current_user::text")
    rows = {row[0]: row for row in _table_rights(conn, [oid for oids in tables.values() for oid in oids], role)}
    name, lacking = quoted_role(conn, role), dict[TableName, str]()
    for table, oids in tables.items():
        findings = _reading([rows[oid] for oid in oids if oid in rows], role, name)
        statements = [statement.rstrip(";") for finding in findings for statement in finding.sql]
        if statements:
            lacking[table] = f"role {role} may not read the whole table: run {'; '.join(statements[:_STATEMENTS])}"
    return lacking


def _table_rights(conn: psycopg.Connection[Any], tables: Sequence[int], role: str) -> list[tuple[Any, ...]]:
    asked = {"role": role, "managed": _REPLICATION_ROLES, "tables": list(tables)}
    return conn.execute(_TABLE_RIGHTS, asked).fetchall() if tables else []


def _reading(rows: Sequence[tuple[Any, ...]], role: str, name: str) -> list[Finding]:
    """Returns findings on the right to read, from rows of _TABLE_RIGHTS. ``name``: the role's name as SQL."""
    found: list[Finding] = []
    closed = sorted({schema for _, _, schema, usage, *_ in rows if not usage})
    if closed:
        found.append(Finding("error", f"schemas {named(closed)}", f"may not be used by role {role}",
                             sql=tuple(f"GRANT USAGE ON SCHEMA {schema} TO {name};" for schema in closed)))  # fmt: skip
    unread = [table for _, table, _, _, select, *_ in rows if not select]
    if unread:
        found.append(Finding("error", named(unread), f"may not be read by role {role}",
                             sql=tuple(f"GRANT SELECT ON TABLE {table} TO {name};" for table in unread)))  # fmt: skip
    hidden = [table for _, table, *_, security in rows if security]
    if hidden:
        found.append(Finding("error", named(hidden), f"row-level security hides rows from role {role}",
                             "connect as the owner of the tables, or let a superuser run this",
                             sql=(f"ALTER ROLE {name} BYPASSRLS;",)))  # fmt: skip
    return found


def _publishing(
    conn: psycopg.Connection[Any], changes: Changes, foreign: Sequence[str], role: str, database: str | None
) -> list[Finding]:
    """Returns findings on missing rights to create or change publications. ``foreign``: tables to publish that the role
    does not own. ``database``: the database's name if the role may not create a publication in it, else None."""
    found = []
    if changes.make and database and not foreign:
        found.append(Finding("error", f"role {role}", "may not create a publication", f"{BY_OWNER}, or run this",
                             (f"GRANT CREATE ON DATABASE {database} TO {quoted_role(conn, role)};",)))  # fmt: skip
    if foreign:
        also = f", nor create a publication in database {database}" if changes.make and database else ""
        what = f"not owned by role {role}, so the role cannot publish them{also}"
        found.append(Finding("error", named(foreign), what, f"{BY_OWNER}, or exclude them in the setting `tables`"))
    names = not_owned(conn, role, changes.alter)
    if names and not foreign:
        thing = f"publication {', '.join(names)}"
        found.append(Finding("error", thing, f"must be changed, but is not owned by role {role}", BY_OWNER))
    return found


def not_owned(conn: psycopg.Connection[Any], role: str, publications: Sequence[str]) -> list[str]:
    """Returns the publications that the role may not change or drop."""
    asked = {"role": role, "managed": _REPLICATION_ROLES, "names": list(publications)}
    return [name for (name,) in conn.execute(_NOT_OWNED, asked)]


def quoted_role(conn: psycopg.Connection[Any], role: str) -> str:
    ((quoted,),) = conn.execute("SELECT quote_ident(%s)", [role])
    return str(quoted)


def owner_script(settings: Settings, conninfo: str, role: str | None = None) -> str:
    """Returns a script that provides all that ``setup`` needs and does not find: settings, role, rights and
    publications. Does not run the script. ``role``: the role that will replicate, which need not exist yet; None for
    the role that ``conninfo`` connects as."""
    read_only = {"default_transaction_read_only": "on"}
    with connect(conninfo, application_name=f"{APPLICATION}/setup", options=read_only) as conn:
        ((user, database),) = conn.execute("SELECT current_user::text, current_database()::text")
        lines = list(_lines(conn, settings, role or user))
    if not any(not line.startswith("--") for line in lines):
        lines.append("-- no statement remains that an owner must run")
    head = [
        f"-- Prepares database {_comment(database)} for replication by role {_comment(role or user)}.",
        "-- Printed by `pgcdc setup --sql`, which changed nothing. Run it in that database as superuser. The owner of "
        "the tables",
        "-- and publications can run it if it has no ALTER SYSTEM and changes no role. Then run `pgcdc setup`.",
    ]
    return "\n".join([*head, *lines]) + "\n"


def _lines(conn: psycopg.Connection[Any], settings: Settings, role: str) -> Iterator[str]:
    pair = OwnPair.of(conn, settings)
    own = not pair.is_foreign()
    if own:
        wanted = [relation.oid for item in wanted_tables(conn, settings.tables) for relation in item.relations]
    else:
        wanted = list(read_published(conn, [settings.publication], unread=True))
    if conn.execute("SELECT FROM pg_catalog.pg_roles WHERE rolname = %s", [role]).fetchone() is None:
        yield f"CREATE ROLE {quoted_role(conn, role)} LOGIN; -- and give it a password"
    found = [
        *server_findings(conn, settings.slot, two_phase=settings.two_phase),
        *rights_findings(conn, stored_tables(conn, wanted, later=True), Changes(), role=role),
    ]
    for finding in found:
        yield from _mended(finding)
    for finding in pattern_findings(conn, settings, needed=False):
        yield f"-- {_comment(str(finding))}"
    if not own:
        maker = (read_publication(conn, settings.publication) or OwnPublication(settings.publication)).maker
        yield f"-- publication {_comment(settings.publication)} {maker}, and is used unchanged"
        return
    if pair.needed().alter:
        yield "-- These publications exist. If another project uses them, choose other names for publication and slot."
    for statement in pair.statements():
        yield statement.as_string(None) + ";"


def _mended(finding: Finding) -> Iterator[str]:
    """Yields the script's lines for an error: a comment if the error has advice or no SQL, then its SQL. Yields nothing
    for a warning or an information."""
    if finding.severity == "error":
        if finding.do or not finding.sql:
            yield f"-- {_comment(f'{finding.thing}: {finding.what}; {finding.do}')}"
        yield from finding.sql


def _comment(text: str) -> str:
    """Returns the text on one line, because names in it may contain line breaks."""
    return " ".join(text.split())
