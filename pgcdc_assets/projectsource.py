"""Finds the source that a command works on, and checks that the project was set up with that source. Without this
check, a command in a shell where ``PGCDC_SOURCE`` is not set would work on another database, or create one. The check
is made before anything is started or written. Two sources are the same if they have the same system identifier and
database. The host's name is not compared, so a server that moved to another host, or a promoted standby, is the same
source."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psycopg
from deltalake.exceptions import DeltaError

from pgcdc_assets.core.catalog import Identity
from pgcdc_assets.core.formats import MALFORMED
from pgcdc_assets.core.settingvalues import on_this_host
from pgcdc_assets.demo import shop
from pgcdc_assets.errors import PgcdcError, SettingsError, WrongSource
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.project import load_catalog
from pgcdc_assets.projectfile import EMBEDDED, SETTINGS_FILE
from pgcdc_assets.settings import Settings
from pgcdc_assets.source.connect.connection import APPLICATION, connect, redacted
from pgcdc_assets.source.slot.slot import identity
from pgcdc_assets.store.localfiles import private_folder

_CONNECT_SECONDS = 5


@dataclass(frozen=True)
class Saved:
    """The source and slot that the project was set up with, as the saved catalog or the lake's change log records
    them."""

    thing: str
    identity: Identity
    origin_file: Path

    def __str__(self) -> str:
        own = self.identity
        named = _named(own)
        if own.database_oid:
            # The database may have been renamed since its identity was saved.
            named = f"database {own.database} (OID {own.database_oid}) of system {own.system_identifier}"
        with suppress(OSError, *MALFORMED):
            found = json.loads(self.origin_file.read_text())
            if found["system_identifier"] == self.identity.system_identifier:
                return f"{found['source']} ({named})"
        return named


def origin_file(settings: Settings) -> Path:
    """The file with the source's address at the time of setup, without secrets. It is read only to name the source in
    the texts of errors."""
    return settings.state / "source.json"


def source_of(settings: Settings) -> str:
    """The source's conninfo. Starts no server and opens no connection. Raises WrongSource if no source is named."""
    if is_embedded(settings):
        return shop.server(settings.state).conninfo
    assert settings.source is not None
    return settings.source


def is_embedded(settings: Settings) -> bool:
    """Whether the source is the embedded server: the settings name it, or name no source and the project was set up
    with it. Raises WrongSource if no source is named and the project was set up with another source, or not at all."""
    if settings.source is not None:
        return settings.embedded
    saved, own = _saved(settings), shop.server(settings.state).system_identifier
    if saved and all(found.identity.system_identifier == own for found in saved):
        return True
    unset = f"neither PGCDC_SOURCE nor `source` in {SETTINGS_FILE} is set"
    if saved:
        raise WrongSource(
            f"{unset}, but {saved[0].thing} was set up for {saved[0]}",
            do=f"set PGCDC_SOURCE, or `source` in {SETTINGS_FILE}, to that source",
        )
    raise WrongSource(
        unset, do="set PGCDC_SOURCE or `source` to your database, like PGCDC_SOURCE='host=db.example.org dbname=shop "
                  f"user=replicator', or to `{EMBEDDED}` for a PostgreSQL with a sample shop",
    )  # fmt: skip


def started_source(settings: Settings, *, survive: bool = True) -> str:
    """The source's conninfo. If the source is the embedded server, starts the server and fills its sample shop. Raises
    WrongSource, before anything is started, if the project was set up with another source, and SettingsError if Spark's
    executors cannot reach the embedded server."""
    require_same_source(settings)
    if not is_embedded(settings):
        return source_of(settings)
    if not on_this_host(settings.master):
        raise SettingsError(
            f"is the embedded server, which listens only on this machine, but executors of {settings.master} must "
            "reach it",
            thing="setting `source`", do="use a source that these executors can reach, or set `spark` to local[*]",
        )  # fmt: skip
    private_folder(settings.state)
    server = shop.server(settings.state).start(survive=survive)
    shop.ensure(server.conninfo)
    return server.conninfo


def refuse_other_source(settings: Settings) -> None:
    """Raise WrongSource if the source answers and is not the saved source."""
    try:
        require_same_source(settings)
    except WrongSource:
        raise
    except (PgcdcError, psycopg.Error):
        # The source does not answer, so its identity is not known. The command that needs the source reports this.
        return


def require_same_source(settings: Settings) -> None:
    """Raise WrongSource if the source is not the saved source. If the source cannot be reached, raise the error of
    :func:`connect`. The embedded server is identified by its files, and not started."""
    conninfo, saved = source_of(settings), _saved(settings)
    if not saved:
        return
    if is_embedded(settings):
        own = shop.server(settings.state).system_identifier
        _compare(settings, saved, Identity(own, shop.DATABASE, settings.slot) if own else None)
        return
    with connect(conninfo, application_name=f"{APPLICATION}/setup", connect_timeout=_CONNECT_SECONDS) as conn:
        _compare(settings, saved, identity(conn, settings.slot))


def refuse_other_identity(settings: Settings, found: Identity) -> None:
    """Raise WrongSource if ``found``, which the source reported, is not the saved identity."""
    _compare(settings, _saved(settings), found)


def known_identity(settings: Settings, found: Identity) -> Identity:
    """The saved identity of the stream whose present identity is ``found``. The two differ only if the database was
    renamed. Returns ``found`` if no identity is saved."""
    return next((one.identity for one in reversed(_saved(settings)) if one.identity.is_same(found)), found)


def remember(settings: Settings, conninfo: str, found: Identity) -> None:
    """Save the source's address, without secrets, so that the texts of later errors can show it."""
    where = EMBEDDED if is_embedded(settings) else redacted(conninfo)
    origin_file(settings).write_text(json.dumps({"source": where, "system_identifier": found.system_identifier}) + "\n")


def _saved(settings: Settings) -> list[Saved]:
    """The identities in the saved catalog and in the change log. Leaves out the identity of a catalog or log that
    cannot be read, because the commands that need this file report the failure."""
    found: list[Saved] = []
    with suppress(OSError, ValueError, KeyError, TypeError):
        if catalog := load_catalog(settings.catalog_file):
            found.append(Saved("this project", catalog.identity, origin_file(settings)))
    with suppress(PgcdcError, DeltaError, OSError, KeyError):
        log = ChangeLog(settings.layout)
        if log.exists:
            found.append(Saved(f"the lake {settings.layout.root}", log.identity, origin_file(settings)))
    return found


def _compare(settings: Settings, saved: Sequence[Saved], found: Identity | None) -> None:
    """Raise WrongSource if ``found`` is not a saved identity. ``found`` is None for an embedded server that does not
    exist yet."""
    for one in saved:
        if found is not None and found.is_of_same_database(one.identity):
            continue
        embedded = is_embedded(settings)
        is_ = f"is {_named(found)}" if found else "does not exist yet"
        if found and found.database_oid and one.identity.system_identifier == found.system_identifier:
            is_ = f"is {_named(found)} (OID {found.database_oid})"
        raise WrongSource(
            f"{is_}, but {one.thing} was set up for {one}",
            thing="embedded PostgreSQL" if embedded else f"source {redacted(source_of(settings))}",
            do=f"set PGCDC_SOURCE, or `source` in {SETTINGS_FILE}, to the source of the setup, or use a new folder for "
               "another source; if the source of the setup is gone, run `pgcdc teardown --forget`",
        )  # fmt: skip


def _named(found: Identity) -> str:
    return f"database {found.database} of system {found.system_identifier}"
