"""A run ends if the server sends nothing on an open connection. It does not end if the server is only idle."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from pgcdc_assets.errors import SourceUnavailable
from pgcdc_assets.log.receive.receiver import Receiver
from pgcdc_assets.source.connect import silence
from pgcdc_assets.source.connect.connection import SourceConnection
from pgcdc_assets.source.connect.silence import Patience
from pgcdc_assets.source.connect.walsender import ReplicationConnection
from tests.deadpath import DeadPath
from tests.log.conftest import Source, rows
from tests.log.inside import receive_inside

SHORT = Patience(0.4, 1, 0.3)


@pytest.fixture
def path(source: Source, monkeypatch: pytest.MonkeyPatch) -> Iterator[DeadPath]:
    monkeypatch.setattr(SourceConnection, "patience", SHORT)
    monkeypatch.setattr(silence, "CHECK_SECONDS", 2)
    with DeadPath(source.database) as path:
        yield path


def after(seconds: float, action: Callable[[Receiver], None]) -> Callable[[Receiver], None]:
    """Gives the receiver an order, ``seconds`` after the receiver's start."""
    due = [time.monotonic() + seconds]

    def order(receiver: Receiver) -> None:
        if due and time.monotonic() > due[0]:
            due.clear()
            action(receiver)

    return order


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "new"),
    [
        ("stream", False), ("stream", True), ("stream by libpq", False), ("drain", True),
        pytest.param("stream by libpq", True, marks=pytest.mark.long),
        pytest.param("drain", False, marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_run_ends_when_the_network_path_is_dead(
    source: Source, path: DeadPath, kind: str, new: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No error arrives, so only the silence can end the run. A later run continues."""
    if kind == "stream by libpq":
        monkeypatch.setattr(ReplicationConnection, "socket", lambda connection: None)
    log = source.log()
    source.run("INSERT INTO a VALUES (1, 'x')")
    if kind == "drain":
        # The network path dies in the middle of a call, because these rows do not fit into the proxy's buffer.
        source.run("INSERT INTO a SELECT g, repeat(md5(g::text), 30) FROM generate_series(2, 60000) g")
    started = time.monotonic()
    with pytest.raises(SourceUnavailable, match=r"has sent nothing for 1 s|timeout"):
        receive_inside(
            source, log, None, lambda lsn: None, conninfo=path.conninfo, patience=SHORT,
            drain_bytes=0 if kind == "drain" else 1 << 40,
            orders=after(0 if kind == "drain" else 0.7, lambda receiver: path.die(new=new)),
        )  # fmt: skip
    assert time.monotonic() - started < 30
    path.close()
    source.receive(log, source.run("INSERT INTO a VALUES (0, 'y')"))
    assert len(rows(log, "kind = 'I'")) == (60001 if kind == "drain" else 2)


def test_idle_source_does_not_end_the_run(source: Source, path: DeadPath) -> None:
    """The source has nothing to send, but answers requests for a reply."""
    log = source.log()
    end = receive_inside(
        source, log, None, lambda lsn: None, conninfo=path.conninfo, patience=SHORT,
        orders=after(4, lambda receiver: receiver.until(source.run("INSERT INTO a VALUES (1, 'x')"))),
    )  # fmt: skip
    assert len(rows(log, "kind = 'I'")) == 1
    assert end > log.start


@pytest.mark.long
def test_receiver_waits_for_a_walsender_that_is_decoding(
    source: Source, path: DeadPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A walsender that decodes WAL of unpublished tables sends nothing, and does not read requests either."""
    looked: list[bool] = []
    at_work = ReplicationConnection.at_work

    def busy(connection: ReplicationConnection) -> bool:
        looked.append(at_work(connection))
        return True

    monkeypatch.setattr(ReplicationConnection, "at_work", busy)
    log = source.log()

    def give_up(receiver: Receiver) -> None:
        if len(looked) > 3:
            receiver.stop()

    def orders(receiver: Receiver) -> None:
        die(receiver)
        give_up(receiver)

    die = after(0.5, lambda receiver: path.die(new=True))
    receive_inside(source, log, None, lambda lsn: None, conninfo=path.conninfo, patience=SHORT, orders=orders)
    assert looked[:2] == [False, False], "a walsender that waits for us is not at work"
