"""Creates the publications, and then the slot, on the source. Also removes them.

After setup, no write on the source fails that succeeded before: a table without a usable replica identity is published
for inserts and truncates only, in a second publication. Setup alters no table, and no publication that somebody else
made. Each publication that setup creates has a comment that names our slot.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psycopg
from psycopg import sql

from pgcdc_assets.core.catalog import Catalog
from pgcdc_assets.core.faultpoints import FaultPoint, passed
from pgcdc_assets.errors import EmptyPublication, SetupRefused, SlotActive
from pgcdc_assets.settings import Settings
from pgcdc_assets.source.catalog.published import read_published
from pgcdc_assets.source.catalog.tables import TablePatterns, read_catalog
from pgcdc_assets.source.connect.connection import APPLICATION, connect
from pgcdc_assets.source.connect.failures import COPY_ANEW, of_exception
from pgcdc_assets.source.connect.walsender import ReplicationConnection
from pgcdc_assets.source.setup.findings import Finding, not_replicated, server_findings, transport_findings
from pgcdc_assets.source.setup.publications import (
    Changes,
    OwnPair,
    OwnPublication,
    inserts_name,
    made_by_us,
    read_publication,
    readers,
)
from pgcdc_assets.source.setup.rights import BY_OWNER, not_owned, reading_findings, rights_findings
from pgcdc_assets.source.setup.selection import stored_tables, wanted_tables
from pgcdc_assets.source.setup.tablefindings import (
    NONE_SELECTED,
    child_findings,
    foreign_findings,
    identity_findings,
    key_findings,
    outside_findings,
    pattern_findings,
    trace_findings,
    unread_findings,
)
from pgcdc_assets.source.slot.blockers import OnWait
from pgcdc_assets.source.slot.slot import LOCK_SECONDS, check_slot, create_slot, identity, slot_status
from pgcdc_assets.source.snapshot.pieces import bytes_on_disk

_DROP_SECONDS = 10
"""The most seconds that teardown waits until the slot is free. A slot stays active for a moment after its run has
ended."""


@dataclass(frozen=True)
class SetupReport:
    catalog: Catalog
    created: list[str]
    """Objects that this call created or changed, like ``publication pgcdc`` or ``slot pgcdc``."""
    findings: list[Finding]
    copy_bytes: int = 0
    """About how many bytes a copy of all tables reads from the source's disk."""


def _refused(errors: Sequence[Finding]) -> SetupRefused:
    if len(errors) == 1 and len(errors[0].sql) < 2:
        return SetupRefused([str(errors[0])])
    by_script = any(finding.sql or BY_OWNER in finding.do for finding in errors)
    lines = [line for finding in errors for line in finding.lines]
    return SetupRefused(lines, "`pgcdc setup --sql` prints one script for the owner" if by_script else None)


def check_source(
    conn: psycopg.Connection[Any], settings: Settings, made: Container[str] = (), *, first: bool = False
) -> list[Finding]:
    """Returns all findings on the source: first errors, then warnings, then information. Changes nothing. ``made`` and
    ``first``: see :func:`setup`."""
    pair = OwnPair.of(conn, settings)
    own = not pair.is_foreign()
    changes = pair.needed() if own else Changes()
    wanted = wanted_tables(conn, settings.tables) if own else []
    role = _user(conn)
    if own:
        tables = [relation.oid for item in wanted for relation in item.relations]
        content = [*identity_findings(wanted), *key_findings(wanted), *_order_findings(conn, settings, made)]
    else:
        tables = list(read_published(conn, [settings.publication], unread=True))
        content = foreign_findings(conn, settings.publication, TablePatterns.parse(settings.tables))
    stored = stored_tables(conn, tables)
    later = [oid for oid in stored_tables(conn, tables, later=True) if oid not in stored]
    found = [
        *server_findings(conn, settings.slot, two_phase=settings.two_phase),
        *transport_findings(conn),
        *rights_findings(conn, stored, changes, role=role),
        *content,
        *_slot_findings(conn, settings, made, others=first and bool(changes.alter)),
        *outside_findings(conn, tables),
        *(replace(finding, severity="warning") for finding in reading_findings(conn, later, role=role)),
        *child_findings(conn, tables),
        *trace_findings(conn, stored, own_publication=own),
        *not_replicated(conn),
        *unread_findings(conn),
    ]
    found += pattern_findings(conn, settings, needed=own and not wanted)
    order = ("error", "warning", "info")
    return sorted(found, key=lambda finding: order.index(finding.severity))


