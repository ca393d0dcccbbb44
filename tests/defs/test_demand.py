"""Whether the sensor requests a run, and why: one situation per case.

``LEVEL``: the lake's position (the end of the change log) is the source's flush position. ``AHEAD``: the source has
flushed WAL above the lake's position.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.defs.demand import FOREIGN_WAL_BYTES, Cursor, Runs, SourceState, busy, decide

NOW = 1_000_000.0
LEVEL = SourceState(now=NOW, flush_lsn=Lsn(0x1000), position=Lsn(0x1000))
AHEAD = replace(LEVEL, flush_lsn=Lsn(0x2000))
FRESH = Cursor(position=Lsn(0x1000), since=NOW - 5)
OLD = Cursor(position=Lsn(0x1000), since=NOW - 60)


@pytest.mark.parametrize(
    ("look", "cursor", "wanted", "why"),
    [
        pytest.param(LEVEL, OLD, False, "no WAL above the lake's position, 0/1000", id="no new WAL"),
        pytest.param(replace(LEVEL, to_copy=2), FRESH, True, "tables to copy: 2", id="a table to copy"),
        pytest.param(
            replace(LEVEL, unapplied=3), FRESH, True, "not applied yet: 3", id="log not applied to the mirrors"
        ),
        pytest.param(
            replace(AHEAD, published=True), FRESH, True, "changes wait in the slot", id="published change in the slot"
        ),
        pytest.param(
            replace(AHEAD, flush_lsn=Lsn(0x1001), published=True), FRESH, True, "1 bytes of WAL", id="one byte of WAL"
        ),
        pytest.param(
            replace(AHEAD, published=False),
            OLD,
            False,
            "no change to a published table",
            id="little WAL, without published changes",
        ),
        pytest.param(
            replace(AHEAD, published=False, catalog="b", catalog_changed=True),
            FRESH,
            True,
            "tables or publications of the source",
            id="a new table of the source",
        ),
        pytest.param(
            replace(AHEAD, published=True, catalog_changed=True, endpos=Lsn(0x1000)),
            FRESH,
            False,
            "syncs end",
            id="a new table, but the endpos is reached",
        ),
        pytest.param(
            AHEAD, FRESH, False, "no change to a published table", id="unknown if WAL has a published change, young WAL"
        ),
        pytest.param(
            AHEAD, OLD, True, "the lake has not advanced for 60 s", id="unknown if WAL has a published change, old WAL"
        ),
        pytest.param(
            replace(AHEAD, flush_lsn=Lsn(0x1000 + FOREIGN_WAL_BYTES)), FRESH, True, "16777216 bytes", id="16 MiB of WAL"
        ),
        pytest.param(
            replace(AHEAD, flush_lsn=Lsn(0xFFF + FOREIGN_WAL_BYTES), published=False),
            OLD,
            False,
            "no change to a published table",
            id="one byte less than 16 MiB of WAL",
        ),
        pytest.param(
            replace(LEVEL, to_copy=2, unapplied=3, paused=True),
            OLD,
            False,
            "no WAL above",
            id="applying is paused, nothing to receive",
        ),
        pytest.param(
            replace(AHEAD, published=True, paused=True),
            FRESH,
            True,
            "changes wait",
            id="applying is paused, published change in the slot",
        ),
        pytest.param(
            replace(AHEAD, published=True, to_copy=1, endpos=Lsn(0x1000)),
            OLD,
            False,
            "syncs end at 0/1000",
            id="endpos is reached",
        ),
        pytest.param(
            replace(AHEAD, unapplied=1, endpos=Lsn(0x1000)),
            OLD,
            True,
            "not applied yet: 1",
            id="endpos is reached, log not applied to the mirrors",
        ),
        pytest.param(
            replace(AHEAD, published=True, endpos=Lsn(0x1001)), OLD, True, "changes wait", id="endpos is not reached"
        ),
        pytest.param(
            replace(LEVEL, flush_lsn=Lsn(0xF00)),
            OLD,
            False,
            "no WAL above",
            id="source's flush position below the lake's",
        ),
    ],
)
def test_a_run_is_requested_only_if_there_is_work(look: SourceState, cursor: Cursor, wanted: bool, why: str) -> None:
    decision = decide(look, cursor, range_seconds=60)
    assert decision.wanted is wanted
    assert why in decision.why


@pytest.mark.parametrize(
    ("look", "current"),
    [
        (LEVEL, True),
        (replace(LEVEL, paused=True), True),
        (replace(LEVEL, unapplied=3, paused=True), False),
        (replace(AHEAD, published=False), True),
        (replace(AHEAD, published=False, unapplied=3, paused=True), False),
        (AHEAD, False),
    ],
)
def test_mirrors_with_changes_to_apply_are_not_current(look: SourceState, current: bool) -> None:
    assert decide(look, FRESH, range_seconds=60).current is current


@pytest.mark.parametrize(
    ("runs", "why"),
    [
        (Runs(), None),
        (Runs(holder="follow"), "`pgcdc follow` is running"),
        (Runs(under_way=["abcdefgh-1"]), "run abcdefgh is queued or starting"),
        (Runs(failures=1, last_ended=NOW - 5), "next try in 10 s"),
        (Runs(failures=1, last_ended=NOW - 14), "next try in 1 s"),
        (Runs(failures=1, last_ended=NOW - 15), None),
        (Runs(failures=3, last_ended=NOW - 50), "next try in 10 s"),
        (Runs(failures=30, last_ended=NOW - 500), "next try in 100 s"),
        (Runs(failures=30, last_ended=NOW - 601), None),
    ],
)
def test_no_run_is_requested_during_another_run_or_soon_after_a_failure(runs: Runs, why: str | None) -> None:
    reason = busy(runs, NOW)
    assert reason is None if why is None else why in str(reason)


def test_the_cursor_keeps_the_time_at_which_the_lakes_position_was_first_seen() -> None:
    first = Cursor().seen(LEVEL)
    assert first.since == NOW
    later = first.seen(replace(AHEAD, now=NOW + 30))
    assert later.since == NOW
    moved = later.seen(replace(AHEAD, now=NOW + 40, position=Lsn(0x1800)))
    assert (moved.since, moved.position) == (NOW + 40, Lsn(0x1800))


def test_the_cursor_keeps_the_lsn_up_to_which_the_slot_held_no_published_change() -> None:
    cursor = Cursor().seen(replace(AHEAD, published=False))
    assert cursor.empty_to == AHEAD.flush_lsn
    assert cursor.seen(replace(AHEAD, flush_lsn=Lsn(0x3000))).empty_to == AHEAD.flush_lsn


def test_the_cursor_keeps_the_newest_digest_of_the_catalog() -> None:
    cursor = Cursor().seen(replace(AHEAD, catalog="a")).seen(AHEAD)
    assert cursor.catalog == "a"
    assert cursor.seen(replace(AHEAD, catalog="b")).catalog == "b"


def test_the_cursor_is_unchanged_after_a_text_round_trip() -> None:
    cursor = Cursor(Lsn(0x16_B374_D848), 12.5, Lsn(7), "cd", 3.25, 4.5, "ab")
    assert Cursor.parse(str(cursor)) == cursor


@pytest.mark.parametrize("text", [None, "", "{}", "[]", "x", '{"position": -1, "since": 0}'])
def test_an_unreadable_cursor_is_replaced_by_an_empty_cursor(text: str | None) -> None:
    assert Cursor.parse(text) == Cursor()
