"""What a Spark master says of where the executors are."""

from __future__ import annotations

import re
from typing import Final

_LOCAL: Final = re.compile(r"local(\[.*\])?")
_OF_THIS_HOST: Final = re.compile(r"local-cluster\[.*\]|spark://(127(\.\d+){3}|localhost|\[::1\])(:\d+)?")


def is_connect(master: str) -> bool:
    """Whether it is a Spark Connect server."""
    return master.startswith("sc://")


def is_local(master: str) -> bool:
    """Whether the tasks run beside the driver, in one JVM and with its file system, environment and Python.

    ``local-cluster[...]`` is not: its executors are processes of their own, as on other machines.
    """
    return _LOCAL.fullmatch(master) is not None


def on_this_host(master: str) -> bool:
    """Whether executors can be nowhere else than on the driver's machine."""
    return is_local(master) or _OF_THIS_HOST.fullmatch(master) is not None
