"""The parts that the intake makes from a run of frames."""

from __future__ import annotations

from dataclasses import dataclass

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.log.framerun import FrameRun
from pgcdc_assets.log.prepared import PreparedKey, PreparedTransaction
from pgcdc_assets.log.receive.blocks import Block, Dropped
from pgcdc_assets.log.spool import StreamEnd
from pgcdc_assets.log.transactions import OpenTransaction


@dataclass(frozen=True)
class Taken:
    """The part of a run that belongs to the log, from transactions that come as a whole."""

    run: FrameRun
    whole: int
    """Number of leading frames that belong to complete transactions, or come between transactions."""
    after: OpenTransaction | None
    """The transaction that is open after the run."""


@dataclass(frozen=True)
class StreamEnded:
    """A transaction in progress has committed, and belongs to the log."""

    xid: int
    end: StreamEnd
    commit: FrameRun
    """Its Commit, as one frame."""


@dataclass(frozen=True)
class Prepared:
    """A transaction is prepared. Its content must be kept, durably, until the transaction ends."""

    transaction: PreparedTransaction


@dataclass(frozen=True)
class PreparedEnded:
    """A prepared transaction has committed, and belongs to the log."""

    transaction: PreparedTransaction
    end: StreamEnd
    commit: FrameRun
    """Its Commit, as one frame."""


@dataclass(frozen=True)
class PreparedDropped:
    """A prepared transaction was rolled back, or the log holds it."""

    key: PreparedKey


Part = Taken | Block | Dropped | StreamEnded | Prepared | PreparedEnded | PreparedDropped


class StreamUnsure(Exception):
    """A transaction in progress has committed, and its blocks do not show which of its messages count, or whether it
    has an origin. If it is sent as a whole, it does. So the stream must restart with version 1, until ``end_lsn`` is
    passed."""

    def __init__(self, end_lsn: Lsn) -> None:
        super().__init__()
        self.end_lsn = end_lsn
