"""`status` names the holders of the lake's locks, and reports a holder that does not name itself."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.flow.requests import place_verify_request
from tests.cli.conftest import Shell


def test_status_shows_the_request_of_a_running_verify(shell: Shell) -> None:
    shell.pgcdc("setup")
    with place_verify_request(Layout.of(shell.folder / "lake")) as request:
        assert f"paused               for `pgcdc verify` (pid {os.getpid()}): nothing is applied" in shell.pgcdc(
            "status"
        )
        request.at(Lsn(16))
        assert f"paused               for `pgcdc verify` (pid {os.getpid()}), at 0/10\n" in shell.pgcdc("status")
        assert json.loads(shell.pgcdc("status", "--json"))["hold"]["lsn"] == "0/10"
    assert "held  " not in shell.pgcdc("status")


def test_status_names_a_lock_whose_holder_does_not_name_itself(shell: Shell) -> None:
    shell.pgcdc("setup")
    own = Path("lake/_pgcdc")
    own.mkdir(parents=True)
    for name, code in (("hold", 0), ("waiting", 0), ("lock", 1)):
        with (own / name).open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            said = shell.pgcdc("status", expect=code)
            assert f"/_pgcdc/{name} is locked by an unknown process" in said
