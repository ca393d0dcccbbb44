"""Makes a script for the owner of the source, with all statements that a role with few rights cannot run itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg

from pgcdc_assets.settings import Settings
from pgcdc_assets.source.catalog.published import read_published
from pgcdc_assets.source.connect.connection import APPLICATION, connect
from pgcdc_assets.source.setup.findings import Finding, server_findings
from pgcdc_assets.source.setup.publications import made_by_us, read_publication, script
from pgcdc_assets.source.setup.rights import Changes, quoted_role, rights_findings
from pgcdc_assets.source.setup.selection import wanted_tables
from pgcdc_assets.source.setup.setup import stored_tables
from pgcdc_assets.source.slot.slotstatus import slot_status


def owner_script(settings: Settings, conninfo: str, role: str | None = None) -> str:
    """Returns the statements for all that ``setup`` misses: settings, role, rights and publications. Changes nothing.

    ``role``: the role that will replicate; it need not exist yet. None means the role that ``conninfo`` connects as.
    """
    read_only = {"default_transaction_read_only": "on"}
    with connect(conninfo, application_name=f"{APPLICATION}/setup", options=read_only) as conn:
        row = conn.execute("SELECT current_user::text, current_database()::text").fetchone()
        assert row is not None
        user, database = row
        lines = list(_lines(conn, settings, role or user))
    if not any(not line.startswith("--") for line in lines):
        lines.append("-- nothing is left for an owner to do")
    head = [
        f"-- Database {_comment(database)}: what it needs for role {_comment(role or user)} to follow it.",
        "-- Printed by `pgcdc setup --sql`, which changed nothing. To be run in that database by a superuser, or by",
        "-- the owner of the tables where no role has to be changed; then run `pgcdc setup`.",
    ]
    return "\n".join([*head, *lines]) + "\n"


def _lines(conn: psycopg.Connection[Any], settings: Settings, role: str) -> Iterator[str]:
    publication = read_publication(conn, settings.publication)
    own = publication is None or made_by_us(publication, settings.slot)
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
    if not own:
        yield f"-- publication {_comment(settings.publication)} was made by somebody else, and is used as it is"
        return
    with_slot = publication.with_slot if publication else slot_status(conn, settings.slot) is None
    for statement in script(conn, settings.publication, settings.slot, settings.tables, with_slot=with_slot):
        yield statement.as_string(None) + ";"


def _mended(finding: Finding) -> Iterator[str]:
    """Yields the statements of an error, and a comment if the error has advice or no statements."""
    if finding.severity == "error":
        if finding.do or not finding.sql:
            yield f"-- {_comment(f'{finding.thing}: {finding.what}; {finding.do}')}"
        yield from finding.sql


def _comment(text: str) -> str:
    """Returns the text on one line, because names in it may contain line breaks."""
    return " ".join(text.split())
