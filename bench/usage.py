"""Measures CPU seconds and peak memory by kind of process, during a block of code."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import psutil

from pgcdc_assets.demo.server import EmbeddedServer

_SECONDS = 0.4
"""Seconds between two readings. A reading uses about 20 ms of a core, which is then missing for the measured
processes."""


@dataclass
class Usage:
    cpu: dict[str, float] = field(default_factory=dict)
    peak: dict[str, int] = field(default_factory=dict)
    """By kind of process: the largest resident memory of one process, including shared memory."""


@contextmanager
def usage(*servers: EmbeddedServer) -> Iterator[Usage]:
    """Usage during the block. The result is filled in when the block ends. CPU time after the last reading of a process
    that has ended is missing."""
    found = Usage()
    before, after, peaks = _cpu(servers), {}, defaultdict[str, int](int)
    done = threading.Event()

    def look() -> None:
        while True:
            for process, kind in _processes(servers):
                with suppress(psutil.Error, OSError):
                    after[process] = kind, _seconds(process)
                    peaks[kind] = max(peaks[kind], process.memory_info().rss)
            if done.wait(_SECONDS):
                return

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    yield found
    done.set()
    thread.join()
    for process, (kind, seconds) in {**after, **_cpu(servers)}.items():
        found.cpu[kind] = found.cpu.get(kind, 0.0) + seconds - before.get(process, (kind, 0.0))[1]
    found.peak.update(peaks)


def _cpu(servers: tuple[EmbeddedServer, ...]) -> dict[psutil.Process, tuple[str, float]]:
    result = {}
    for process, kind in _processes(servers):
        with suppress(psutil.Error):
            result[process] = kind, _seconds(process)
    return result


def _processes(servers: tuple[EmbeddedServer, ...]) -> list[tuple[psutil.Process, str]]:
    ours = psutil.Process()
    found = [(ours, "driver")]
    for process in ours.children(recursive=True):
        with suppress(psutil.Error):
            found.append((process, _kind(process)))
    for number, server in enumerate(servers):
        if (pid := server.pid) is not None:
            kind = "server" if number == 0 else "target"
            found += [(process, kind) for process in psutil.Process(pid).children(recursive=True)]
    own = {process.pid for process, kind in found if kind in ("server", "target")}
    return [(process, kind) for process, kind in found if kind in ("server", "target") or process.pid not in own]


@lru_cache(maxsize=4096)
def _kind(process: psutil.Process) -> str:
    line = process.cmdline()
    if "pgcdc_assets.log.receive.process" in line:
        return "receiver"
    if line and Path(line[0]).name == "java":
        return "JVM"
    if any("pyspark" in part for part in line):
        return "workers"
    return process.name()


def _seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
