from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import PgcdcError
from pgcdc_assets.flow.decide import Bounds
from pgcdc_assets.points.points import ConsistentPoints
from tests.flow.rig import Rig
from tests.waiting import wait_for


@dataclass
class Following:
    rig: Rig
    stop: threading.Event = field(default_factory=threading.Event)
    errors: list[PgcdcError] = field(default_factory=list)
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.rig.engine("follow").sync(Bounds(follow=True, stop=self.stop))
        except PgcdcError as error:
            self.errors.append(error)

    def listed(self, *tables: str, since: Lsn | None = None) -> None:
        """Waits for a point at ``since`` or above (default: the source's current LSN) that lists exactly these
        tables."""
        points, goal = ConsistentPoints(self.rig.settings.layout), since or self.rig.flush()
        wanted = {TableName("public", table) for table in tables}

        def reached() -> bool:
            assert not self.errors, self.errors
            newest = points.newest()
            return newest is not None and newest.replay_lsn >= goal and set(newest.tables) == wanted

        wait_for(reached, what=f"a point of {tables}")


@contextmanager
def following_run(rig: Rig) -> Iterator[Following]:
    following = Following(rig)
    try:
        yield following
    finally:
        following.stop.set()
        following.thread.join(120)
