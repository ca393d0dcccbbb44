"""The replication connection: receives frames and sends status updates.

psycopg has no replication API, but its libpq wrapper has all calls that the protocol needs. The commands are described
in PostgreSQL's "Streaming Replication Protocol". :mod:`pgcdc_assets.source.connect.readers` reads frames, and
:mod:`pgcdc_assets.protocol.frames` decodes them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.protocol.frames import status_update
from pgcdc_assets.protocol.layouts import EPOCH
from pgcdc_assets.source.connect.connection import SourceConnection
from pgcdc_assets.source.connect.libpq import POLL_SECONDS, LibpqConnection, identifier, literal
from pgcdc_assets.source.connect.pluginoptions import FIRST_VERSION, PluginOptions, Streaming
from pgcdc_assets.source.connect.readers import FrameReader, LibpqReader
from pgcdc_assets.source.connect.silence import Silence

_MEMORY: Final = "16MB"
"""Changes that the server collects before it sends a transaction in progress. At most this much is left to send at the
commit. The default is 64MB, which takes a second or two to send."""
_LITTLE_MEMORY: Final = (
    f"SELECT set_config('logical_decoding_work_mem', '{_MEMORY}', false) "
    f"WHERE pg_size_bytes(current_setting('logical_decoding_work_mem')) > pg_size_bytes('{_MEMORY}')"
)
_HISTORY_LINE: Final = re.compile(r"\s*(\d+)\s+([0-9A-Fa-f]+/[0-9A-Fa-f]+)")


@dataclass(frozen=True)
class SystemIdentity:
    """The identity of the server. ``flush_lsn`` may lie inside a record, so it can be a goal but never a boundary."""

    system_identifier: str
    timeline: int
    flush_lsn: Lsn
    database: str
    database_oid: int


@dataclass(frozen=True)
class TimelineSwitch:
    """The server left ``timeline`` at ``switch_lsn``."""

    timeline: int
    switch_lsn: Lsn


@dataclass(frozen=True)
class CreatedSlot:
    """A slot that was created. Snapshot and stream meet at ``consistent_point``. The snapshot exists until the next
    command."""

    name: str
    consistent_point: Lsn
    snapshot_name: str | None


class ReplicationConnection(LibpqConnection):
    """One walsender. It runs commands, and then at most one stream."""

    # With wal_sender_timeout = 0 the slot of a client that vanished would stay active for ever.
    _settings: ClassVar[Mapping[str, str]] = {"wal_sender_timeout": "60s"}
    _parameters: ClassVar[Mapping[str, str]] = {"replication": "database"}

    def __init__(self, connection: SourceConnection) -> None:
        super().__init__(connection)
        self._frames: FrameReader | None = None
        self._little_memory = False
        self.parallel = False
        """Whether the started stream is parallel; see :class:`PluginOptions`."""

    def identify(self) -> SystemIdentity:
        """Runs IDENTIFY_SYSTEM, and reads the OID of the database."""
        system, timeline, flushed, database = self.execute("IDENTIFY_SYSTEM")[0]
        if system is None or timeline is None or flushed is None or database is None:
            raise ProtocolError("IDENTIFY_SYSTEM left a field empty", thing=self.endpoint)
        oid = self.execute("SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database()")[0][0]
        return SystemIdentity(system, int(timeline), Lsn.parse(flushed), database, int(oid or 0))

    def timeline_history(self, timeline: int) -> tuple[TimelineSwitch, ...]:
        """Returns the switches that led to ``timeline``, oldest first. The first timeline has no switches."""
        if timeline == 1:
            return ()
        history = self.execute(f"TIMELINE_HISTORY {timeline:d}")[0][1] or ""
        matches = [_HISTORY_LINE.match(line) for line in history.splitlines()]
        return tuple(TimelineSwitch(int(match[1]), Lsn.parse(match[2])) for match in matches if match)

    def create_slot(
        self, name: str, *, temporary: bool = False, export: bool = False, two_phase: bool = False,
        waiting: Callable[[], None] | None = None,
    ) -> CreatedSlot:  # fmt: skip
        """Creates a pgoutput slot. Waits for every open transaction of the cluster that has an xid.

        Uses the old syntax of CREATE_REPLICATION_SLOT options, because every version understands it.
        """
        kind = "TEMPORARY " if temporary else ""
        snapshot = "EXPORT_SNAPSHOT" if export else "NOEXPORT_SNAPSHOT"
        if two_phase:
            snapshot += " TWO_PHASE"
        command = f"CREATE_REPLICATION_SLOT {identifier(name)} {kind}LOGICAL pgoutput {snapshot}"
        _, point, snapshot_name, _ = self.execute(command, waiting=waiting)[0]
        if point is None:
            raise ProtocolError("CREATE_REPLICATION_SLOT named no consistent point", thing=f"slot {name}")
        return CreatedSlot(name, Lsn.parse(point), snapshot_name)

    def drop_slot(self, name: str) -> None:
        self.execute(f"DROP_REPLICATION_SLOT {identifier(name)} WAIT")

    def start(
        self, slot: str, start_lsn: Lsn, publications: Sequence[str], options: PluginOptions = FIRST_VERSION
    ) -> None:
        """Runs START_REPLICATION with pgoutput. If ``start_lsn`` is below the slot's position, the server silently
        starts at the slot's position."""
        given = ", ".join(f"{name} {literal(value)}" for name, value in options.given(publications).items())
        command = f"START_REPLICATION SLOT {identifier(slot)} LOGICAL {start_lsn} ({given})"
        self.parallel = options.parallel
        if options.streaming != Streaming.OFF and not self._little_memory:
            # Only before the first attempt. After a refused attempt libpq cannot run a command, because the answer was
            # read by the socket's reader and not by libpq.
            self.execute(_LITTLE_MEMORY)
            self._little_memory = True
        reader = self.socket()
        if reader is None:
            self._result(command, None)
            self._frames = LibpqReader(self.pgconn, self.endpoint)
            return
        reader.command(command)
        silence = Silence(SourceConnection.patience, self.endpoint, self.at_work)
        while not reader.begun():
            if self.wait(POLL_SECONDS):
                silence.heard()
            else:
                silence.listened()
        self._frames = reader

    @property
    def frames(self) -> FrameReader:
        """The reader of the started stream."""
        assert self._frames is not None
        return self._frames

    def send_status(self, write: Lsn, flush: Lsn, apply: Lsn, *, reply: bool = False) -> None:
        """Sends a standby status update. The caller ensures that no position ever decreases."""
        now = int(time.time() * 1_000_000) - EPOCH
        self.frames.send(status_update(write, flush, apply, now, reply))

    def end_stream(self, *, seconds: float = 5) -> None:
        """Sends CopyDone, then reads and drops the remaining frames, so that the slot is free when this returns.

        If the server does not answer in time, it notices later that the connection is closed.
        """
        deadline = time.monotonic() + seconds
        while not self.frames.finish() and time.monotonic() < deadline:
            self.wait(deadline - time.monotonic())
