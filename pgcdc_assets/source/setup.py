"""Making and removing what we need on the source: publications first, then the slot.

Nothing here makes a write on the source fail: a table whose updates have no usable replica identity
is published for inserts and truncate only, in a publication of its own. No table is altered, and no
publication that somebody else made. Ours bear a comment that names our slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from pgcdc_assets.core.catalog import Catalog
from pgcdc_assets.core.faultpoints import FaultPoint, passed
from pgcdc_assets.errors import EmptyPublication, SlotActive, SourceNotReady
from pgcdc_assets.settings import Settings
from pgcdc_assets.source.catalog import read_catalog, read_leaves, read_relations
from pgcdc_assets.source.connection import APPLICATION, connect
from pgcdc_assets.source.creation import LOCK_SECONDS, OnWait, create_slot
from pgcdc_assets.source.failures import of_exception
from pgcdc_assets.source.findings import Finding, not_replicated, rights_findings, server_findings
from pgcdc_assets.source.foreign import foreign_findings
from pgcdc_assets.source.patterns import TablePatterns
from pgcdc_assets.source.publications import Publication, inserts_name, made_by_us, read_publication, write_ours
from pgcdc_assets.source.published import read_published
from pgcdc_assets.source.session import open_source
from pgcdc_assets.source.silent import trace_findings
from pgcdc_assets.source.slots import check_slot, identity, slot_status
from pgcdc_assets.source.wanted import Wanted, wanted_tables

_DROP_SECONDS = 10
"""How long teardown waits for a slot that a run has just left."""


@dataclass(frozen=True)
class SetupReport:
    catalog: Catalog
    created: list[str]
    """What this call made or changed: ``publication pgcdc``, ``slot pgcdc``; empty the second time."""
    findings: list[Finding]


def check_source(conn: psycopg.Connection[Any], settings: Settings) -> list[Finding]:
    """All that is wrong, risky or worth knowing, errors first. Changes nothing."""
    publication = read_publication(conn, settings.publication)
    own = publication is None or made_by_us(publication, settings.slot)
    wanted = wanted_tables(conn, settings.tables) if own else []
    if own:
        tables = [relation.oid for item in wanted for relation in item.relations]
        content = [*_identity_findings(wanted), *_key_findings(wanted), *_order_findings(conn, settings, publication)]
    else:
        tables = list(read_published(conn, [settings.publication]))
        content = foreign_findings(conn, settings.publication, TablePatterns.parse(settings.tables))
    found = [
        *server_findings(conn, settings.slot, replication=settings.replication_connections),
        *rights_findings(
            conn, _with_storage(conn, tables), own_publication=own, replication=settings.replication_connections
        ),
        *content,
        *trace_findings(conn, _with_storage(conn, tables), own_publication=own),
        *not_replicated(conn),
    ]
    if own and not wanted:
        found.append(Finding("error", "source", "has no table to mirror", "create one, or see the setting `tables`"))
    order = ("error", "warning", "info")
    return sorted(found, key=lambda finding: order.index(finding.severity))


def setup(
    settings: Settings, conninfo: str, *, lock_seconds: float = LOCK_SECONDS, on_wait: OnWait | None = None
) -> SetupReport:
    """Check, make publications and slot where they lack, read the catalog. Twice is fine.

    SourceNotReady lists every error found; then nothing was made.
    """
    with connect(conninfo, application_name=f"{APPLICATION}/setup") as conn:
        findings = check_source(conn, settings)
        if errors := [str(finding) for finding in findings if finding.severity == "error"]:
            raise SourceNotReady(" | ".join(errors))
        try:
            created = _publish(conn, settings)
            created += _make_slot(conn, settings, conninfo, lock_seconds, on_wait)
        except psycopg.Error as error:
            raise of_exception(error).typed("source") from None
        names = publication_names(conn, settings)
        catalog = read_catalog(conn, identity(conn, settings.slot), names, settings.tables)
        if not catalog.tables:
            raise EmptyPublication("lists no table", thing=f"publication {settings.publication}",
                                   do="add tables to it, or see the setting `tables`")  # fmt: skip
        return SetupReport(catalog, created, findings)


def teardown(settings: Settings, conninfo: str) -> list[str]:
    """Remove what setup made: the slot first, so that it never decodes without its publications.

    Returns what was removed. What somebody else made stays. SlotActive if the slot is in use.
    """
    removed: list[str] = []
    with connect(conninfo, application_name=f"{APPLICATION}/setup") as conn:
        marked = _ours(conn, settings)
        if any(publication.with_slot for publication in marked) and slot_status(conn, settings.slot):
            _drop_slot(conn, settings.slot)
            removed.append(f"slot {settings.slot}")
        for publication in marked:
            conn.execute(sql.SQL("DROP PUBLICATION IF EXISTS {}").format(sql.Identifier(publication.name)))
            removed.append(f"publication {publication.name}")
    return removed


def publication_names(conn: psycopg.Connection[Any], settings: Settings) -> tuple[str, ...]:
    """Names to stream from: ours is a pair; somebody else's stands alone."""
    publication = read_publication(conn, settings.publication)
    if publication is not None and made_by_us(publication, settings.slot):
        return settings.publication, inserts_name(settings.publication)
    return (settings.publication,)


