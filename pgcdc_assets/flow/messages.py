"""The feed of logical messages in a run. It is a Delta table with the messages that applications have written with
``pg_logical_emit_message``, if the setting ``messages`` includes their prefixes."""

from __future__ import annotations

from collections.abc import Sequence

from pgcdc_assets.core.encoding import Encoding
from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.errors import UsageError
from pgcdc_assets.failures import contained
from pgcdc_assets.feed.messages import MessageFeed, MessagesTaken
from pgcdc_assets.flow.reports import MessagesReport
from pgcdc_assets.flow.work import Work
from pgcdc_assets.log.span import LogSpan
from pgcdc_assets.log.summary import BatchSummary


def begin_messages(work: Work) -> None:
    """Open the feed, before the receiver asks the source for messages. A new feed begins at the log's present position.
    If an existing feed cannot be read, the run continues without it, and maintenance keeps the log that the feed has
    not taken yet. If a new feed cannot be created, the run ends, because the next run would not know where the feed has
    to begin."""
    if not work.settings.messages:
        return
    with contained() as failed:
        feed = _opened(work)
    if failed.reason is not None:
        _report_failure(work, failed.reason)
        return
    feed.begin(work.log.position(), work.log.start)
    work.messages = feed


def take_messages(work: Work, log: LogSpan, upto: Lsn) -> MessagesTaken:
    """Advance the feed to ``upto``. A failure is only reported: mirrors continue, and the next turn tries again."""
    if work.messages is None:
        begin_messages(work)
    if work.messages is None:
        return MessagesTaken()
    with contained() as failed:
        return work.messages.advance(log, upto)
    _report_failure(work, failed.told)
    work.messages = None
    return MessagesTaken()


def messages_at(work: Work, lsn: Lsn) -> Lsn | None:
    """The feed's recorded position, for a point at ``lsn``; None if the feed is not complete to ``lsn``."""
    feed = work.messages
    return feed.covered.end if feed is not None and feed.complete_to >= lsn else None


def messages_needed(work: Work) -> list[Lsn]:
    """The LSN above which maintenance must keep the log for the feed; empty if the setting ``messages`` is empty."""
    if not work.settings.messages:
        return []
    return [work.log.start if work.messages is None else work.messages.complete_to]


def derive_messages(work: Work, span: LsnRange) -> MessagesTaken:
    """Write the feed again, from the log, for the part of the range that the feed covers. UsageError if the feed does
    not exist, or if it covers no part of the range."""
    feed = work.messages or _opened(work)
    if not feed.exists:
        raise UsageError("does not exist", thing="the feed of messages",
                         do="set `messages` to patterns of the prefixes to include")  # fmt: skip
    held = LsnRange(feed.covered.start, feed.complete_to)
    if span.end <= held.start or span.start >= held.end:
        raise UsageError(f"covers only the range {held}, and no part of {span}", thing="the feed of messages",
                         do="choose a range within the feed's range")  # fmt: skip
    return feed.derive_again(work.log, span)


def messages_report(work: Work, batches: Sequence[BatchSummary]) -> MessagesReport | None:
    """The number of messages in a range, counted in the log, and the state of the feed. None without the setting
    ``messages``, or if the feed has failed."""
    feed = work.messages
    if feed is None:
        return None
    count = sum(batch.others.get("M", 0) for batch in batches if batch.start >= feed.covered.start)
    return MessagesReport(count, feed.complete_to, feed.version)


def merge_messages(work: Work) -> None:
    """Merge the feed's small files. Files that cannot be merged stay readable."""
    if work.messages is None:
        return
    with contained() as failed:
        work.messages.compact()
    if failed.reason is not None:
        _report_failure(work, failed.reason)


def _opened(work: Work) -> MessageFeed:
    feed = MessageFeed(work.layout, work.identity, Encoding.of(work.catalog.encoding))
    newest = work.progress.points.newest()
    if newest is not None and newest.messages is not None:
        # Without new messages, the feed makes no Delta commit, so its stored position may be below the point.
        feed.known_to(newest.replay_lsn)
    return feed


def _report_failure(work: Work, failure: str) -> None:
    if failure not in work.messages_reported:
        work.messages_reported.add(failure)
        work.observer.progress("messages", f"writing the feed of messages failed, and will be tried again: {failure}")
