"""An ordinary session instead of a walsender, for sources that take no replication connections.

SQL provides everything that receiving needs, except a snapshot that is exactly as old as a slot: see
:mod:`pgcdc_assets.source.snapshot.bylock`.
"""

from __future__ import annotations

from collections.abc import Callable

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.errors import ProtocolError, SourceNotReady
from pgcdc_assets.source.connect.libpq import CreatedSlot, LibpqConnection, SystemIdentity
from pgcdc_assets.source.connect.quoting import literal
from pgcdc_assets.source.connect.walsender import ReplicationConnection
from pgcdc_assets.source.positions import FLUSH_LSN

# The name of a WAL file begins with its timeline. A standby writes no WAL file: its timeline is that of its last
# restart point or, past a switch, the one that it recovers to.
_IDENTIFY = f"""
SELECT s.system_identifier::text,
       CASE WHEN pg_is_in_recovery() THEN to_hex(greatest(c.timeline_id, r.min_recovery_end_timeline))
            ELSE left(pg_walfile_name(pg_current_wal_insert_lsn()), 8) END,
       {FLUSH_LSN}::text, current_database()::text
FROM pg_control_system() AS s, pg_control_checkpoint() AS c, pg_control_recovery() AS r
"""  # noqa: S608  (put together of our own constants)


class SqlConnection(LibpqConnection):
    """One ordinary session."""

    def identify(self) -> SystemIdentity:
        system, timeline, flushed, database = self.execute(_IDENTIFY)[0]
        if system is None or timeline is None or flushed is None or database is None:
            raise ProtocolError("does not say which server it is", thing=self.endpoint)
        return SystemIdentity(system, int(timeline, 16), Lsn.parse(flushed), database)

    def _history(self, timeline: int) -> str:
        """Raises SourceNotReady if this role may not read the server's files."""
        try:
            return self.execute(f"SELECT pg_read_file('pg_wal/{timeline:08X}.history')")[0][0] or ""
        except SourceNotReady as refused:
            raise SourceNotReady(
                f"does not tell where timeline {timeline} began: {refused.what}", thing=self.endpoint,
                do="GRANT EXECUTE ON FUNCTION pg_read_file(text) to this role for one run, or let one run connect "
                "with `replication_connections: true`",
            ) from None  # fmt: skip

    def create_slot(
        self, name: str, *, temporary: bool = False, export: bool = False, two_phase: bool = False,
        waiting: Callable[[], None] | None = None,
    ) -> CreatedSlot:  # fmt: skip
        """Makes the slot without a snapshot, because only a walsender can export one."""
        flags = f"{str(temporary).lower()}, {str(two_phase).lower()}"
        made = f"pg_create_logical_replication_slot({literal(name)}, 'pgoutput', {flags})"
        ((point,),) = self.execute(f"SELECT ({made}).lsn", waiting=waiting)
        if point is None:
            raise ProtocolError("was made, but has no consistent point", thing=f"slot {name}")
        return CreatedSlot(name, Lsn.parse(point), None)


def open_source(conninfo: str, *, replication_connections: bool, application_name: str) -> LibpqConnection:
    """A replication connection, or an ordinary session if the setting ``replication_connections`` is off."""
    kind: type[LibpqConnection] = ReplicationConnection if replication_connections else SqlConnection
    return kind.open(conninfo, application_name=application_name)
