"""What a Spark master URL says about where the executors run."""

from __future__ import annotations

import re
from typing import Final

_ONE_UP: Final = r"0*[1-9]\d*"
_LOCAL: Final = re.compile(rf"local(\[(\*|{_ONE_UP})(\s*,\s*{_ONE_UP})?\])?")
"""``local``, with the number of threads and the number of times a task may fail. Spark refuses zero for either
number."""
_KNOWN: Final = re.compile(rf"{_LOCAL.pattern}|local-cluster\[.*\]|spark://.+|yarn|k8s://.+")
_OF_THIS_HOST: Final = re.compile(r"local-cluster\[.*\]|spark://(127(\.\d+){3}|localhost|\[::1\])(:\d+)?")


def is_known(master: str) -> bool:
    """Whether the driver can run on this master: local, standalone, YARN or Kubernetes."""
    return _KNOWN.fullmatch(master) is not None


def is_local(master: str) -> bool:
    """Whether the tasks run in the driver's JVM, with the driver's file system, environment and Python.

    False for ``local-cluster[...]``: its executors are separate processes, as on other machines.
    """
    return _LOCAL.fullmatch(master) is not None


def on_this_host(master: str) -> bool:
    """Whether all executors must be on the driver's machine."""
    return is_local(master) or _OF_THIS_HOST.fullmatch(master) is not None