def setup(
    settings: Settings, conninfo: str, *, lock_seconds: float = LOCK_SECONDS, on_wait: OnWait | None = None,
    made: Container[str] = (), making: Callable[[list[str]], None] = lambda things: None, first: bool = False,
) -> SetupReport:  # fmt: skip
    """Checks the source, creates missing publications and slot, and reads the catalog. It may be called repeatedly.

    ``made``: objects that an earlier setup of this project created, like ``slot pgcdc``. ``making`` is called with the
    names of publications and slot right before their creation, so that the project can record them. The source does not
    show which of several projects with the same slot name created an object. ``first``: whether this project was never
    set up. If the slot exists then, setup does not change the tables of its publications. Raises SetupRefused with all
    errors found, before anything is created.
    """
    with connect(conninfo, application_name=f"{APPLICATION}/setup") as conn:
        findings = check_source(conn, settings, made=made, first=first)
        if errors := [finding for finding in findings if finding.severity == "error"]:
            raise _refused(errors)
        try:
            pair = OwnPair.of(conn, settings)
            created = [] if pair.is_foreign() else pair.write(on_wait, making)
            created += _make_slot(conn, settings, conninfo, lock_seconds, on_wait, making)
        except psycopg.Error as error:
            raise of_exception(error).typed("source") from None
        names = publication_names(conn, settings)
        catalog = read_catalog(conn, identity(conn, settings.slot), names, settings.tables)
        if not catalog.tables:
            what, do = NONE_SELECTED
            raise EmptyPublication(what, thing=f"publication {settings.publication}", do=do)
        stored = {oid for table in catalog.tables for oid in ({leaf.oid for leaf in table.leaves} or {table.oid})}
        return SetupReport(catalog, created, findings, bytes_on_disk(conn, stored))


@dataclass(frozen=True)
class Traces:
    """The publications and the slot that a project uses on the source."""

    ours: list[str]
    """Objects that teardown removes, in this order, like ``slot pgcdc``."""
    left: dict[str, str]
    """Objects that teardown does not remove, each with the reason."""
    read_by_others: dict[str, list[str]]
    """Our publications that slots of other projects read, each with the names of these slots."""


def traces(settings: Settings, conninfo: str, made: Container[str] = (), *, shared: bool = False) -> Traces:
    """Returns what :func:`teardown`, called with the same arguments, would remove and leave."""
    with connect(conninfo, application_name=f"{APPLICATION}/setup") as conn:
        return _traces(conn, settings, made, shared=shared)


def teardown(settings: Settings, conninfo: str, made: Container[str] = (), *, shared: bool = False) -> list[str]:
    """Removes the slot and the publications that setup created. The slot goes first, because it must never decode
    without its publications.

    ``made``: see :func:`setup`. ``shared``: also removes the objects that setups of other projects
    created for the same slot. Returns what was removed. Objects that no setup created stay, also publications that the
    owner of a table created for our slot; see :func:`traces`. Raises SlotActive if the slot is in use.
    """
    with connect(conninfo, application_name=f"{APPLICATION}/setup") as conn:
        ours = _traces(conn, settings, made, shared=shared).ours
        for thing in ours:
            kind, _, name = thing.partition(" ")
            if kind == "slot":
                _drop_slot(conn, name)
            else:
                conn.execute(sql.SQL("DROP PUBLICATION IF EXISTS {}").format(sql.Identifier(name)))
    return ours


def _traces(conn: psycopg.Connection[Any], settings: Settings, made: Container[str], *, shared: bool) -> Traces:
    slot, marked = f"slot {settings.slot}", _ours(conn, settings)
    of_another = "this project did not create it; if no other project needs it, run `pgcdc teardown --shared`"
    ours, left = [], {}
    if (status := slot_status(conn, settings.slot)) is not None:
        here = status.database == status.connected_to
        with_mark = here and any(publication.with_slot for publication in marked)
        if (here and slot in made) or (with_mark and shared):
            ours.append(slot)
        elif with_mark:
            left[slot] = of_another
        else:
            left[slot] = (
                f"setup did not create it; if it is not needed: SELECT pg_drop_replication_slot('{settings.slot}')"
            )
    there = [publication for name in _names(settings) if (publication := read_publication(conn, name))]
    others = not_owned(conn, _user(conn), [publication.name for publication in there])
    read_by_others = {}
    for publication in there:
        thing, with_mark = f"publication {publication.name}", made_by_us(publication, settings.slot)
        if thing not in made and not with_mark:
            if publication.name == settings.publication:
                other = f"another project made it, for slot {publication.slot}"
                left[thing] = other if publication.slot else "setup did not create it"
        elif publication.name in others:
            drop = sql.SQL("DROP PUBLICATION {}").format(sql.Identifier(publication.name)).as_string(conn)
            left[thing] = f"its owner can drop it{'' if thing in made else ', if it is not needed'}: {drop}"
        elif thing not in made and not shared:
            left[thing] = of_another
        else:
            ours.append(thing)
            if slots := readers(conn, publication.name, settings.slot):
                read_by_others[publication.name] = slots
    return Traces(ours, left, read_by_others)


