"""What pgoutput is asked for, by the server's version.

Tried on all of them: more than a version knows is an error at START_REPLICATION, as `origin` is before 16.

                    14          15          16, 17, 18
    proto_version   2           3           4
    streaming       on          on          parallel (two fields more in each Stream Abort, nothing else)
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
from pgcdc_assets.source.connect.quoting import identifier

_NEWEST: Final = 4
"""Protocol version; 16 and all that came after it."""
_NEWEST_OF: Final = {14: 2, 15: 3}
_TWO_PHASE: Final = 3
_PARALLEL: Final = 4
"""The protocol versions that these came with."""
_ORIGIN_SINCE: Final = 16


class Streaming(StrEnum):
    """Whether transactions are sent while they are in progress."""

    OFF = "off"
    ON = "on"
    PARALLEL = "parallel"


class Origins(StrEnum):
    """Which transactions are sent."""

    ANY = "any"
    NONE = "none"
    """Those alone that no replication brought to the source."""


@dataclass(frozen=True)
class PluginOptions:
    """The options of a stream, or of a call of the SQL functions."""

    proto_version: int = 1
    streaming: Streaming = Streaming.OFF
    origins: Origins = Origins.ANY
    """What the server is told; see :attr:`filters_origins`."""
    two_phase: bool = False
    """Turns it on for the slot, for good."""
    messages: bool = True
    """Logical messages (``pg_logical_emit_message``) are part of the stream."""
    filters_origins: bool = False
    """Whether the receiver has to leave out what came by replication: the server knows no `origin`."""

    @classmethod
    def of(
        cls, version: int, *, streaming: bool = False, origins: Origins = Origins.ANY, two_phase: bool = False,
        messages: bool = True,
    ) -> Self:  # fmt: skip
        """For a server of this major version.

        Raises SourceNotReady where it cannot send prepared transactions at their PREPARE.
        """
        newest = _NEWEST_OF.get(version, _NEWEST)
        if two_phase and newest < _TWO_PHASE:
            raise SourceNotReady(
                f"PostgreSQL {version} sends prepared transactions at their commit alone", thing="source",
                do="set `two_phase` to false, or use PostgreSQL 15 or newer",
            )  # fmt: skip
        mode = Streaming.OFF
        # Of a prepared transaction the server leaves out each record by the origin of the session that wrote it: so the
        # end of one whose content has come, or the content of one whose end comes.
        told = origins if version >= _ORIGIN_SINCE and not two_phase else Origins.ANY
        # A stream tells the origin of a transaction's first change. A whole transaction tells that of its commit, which
        # is the one that counts. So where the receiver filters by it, transactions come whole.
        if streaming and told == origins:
            mode = Streaming.PARALLEL if newest >= _PARALLEL else Streaming.ON
        proto_version = newest if mode != Streaming.OFF or two_phase else 1
        return cls(proto_version, mode, told, two_phase, messages, filters_origins=origins != told)

    @property
    def parallel(self) -> bool:
        return self.streaming == Streaming.PARALLEL

    @property
    def whole(self) -> Self:
        """The same content, each transaction whole after its commit.

        For the SQL functions: each call of them is a decoder of its own, which would send an open transaction's blocks
        and never go on with them.
        """
        return replace(self, proto_version=1, streaming=Streaming.OFF, two_phase=False)

    def given(self, publications: Sequence[str]) -> dict[str, str]:
        """As START_REPLICATION and the SQL functions take them: what is not asked for is left out."""
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
"""Whole transactions after their commit, as every server sends them."""
