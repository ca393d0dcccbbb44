"""A process ends in time after a signal, even if its work hangs. The functions in ``SCRIPT`` are the work of the
process. The parameter ``boundary`` is the number of seconds that a sync gets to stop at a commit boundary."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from pgcdc_assets.core import ending
from pgcdc_assets.core.ending import ENDING

SCRIPT = """
import sys, threading, time
from pgcdc_assets.core import ending
ending.END_SECONDS, ending.SECOND_SECONDS = 2.0, 0.3
ending.ENDING.own()
stop = threading.Event()

def stubborn():
    print("ready", flush=True)
    while True:
        try:
            time.sleep(100)
        except KeyboardInterrupt:
            print("interrupted", flush=True)

def deaf():
    # A C library that waits for a lock: Python's signal handlers are not called during this wait.
    import ctypes
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    print("ready", flush=True)
    libc.pthread_mutex_lock(mutex)

def boundary():
    print("ready", flush=True)
    stop.wait()
    print("at a boundary", flush=True)

def busy():
    print("ready", flush=True)
    try:
        time.sleep(100)
    except KeyboardInterrupt:
        print("interrupted", flush=True)

with ending.ENDING.{kind}:
    {what}()
print("end", flush=True)
time.sleep({rest})
"""


def run(kind: str, what: str, numbers: list[int], *, boundary: float = 0.5, rest: float = 0) -> tuple[int, str, float]:
    """Starts a process whose work is the function ``what`` of ``SCRIPT``, and sends it the signals ``numbers``. Returns
    the exit code, the output, and the seconds from the first signal to the end of the process."""
    script = SCRIPT.format(kind=kind.format(boundary), what=what, rest=rest)
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.2)
        started = time.monotonic()
        for number in numbers:
            process.send_signal(number)
            time.sleep(0.2)
        try:
            words, _ = process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return process.returncode, words, time.monotonic() - started


AT_ONCE = 20
"""Seconds within which a process must end. If the process waited for a commit boundary or for the end of its work
instead, it would need 50 seconds or more."""
AT_BOUNDARY = "at_boundary(stop, boundary={})"
KINDS = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])


@KINDS
def test_signalled_sync_ends_at_the_next_commit_boundary(number: int) -> None:
    code, words, seconds = run(AT_BOUNDARY, "boundary", [number], boundary=50)
    assert (code, words) == (0, "at a boundary\nend\n")
    assert seconds < AT_ONCE


@KINDS
def test_sync_that_reaches_no_commit_boundary_in_time_is_interrupted(number: int) -> None:
    code, words, _ = run(AT_BOUNDARY, "busy", [number])
    assert (code, words) == (0, "interrupted\nend\n")


def test_second_signal_interrupts_the_sync_at_once() -> None:
    code, words, seconds = run(AT_BOUNDARY, "busy", [signal.SIGINT, signal.SIGINT], boundary=50)
    assert (code, words) == (0, "interrupted\nend\n")
    assert seconds < AT_ONCE


@pytest.mark.parametrize("what", ["stubborn", "deaf"])
def test_process_whose_work_ignores_the_interrupt_is_terminated(what: str) -> None:
    """``stubborn`` is Python code that catches KeyboardInterrupt and continues. ``deaf`` waits in a C call, so that no
    Python signal handler is called."""
    code, words, seconds = run(AT_BOUNDARY, what, [signal.SIGTERM])
    assert code == ending.CODE
    assert "nothing is half done" in words
    assert "end\n" not in words
    assert seconds < AT_ONCE
    code, _, again = run(AT_BOUNDARY, what, [signal.SIGTERM, signal.SIGTERM], boundary=50)
    assert (code, again < AT_ONCE) == (ending.CODE, True)


@pytest.mark.long
def test_process_that_hangs_after_the_end_of_its_work_is_terminated() -> None:
    """For example, an exit handler may hang, or a thread that is joined at exit."""
    code, words, seconds = run(AT_BOUNDARY, "boundary", [signal.SIGINT], boundary=50, rest=50)
    assert (code, seconds < AT_ONCE) == (ending.CODE, True)
    assert words.startswith("at a boundary\nend\n")


@pytest.mark.long
def test_a_command_that_needs_no_commit_boundary_ends_at_once_after_a_signal() -> None:
    code, words, seconds = run("at_once()", "busy", [signal.SIGTERM])
    assert (code, words) == (0, "interrupted\nend\n")
    assert seconds < AT_ONCE
    code, _, seconds = run("at_once()", "stubborn", [signal.SIGTERM])
    assert (code, seconds < AT_ONCE) == (ending.CODE, True)


def test_process_that_pgcdc_did_not_start_continues_after_a_signal_ended_its_sync() -> None:
    """For example, Dagster or a test has started the process. The process is not interrupted after its sync has
    ended."""
    stop = threading.Event()
    with ENDING.at_boundary(stop, boundary=0.3):
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait(60)
        assert ENDING.asked
    time.sleep(0.6)
    assert not ENDING.asked
