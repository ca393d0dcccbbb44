"""Makes a consistent point at the LSN of a snapshot of the source, so that ``verify`` can compare source and mirrors at
one LSN. While a snapshot is open, VACUUM on the source cannot remove dead rows. So the mirrors first catch up without a
snapshot. Then the snapshot is taken, and the mirrors must reach its LSN within POINT_SECONDS."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.errors import CopyBlocked, LakeError, LockHeld
from pgcdc_assets.flow import lock
from pgcdc_assets.flow.requests import PlacedRequest, apply_paused, operator_requests, place_verify_request
from pgcdc_assets.points.points import ConsistentPoints, Point
from pgcdc_assets.points.states import TableStates
from pgcdc_assets.settings import Settings
from pgcdc_assets.source.connect.connection import APPLICATION, connect
from pgcdc_assets.source.connect.silence import TELL_SECONDS
from pgcdc_assets.source.slot.blockers import OnWait, transactions
from pgcdc_assets.source.slot.slot import LOCK_SECONDS, flush_lsn
from pgcdc_assets.source.snapshot.export import Snapshot, exported_snapshot
from pgcdc_assets.structure.record import TableState

POINT_SECONDS = 600.0
"""Seconds that the snapshot stays open while the mirrors catch up. After that, ``verify`` fails and can be repeated:
this costs the source less than a snapshot that stays open for longer."""
HELD_SECONDS = 5.0
"""Seconds that one attempt to take the snapshot waits for open transactions. The limit is short, because a running sync
starts no turn during this time."""
_POLL_SECONDS = 0.2


SyncTo = Callable[[Lsn, float | None], None]
"""Runs a sync up to the given LSN, for at most the given number of seconds (None: without a limit). Raises LockHeld if
another process writes to the lake."""


class Boundary:
    """Makes a consistent point at a snapshot's LSN: by the running sync or, if no sync runs, by ``sync_to``."""

    def __init__(self, settings: Settings, conninfo: str, sync_to: SyncTo, on_wait: OnWait) -> None:
        self._settings = settings
        self._layout = settings.layout
        self._conninfo = conninfo
        self._sync_to = sync_to
        self._on_wait = on_wait
        self._request: PlacedRequest | None = None

    def prepare(self) -> None:
        """Run a sync, so that the mirrors catch up before the snapshot is taken. Does nothing if a sync is running
        already. LakeError if no table can be compared."""
        self._refuse()
        if lock.holder(self._layout) is None:
            with connect(self._conninfo) as conn:
                now = flush_lsn(conn)
            with suppress(LockHeld):
                self._sync_to(now, None)
            self._refuse()

    @contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        """Take a snapshot of the source. While it is taken, a running sync starts no turn, so that no mirror passes the
        snapshot's LSN. The snapshot needs a new slot, and PostgreSQL creates a slot only after all open transactions
        have ended. So this method waits for old transactions before it pauses the sync."""
        deadline = time.monotonic() + LOCK_SECONDS
        with ExitStack() as stack:
            yield self._taken(stack, deadline)

    def _taken(self, stack: ExitStack, deadline: float) -> Snapshot:
        while True:
            self._wait_for_old_transactions(deadline)
            with ExitStack() as attempt:
                self._request = attempt.enter_context(place_verify_request(self._layout))
                try:
                    taken = attempt.enter_context(
                        exported_snapshot(self._conninfo, lock_seconds=HELD_SECONDS, on_wait=self._on_wait)
                    )
                except CopyBlocked:
                    if time.monotonic() > deadline:
                        raise
                    self._tell_holders()
                    continue
                if self._request.is_late and time.monotonic() < deadline:
                    # The snapshot took so long that the sync may no longer obey the request. Its mirrors may then have
                    # passed the snapshot's LSN, so a new snapshot is taken.
                    continue
                stack.enter_context(attempt.pop_all())
                return taken

    def _tell_holders(self) -> None:
        """Report the transactions that a failed attempt waited for. This also reports transactions that
        :meth:`_wait_for_old_transactions` does not wait for, because the server hides the age of other roles'
        transactions from an unprivileged role."""
        with connect(self._conninfo, application_name=f"{APPLICATION}/watch") as conn:
            if holders := transactions(conn):
                self._on_wait(holders)

    def _wait_for_old_transactions(self, deadline: float) -> None:
        tell_at = time.monotonic() + TELL_SECONDS
        with connect(self._conninfo, application_name=f"{APPLICATION}/watch") as conn:
            # Transactions without an age are ignored: they belong to another role, and the server hides their age.
            while old := [one for one in transactions(conn)
                          if one.age is not None and one.age.total_seconds() >= HELD_SECONDS]:  # fmt: skip
                now = time.monotonic()
                if now > deadline:
                    who = ", ".join(str(one) for one in old)
                    raise CopyBlocked(
                        f"was not taken within {LOCK_SECONDS} s, because it waits for all open transactions: {who}",
                        thing="snapshot", do="end these transactions, then run the command again",
                    )  # fmt: skip
                if now > tell_at:
                    tell_at = now + TELL_SECONDS
                    self._on_wait(old)
                time.sleep(_POLL_SECONDS)

    def reach(self, lsn: Lsn) -> Point:
        """Return the consistent point at exactly ``lsn``. LakeError if this point is not made within POINT_SECONDS."""
        assert self._request is not None
        self._request.at(lsn)
        deadline = time.monotonic() + POINT_SECONDS
        points = ConsistentPoints(self._layout)
        while not points.has(lsn):
            self._refuse()
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._not_reached(lsn)
            if lock.holder(self._layout) is not None:
                time.sleep(_POLL_SECONDS)
                continue
            try:
                self._sync_to(lsn, left)
            except LockHeld:
                continue
            if not points.has(lsn):
                raise self._not_reached(lsn)
        point = points.at(lsn)
        assert point is not None
        return point

    def _not_reached(self, lsn: Lsn) -> LakeError:
        what = f"no table reached the snapshot's LSN within {POINT_SECONDS:g} s"
        do = "run `pgcdc sync`, then `pgcdc verify` again; `pgcdc status` shows what delays the tables"
        return LakeError(what, thing=f"lake {self._settings.lake}", lsn=lsn, do=do)

    def _refuse(self) -> None:
        """Raise LakeError if no point can be made, because no table is followed or applying is paused."""
        if operator_requests(self._layout).paused:
            raise apply_paused(self._layout)
        states = {row.state for row in TableStates(self._layout).all().values()}
        if any(state.readable for state in states):
            return
        thing = f"lake {self._settings.lake}"
        if TableState.SET_ASIDE in states and TableState.COPYING not in states:
            raise LakeError(
                "has no table to compare: all are set aside", thing=thing, do="see the reasons in `pgcdc status`"
            )
        raise LakeError(
            "has no table to compare: each waits for its copy",
            thing=thing,
            do="run `pgcdc sync`, then `pgcdc verify` again",
        )