def _publish(conn: psycopg.Connection[Any], settings: Settings) -> list[str]:
    """Both publications are made at once: START_REPLICATION fails on WAL older than any of them."""
    publication = read_publication(conn, settings.publication)
    if publication is not None and not made_by_us(publication, settings.slot):
        return []
    with_slot = publication.with_slot if publication else slot_status(conn, settings.slot) is None
    return write_ours(conn, settings.publication, settings.slot, settings.tables, with_slot=with_slot)


def _make_slot(
    conn: psycopg.Connection[Any], settings: Settings, conninfo: str, lock_seconds: float, on_wait: OnWait | None
) -> list[str]:
    status = slot_status(conn, settings.slot)
    if status is not None:
        check_slot(status, None)
        return []
    with open_source(
        conninfo, replication=settings.replication_connections, application_name=f"{APPLICATION}/setup"
    ) as connection:
        create_slot(connection, conn, settings.slot, temporary=False, lock_seconds=lock_seconds, on_wait=on_wait)
    passed(FaultPoint.SLOT_MADE)
    made = [f"slot {settings.slot}"]
    if not _ours(conn, settings):
        # So that teardown knows the slot for ours beside a publication that is not.
        made += _mark(conn, settings)
    return made


def _mark(conn: psycopg.Connection[Any], settings: Settings) -> list[str]:
    name = _marker(settings)
    allowed = conn.execute("SELECT has_database_privilege(current_database(), 'CREATE')").fetchone()
    if allowed == (True,):
        Publication(name, settings.slot, with_slot=True).create(conn, "insert")
        return [f"publication {name}"]
    return []


def _marker(settings: Settings) -> str:
    return f"{APPLICATION}_{settings.slot}"


def _ours(conn: psycopg.Connection[Any], settings: Settings) -> list[Publication]:
    names = (settings.publication, inserts_name(settings.publication), _marker(settings))
    found = (read_publication(conn, name) for name in names)
    return [publication for publication in found if publication and made_by_us(publication, settings.slot)]


def _drop_slot(conn: psycopg.Connection[Any], slot: str) -> None:
    conn.execute("SELECT set_config('lock_timeout', %s, false)", [str(_DROP_SECONDS * 1000)])
    try:
        conn.execute("SELECT pg_drop_replication_slot(%s)", [slot])
    except psycopg.errors.ObjectInUse as error:
        raise SlotActive(
            of_exception(error).message, thing=f"slot {slot}", do="stop the run that reads it, then run again"
        ) from None


def _identity_findings(wanted: Sequence[Wanted]) -> list[Finding]:
    return [
        Finding(
            "warning", f"table {item.table}", f"{item.reason}: its updates and deletes are not seen",
            f"give it a primary key, or ALTER TABLE {item.table} REPLICA IDENTITY FULL; then run `pgcdc setup`",
        )
        for item in wanted if item.reason
    ]  # fmt: skip


def _key_findings(wanted: Sequence[Wanted]) -> list[Finding]:
    """Once for all: nearly every table has a key, and hardly any loses it."""
    keyed = sum(item.follows_updates for item in wanted)
    if not keyed:
        return []
    return [
        Finding(
            "info", "keys", f"{keyed} tables are published for updates: where one loses its key or replica identity, "
            "PostgreSQL refuses its UPDATE and DELETE",
            "give it the new one in the same transaction, or ALTER TABLE ... REPLICA IDENTITY FULL before",
        )
    ]  # fmt: skip


def _order_findings(
    conn: psycopg.Connection[Any], settings: Settings, publication: Publication | None
) -> list[Finding]:
    """A slot from before its publication fails on the WAL between them, or from 18 on loses it in silence."""
    if publication is not None or slot_status(conn, settings.slot) is None:
        return []
    return [
        Finding(
            "error", f"slot {settings.slot}", f"exists, but publication {settings.publication} does not: changes "
            "since the slot was made would be lost",
            f"make the publication yourself if nothing was lost, or SELECT pg_drop_replication_slot('{settings.slot}')"
            " and run `pgcdc setup`: it copies anew",
        )
    ]  # fmt: skip


def _with_storage(conn: psycopg.Connection[Any], tables: Iterable[int]) -> list[int]:
    """These and the leaves of the partitioned ones: a copy reads leaf by leaf, and needs the right on each."""
    relations = read_relations(conn, tables)
    roots = [oid for oid, relation in relations.items() if relation.partitioned]
    leaves = [leaf for group in read_leaves(conn, roots).values() for leaf in group]
    return sorted({*relations, *leaves})
