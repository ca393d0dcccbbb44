"""Number of requests for a lake in an object store. A PUT or a listing costs twelve times as much as a GET."""

from __future__ import annotations

from pgcdc_assets.core.layout import Layout, Location
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.log.reader import ChangeLog
from tests.log.written import START, WHO, frames_of, writer_of
from tests.store.faultproxy import Faults


def test_a_batch_of_the_log_needs_two_puts(faults: Faults, bucket: Location) -> None:
    """A batch needs one PUT for the segment and one PUT for the Delta commit. A position without rows needs one PUT."""
    log = ChangeLog(Layout(bucket))
    log.create(WHO, START, 3)
    writer, _ = writer_of(log)
    for number in range(5):
        faults.seen.clear()
        writer.commit(frames_of(200 + 100 * number), [], Lsn(250 + 100 * number))
        assert (faults.seen["PUT"], faults.seen["LIST"], faults.seen["POST"]) == (2, 0, 0)
    faults.seen.clear()
    writer.advance(Lsn(1000))
    assert (faults.seen["PUT"], faults.seen["LIST"]) == (1, 0)
    reader = ChangeLog(Layout(bucket)).open()
    faults.seen.clear()
    assert reader.position() == 1000
    assert (faults.seen["PUT"], faults.seen["LIST"]) == (0, 0)
