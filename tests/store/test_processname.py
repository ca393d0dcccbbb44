"""A process has a unique name. Whether it is alive can be checked only on its own machine."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import replace

import psutil
import pytest

from pgcdc_assets.store.processname import ProcessName

NAME_AND_WAIT = "from pgcdc_assets.store.processname import ProcessName; print(ProcessName.own(), flush=True); input()"


def test_a_process_knows_its_own_name() -> None:
    own = ProcessName.own()
    assert (own.host, own.pid, own.is_here, own.lives()) == (socket.gethostname(), os.getpid(), True, True)
    assert ProcessName.parse(str(own)) == own
    assert re.fullmatch(r"[\w.-]+", str(own)), "Dagster takes no other text for a tag"
    with pytest.raises(ValueError, match="unpack"):
        ProcessName.parse("host.1.2")


def test_a_host_name_may_contain_dots() -> None:
    name = replace(ProcessName.own(), host="a.b.example.org")
    assert ProcessName.parse(str(name)) == name


def test_another_process_is_alive_until_it_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", NAME_AND_WAIT], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          text=True) as process:  # fmt: skip
        assert process.stdout is not None
        name = ProcessName.parse(process.stdout.readline().strip())
        assert (name.pid, name.lives()) == (process.pid, True)
        assert not replace(name, started=name.started - 100).lives(), "its number was given again"
        process.kill()
        process.wait()
    assert name.lives() is False
    assert name.told == f"pid {name.pid}"


def test_a_process_in_a_container_cannot_be_looked_up_here() -> None:
    """The process in the container has our host name and a pid that is also used on this host."""
    unshare = shutil.which("unshare")
    command = [unshare or "", "--pid", "--fork", "--mount-proc", sys.executable, "-c", NAME_AND_WAIT]
    if unshare is None or subprocess.run([*command[:4], "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this machine lets nobody make a namespace of processes")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        name = ProcessName.parse(process.stdout.readline().strip())
        assert (name.host, name.pid, psutil.pid_exists(name.pid)) == (socket.gethostname(), 1, True)
        assert (name.is_here, name.lives()) == (False, None)
        assert name.told == f"pid 1 on {name.host}"
        process.communicate("\n")