def publication_names(conn: psycopg.Connection[Any], settings: Settings) -> tuple[str, ...]:
    """Returns the publications to stream from: our two publications, or the publication that somebody else made."""
    publication = read_publication(conn, settings.publication)
    if publication is not None and made_by_us(publication, settings.slot):
        return settings.publication, inserts_name(settings.publication)
    return (settings.publication,)


def _make_slot(
    conn: psycopg.Connection[Any], settings: Settings, conninfo: str, lock_seconds: float, on_wait: OnWait | None,
    making: Callable[[list[str]], None],
) -> list[str]:  # fmt: skip
    status = slot_status(conn, settings.slot)
    if status is not None:
        check_slot(status, None, two_phase=settings.two_phase)
        return []
    making([f"slot {settings.slot}"])
    with ReplicationConnection.open(conninfo, application_name=f"{APPLICATION}/setup") as connection:
        create_slot(
            connection, conn, settings.slot, temporary=False, two_phase=settings.two_phase, lock_seconds=lock_seconds,
            on_wait=on_wait,
        )  # fmt: skip
    passed(FaultPoint.SLOT_MADE)
    made = [f"slot {settings.slot}"]
    allowed = conn.execute("SELECT has_database_privilege(current_database(), 'CREATE')").fetchone()
    if allowed == (True,) and not _ours(conn, settings):
        # The slot reads a publication that somebody else made. This publication without tables marks the slot as ours,
        # so that teardown finds it.
        name = _marker(settings)
        making([f"publication {name}"])
        OwnPublication(name, settings.slot, with_slot=True, reads=settings.publication).create(conn, "insert")
        made.append(f"publication {name}")
    return made


def _marker(settings: Settings) -> str:
    return f"{APPLICATION}_{settings.slot}"


def _names(settings: Settings) -> tuple[str, ...]:
    return settings.publication, inserts_name(settings.publication), _marker(settings)


def _ours(conn: psycopg.Connection[Any], settings: Settings) -> list[OwnPublication]:
    found = (read_publication(conn, name) for name in _names(settings))
    return [publication for publication in found if publication and made_by_us(publication, settings.slot)]


def _drop_slot(conn: psycopg.Connection[Any], slot: str) -> None:
    conn.execute("SELECT set_config('lock_timeout', %s, false)", [str(_DROP_SECONDS * 1000)])
    try:
        conn.execute("SELECT pg_drop_replication_slot(%s)", [slot])
    except psycopg.errors.ObjectInUse as error:
        raise SlotActive(
            of_exception(error).message,
            thing=f"slot {slot}",
            do="stop the run that reads it, then run the command again",
        ) from None


def _user(conn: psycopg.Connection[Any]) -> str:
    ((user,),) = conn.execute("SELECT current_user::text")
    return str(user)


def _slot_findings(
    conn: psycopg.Connection[Any], settings: Settings, made: Container[str], *, others: bool
) -> list[Finding]:
    """Findings on a slot that this project did not create. ``others``: whether the slot seems to belong to another
    project, because this project was never set up, and setup would change the tables that the slot's publications
    list."""
    status = slot_status(conn, settings.slot)
    if status is None or status.database != status.connected_to or f"slot {settings.slot}" in made:
        return []
    if others:
        do = (
            "choose other names in the settings `slot` and `publication`; or, if no other project reads the slot, run "
            "`pgcdc teardown --shared`, then `pgcdc setup`"
        )
        what = f"belongs to another project: setup would change the tables of its publication {settings.publication}"
        return [Finding("error", status.thing, what, do)]
    what = "exists, but this project did not create it: if two projects read one slot, both lose changes"
    return [Finding("warning", status.thing, what, "choose another name in the setting `slot`")]


def _order_findings(conn: psycopg.Connection[Any], settings: Settings, made: Container[str]) -> list[Finding]:
    """Returns an error if the slot exists and a publication does not. If the publication is created later than the
    slot, decoding fails on the WAL between the two, or silently skips the changes in it (PostgreSQL 18)."""
    status = slot_status(conn, settings.slot)
    names = publication_names(conn, settings)
    lacking = [name for name in names if read_publication(conn, name) is None]
    if not lacking or status is None:
        return []
    if status.database != status.connected_to:
        return [
            Finding("error", status.thing, f"belongs to database {status.database}, not to {status.connected_to}",
                    "choose another name in the setting `slot`")
        ]  # fmt: skip
    what = f"exists, but publication {lacking[0]} does not: changes since the slot was created would be lost"
    do = (
        f"if no table was changed since then, create the publication yourself; otherwise run SELECT "
        f"pg_drop_replication_slot('{settings.slot}') and `pgcdc setup`; the next sync then copies all tables again"
    )
    return [Finding("error", status.thing, what, COPY_ANEW if f"slot {settings.slot}" in made else do)]
