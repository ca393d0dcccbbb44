"""The command, or only its JVM, is killed at durable steps of a whole sync. The next command continues the work."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path

import pytest

from pgcdc_assets.core.layout import Location
from pgcdc_assets.demo.server import EmbeddedServer
from tests.crash.byprocess import CASES, SOME, ByProcess
from tests.crash.faults import Faults
from tests.crash.proxy import Proxy
from tests.crash.tally import Tally
from tests.fix_postgres import fresh_database


@pytest.mark.long
@pytest.mark.process
@pytest.mark.timeout(7200)
@pytest.mark.takes(500)
@pytest.mark.parametrize("command", ["sync", "others"])
def test_killed_command_loses_nothing(
    crash_server: EmbeddedServer, faults: Faults, chance: random.Random, tally: Tally, tmp_path: Path, command: str,
    *, every: bool,
) -> None:  # fmt: skip
    cases = [case for case in CASES if (case.command == "sync") is (command == "sync")]
    drawn = {*chance.sample(cases, SOME)}
    chosen = cases if every else [case for case in cases if case in drawn]
    with fresh_database(crash_server) as database, Proxy(crash_server.socket_folder) as proxy, closing(
        ByProcess(crash_server, faults, proxy, chance, tally, database, Location.of(tmp_path / "lake"),
                  folder=tmp_path)
    ) as rig:  # fmt: skip
        with rig.writers.writing():
            for case in chosen:
                rig.prepare(case)
                rig.cycle(case)
        rig.project.run("sync")
        rig.assert_all_there()
        rig.assert_recorded()
        assert not rig.unmet
