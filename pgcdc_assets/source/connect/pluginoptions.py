"""Chooses the options of pgoutput by the server's version. All versions in the table were tried.

An option that the server's version does not have is an error at START_REPLICATION.

                    14          15          16, 17, 18
    proto_version   2           3           4
    streaming       on          on          parallel (only adds two fields to each Stream Abort)
    two_phase       -           yes         yes
    origin          -           -           yes
    messages        yes         yes         yes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, Self

from pgcdc_assets.errors import SourceNotReady
from pgcdc_assets.source.connect.connection import identifier

_NEWEST: Final = 4
"""The protocol version of PostgreSQL 16 and newer."""
_NEWEST_OF: Final = {14: 2, 15: 3}
_TWO_PHASE: Final = 3
_PARALLEL: Final = 4
"""The protocol versions that introduced two-phase and parallel streaming."""
_ORIGIN_SINCE: Final = 16


class Streaming(StrEnum):
    """Whether transactions are sent while they are in progress."""

    OFF = "off"
    ON = "on"
    PARALLEL = "parallel"


class Origins(StrEnum):
    """Which transactions the server sends, depending on how they reached the source."""

    ANY = "any"
    NONE = "none"
    """Only transactions that did not reach the source by replication."""


@dataclass(frozen=True)
class PluginOptions:
    """The options of a stream, or of a call of the SQL decoding functions."""

    proto_version: int = 1
    streaming: Streaming = Streaming.OFF
    origins: Origins = Origins.ANY
    """The value of the option ``origin`` that the server gets. If it is ``any`` and the setting is not, the receiver
    leaves out the transactions that reached the source by replication, because the server sends them."""
    two_phase: bool = False
    """Whether to send the option two_phase. It turns two_phase on for the slot permanently."""
    messages: bool = True
    """Whether the stream contains logical messages (``pg_logical_emit_message``)."""

    @classmethod
    def of(
        cls, version: int, *, streaming: bool = False, origins: Origins = Origins.ANY, two_phase: bool = False,
        messages: bool = True,
    ) -> Self:  # fmt: skip
        """Returns the options for a server of this major version. Raises SourceNotReady if ``two_phase`` is set and the
        server cannot send prepared transactions at their PREPARE (PostgreSQL 14)."""
        newest = _NEWEST_OF.get(version, _NEWEST)
        if two_phase and newest < _TWO_PHASE:
            raise SourceNotReady(
                f"PostgreSQL {version} sends prepared transactions only when they commit", thing="source",
                do="set `two_phase` to false, or use PostgreSQL 15 or newer",
            )  # fmt: skip
        mode = Streaming.OFF
        # With two_phase, not the server but the receiver filters transactions by origin. The server filters each record
        # of a prepared transaction by the origin of the session that wrote the record. So the server could send the
        # content of a transaction without its end, or the end without the content.
        told = origins if version >= _ORIGIN_SINCE and not two_phase else Origins.ANY
        # A transaction sent in progress names the origin of its first change. A transaction sent after its commit names
        # the origin of the commit, which is the one to filter by. So if the receiver filters by origin, it asks for
        # transactions only after their commit.
        if streaming and told == origins:
            mode = Streaming.PARALLEL if newest >= _PARALLEL else Streaming.ON
        proto_version = newest if mode != Streaming.OFF or two_phase else 1
        return cls(proto_version, mode, told, two_phase, messages)

    @property
    def parallel(self) -> bool:
        return self.streaming == Streaming.PARALLEL

    @property
    def whole(self) -> Self:
        """These options, changed for the SQL functions: each transaction is sent completely after its commit. Each call
        starts a new decoder, which cannot continue a transaction that the previous call sent in part."""
        return replace(self, proto_version=1, streaming=Streaming.OFF, two_phase=False)

    def given(self, publications: Sequence[str]) -> dict[str, str]:
        """Returns the options by name, for START_REPLICATION and the SQL functions. Leaves out options that have their
        default value."""
        given = {
            "proto_version": str(self.proto_version),
            "publication_names": ",".join(identifier(name) for name in publications),
        }
        if self.messages:
            given["messages"] = "true"
        if self.streaming != Streaming.OFF:
            given["streaming"] = str(self.streaming)
        if self.origins != Origins.ANY:
            given["origin"] = str(self.origins)
        if self.two_phase:
            given["two_phase"] = "true"
        return given


FIRST_VERSION: Final = PluginOptions()
"""Protocol version 1: each transaction is sent completely after its commit. Every server supports these options."""
