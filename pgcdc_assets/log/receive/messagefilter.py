"""Drops the frames that the settings exclude: logical messages by their prefix, and changes of transactions by their
origin. Frames are dropped before they are numbered by ``tx_ordinal``. If no change of a transaction is left, the
transaction gets no row in the log, and its end only moves the log's position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pgcdc_assets.core.arrays import Bools
from pgcdc_assets.core.encoding import UTF8, Encoding
from pgcdc_assets.core.settingvalues import PrefixPatterns
from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.log.framerun import HEADER, IS_CHANGE, FrameRun
from pgcdc_assets.log.transactions import OpenTransaction, of_origin
from pgcdc_assets.protocol.layouts import MessageKind

_PREFIX_AT = HEADER + 1 + 1 + 8
"""The offset of a logical message's prefix in its frame: after kind, flags and LSN. A zero byte ends the prefix."""


@dataclass
class MessageFilter:
    """The settings ``messages`` and ``origin``, as rules for frames."""

    messages: Sequence[str] = ()
    origins: bool = True
    """Whether to take transactions that the source itself received by replication."""
    encoding: Encoding = UTF8
    """The encoding of the stream's texts."""
    _chosen: dict[bytes, bool] = field(default_factory=dict)
    """A cache: for each prefix, whether ``messages`` matches it. Applications use few prefixes, so a thousand entries
    suffice."""

    def __post_init__(self) -> None:
        self._patterns = PrefixPatterns.parse(self.messages)

    def kept(self, run: FrameRun, before: OpenTransaction | None) -> FrameRun:
        """The frames that the settings do not exclude. ``before``: the transaction that is open before these frames."""
        gone = self._unwanted_messages(run)
        if not self.origins:
            gone |= IS_CHANGE[run.kinds] & of_origin(run, before)
        return run.without(gone) if gone.any() else run

    def unwanted(self, run: FrameRun, *, foreign: bool) -> Bools:
        """Marks the frames of a transaction in progress that the settings exclude. ``foreign``: whether the transaction
        names an origin."""
        gone = self._unwanted_messages(run)
        if foreign and not self.origins:
            gone |= IS_CHANGE[run.kinds]
        return gone

    def _unwanted_messages(self, run: FrameRun) -> Bools:
        gone = np.zeros(len(run), dtype=bool)
        messages = run.at(MessageKind.MESSAGE)
        if len(messages):
            gone[messages] = [not self._matches(run, index) for index in messages.tolist()]
        return gone

    def _matches(self, run: FrameRun, index: int) -> bool:
        prefix = self._prefix(run, index)
        found = self._chosen.get(prefix)
        if found is None:
            found = self._patterns.match(self.encoding.shown(prefix))
            if len(self._chosen) < 1000:
                self._chosen[prefix] = found
        return found

    def _prefix(self, run: FrameRun, index: int) -> bytes:
        start = int(run.offsets[index]) + _PREFIX_AT
        end = run.raw.find(b"\0", start, int(run.offsets[index] + run.lengths[index]))
        if end < 0:
            raise ProtocolError("the prefix of a logical message does not end with a zero byte", lsn=run.lsn(index))
        return bytes(run.raw[start:end])
