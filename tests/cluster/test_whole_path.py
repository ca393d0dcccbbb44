"""The commands, with their tasks on the executors of a cluster."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.cluster.conftest import Rig

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]


@pytest.mark.takes(100)
def test_on_a_shared_folder(rig_on: Callable[[str], Rig], shared_folder: str) -> None:
    """Copy, changes, a new copy, a repair; compared by the oracle and by ``verify``."""
    rig = rig_on(shared_folder)
    rig.project.run("setup")
    rig.project.run("sync")
    rig.assert_equal()
    rig.change()
    rig.project.run("sync")
    rig.assert_equal()
