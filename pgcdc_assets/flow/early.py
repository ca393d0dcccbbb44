"""Has segments of transactions in progress derived as the receiver spools them."""

from __future__ import annotations

import uuid

from pgcdc_assets.core.location import LOCAL
from pgcdc_assets.core.master import is_local
from pgcdc_assets.feed.early import EarlyFeeds, EarlySegment
from pgcdc_assets.flow.stream import LogStream
from pgcdc_assets.flow.work import Work
from pgcdc_assets.log.receive.messages import Event, SpooledFile
from pgcdc_assets.protocol.shape import RelationFacts, Shape


class EarlyDerivation:
    """Of one run, whose turns find its files in ``work.early``."""

    def __init__(self, work: Work, stream: LogStream) -> None:
        self._work = work
        self._stream = stream
        self._feeds = work.early = EarlyFeeds(work.session, work.layout.staging / uuid.uuid4().hex)
        # Beside an object store the receiver's drafts lie on this machine, where executors of a cluster see none.
        self._reachable = is_local(work.settings.master) or work.layout.root.scheme == LOCAL

    def go_on(self, *, paused: bool) -> None:
        """Take in what the receiver has said since the last call. Nothing is derived for a run that is paused."""
        events, self._stream.in_progress = self._stream.in_progress, []
        for event in events:
            if event.spooled is None or event.xid is None:
                self._feeds.ended(event.xid, event.commit_lsn)
            elif self._reachable and not paused:
                self._feeds.spooled(self._segment(event, event.xid, event.spooled), self._work.progress.router)
        self._feeds.begin_due()
        self._feeds.passed(self._work.progress.replay_lsn)

    def close(self) -> None:
        self._work.early = None
        self._feeds.close()

    def _segment(self, event: Event, xid: int, file: SpooledFile) -> EarlySegment:
        shapes = {
            number: Shape.resolve(payload, RelationFacts.from_json(facts), event.lsn)
            for number, (payload, facts) in file.relations.items()
        }
        return EarlySegment(xid, file.draft, self._work.layout.change_log / file.name, shapes)
