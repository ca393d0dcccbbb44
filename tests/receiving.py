"""A helper that runs the receiver in its own process."""

from __future__ import annotations

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.log.receive.client import ReceiverProcess
from tests.waiting import wait_for

SECONDS = 120.0


def run_to(receiver: ReceiverProcess, goal: Lsn) -> None:
    """Runs the receiver until it has received everything below ``goal``. Then waits until its process has ended."""
    receiver.start()
    try:
        receiver.until(goal)
        wait_for(lambda: any(event.name == "arrived" for event in receiver.events(0.1)), SECONDS, "the goal")
        receiver.join(SECONDS)
    finally:
        receiver.kill()
