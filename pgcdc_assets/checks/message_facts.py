"""Reads the position of the feed of logical messages."""

from __future__ import annotations

from pgcdc_assets.checks.facts import Facts, MessageFacts
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.failures import contained
from pgcdc_assets.feed.messages import MessageFeed
from pgcdc_assets.points.points import ConsistentPoints


def read_message_facts(layout: Layout, facts: Facts) -> MessageFacts:
    """Call this only if the setting ``messages`` names prefixes. A feed without new messages has no new commits, so the
    newest consistent point says up to which LSN the feed is complete."""
    if facts.log is None:
        return MessageFacts()
    with contained() as failed:
        feed = MessageFeed(layout, facts.log.identity)
        newest = ConsistentPoints(layout).newest()
    if failed.reason is not None:
        return MessageFacts(failure=failed.reason)
    if newest is not None and newest.messages is not None:
        feed.known_to(newest.replay_lsn)
    return MessageFacts(feed.complete_to if feed.exists else None)
