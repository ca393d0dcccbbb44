"""The receiver notes how far the log is complete, in WAL that holds nothing for the log."""

from __future__ import annotations

from pgcdc_assets.log.extent import complete_to
from tests.log.conftest import Source, eventually, until_event


def test_log_is_complete_past_wal_that_holds_nothing_for_it(source: Source) -> None:
    """The recorded position stays: it moves once per segment file of such WAL."""
    log = source.log()
    receiver = source.receiver(log)
    until_event(receiver, "started")
    recorded = log.position()
    lsn = source.run("INSERT INTO foreign_table VALUES (1)")
    eventually(lambda: complete_to(log.layout, log.position()) >= lsn)
    assert log.position() == recorded
    receiver.stop()
    assert complete_to(log.layout, log.position()) >= lsn
