"""The positions that a standby status update reports. They never go down."""

from __future__ import annotations

from pgcdc_assets.core.lsn import Lsn


class ReportedPositions:
    """``write``, ``flush`` and ``apply``, never below the slot's ``confirmed_flush_lsn`` at connect.

    ``flush`` is ``transform_lsn``: every transaction up to it is durable in the log. Everything up to ``write`` has
    been received, and everything up to ``apply`` is in every mirror. ``write`` and ``apply`` do not decide which WAL
    the server may remove. Each setter returns the position that is valid after the call.
    """

    def __init__(self, floor: Lsn) -> None:
        self._write = self._flush = self._apply = floor

    @property
    def write(self) -> Lsn:
        return self._write

    @property
    def flush(self) -> Lsn:
        return self._flush

    @property
    def apply(self) -> Lsn:
        return min(self._apply, self._flush)

    def received(self, lsn: Lsn) -> Lsn:
        self._write = max(self._write, lsn)
        return self._write

    def durable(self, lsn: Lsn) -> Lsn:
        self._flush = max(self._flush, lsn)
        self.received(lsn)
        return self._flush

    def applied(self, lsn: Lsn) -> Lsn:
        """Records that every mirror has reached ``lsn``. The reported position is never above ``flush``."""
        self._apply = max(self._apply, lsn)
        return self.apply
