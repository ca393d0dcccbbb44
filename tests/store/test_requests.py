"""What a lake in an object store costs in requests: a PUT or a listing is twelve times as dear as a GET."""

from __future__ import annotations

from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.location import Location
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.log.reader import ChangeLog
from tests.log.test_reader import START, WHO, _transaction, _writer
from tests.store.faultproxy import Faults
from tests.store.test_faults import faults  # noqa: F401


def test_a_commit_of_the_log_is_two_puts(faults: Faults, bucket: Location) -> None:  # noqa: F811
    """Its segment and itself; a position without rows is one."""
    log = ChangeLog(Layout(bucket))
    log.create(WHO, START, 3)
    writer, _ = _writer(log)
    for number in range(5):
        faults.seen.clear()
        writer.commit(_transaction(200 + 100 * number), [], Lsn(250 + 100 * number))
        assert (faults.seen["PUT"], faults.seen["LIST"], faults.seen["POST"]) == (2, 0, 0)
    faults.seen.clear()
    writer.advance(Lsn(1000))
    assert (faults.seen["PUT"], faults.seen["LIST"]) == (1, 0)
    reader = ChangeLog(Layout(bucket)).open()
    faults.seen.clear()
    assert reader.position() == 1000
    assert (faults.seen["PUT"], faults.seen["LIST"]) == (0, 0)
