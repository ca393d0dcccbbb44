from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.errors import LockHeld, MachineError
from pgcdc_assets.flow import hold
from pgcdc_assets.flow.lock import LockHolder, holder, lake_lock

HOLD_IT = """
import sys
from pathlib import Path
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.flow.lock import lake_lock
with lake_lock(Layout.of(Path(sys.argv[1])), "follow"):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout.of(tmp_path / "lake")


def test_holder_is_named_while_held_and_forgotten_after(layout: Layout) -> None:
    assert holder(layout) is None
    with lake_lock(layout, "sync"):
        assert holder(layout) == LockHolder(os.getpid(), "sync")
        with pytest.raises(LockHeld, match=rf"`pgcdc sync` \(pid {os.getpid()}\)"), lake_lock(layout, "snapshot"):
            pass
    assert holder(layout) is None


def test_a_killed_holder_frees_the_lock(layout: Layout) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD_IT, str(layout.root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        found = holder(layout)
        assert found == LockHolder(process.pid, "follow")
        process.kill()
    assert holder(layout) is None
    with lake_lock(layout, "sync"):
        pass


def test_a_lake_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match="cannot be written"), lake_lock(Layout.of(tmp_path / "file"), "sync"):
        pass


def test_hold_is_seen_first_without_and_then_with_its_lsn(layout: Layout) -> None:
    assert hold.current(layout) is None
    with hold.placed(layout) as request:
        assert hold.current(layout) == hold.Hold(None)
        request.at(Lsn.parse("16/B374D848"))
        assert hold.current(layout) == hold.Hold(Lsn.parse("16/B374D848"))
        with pytest.raises(LockHeld), hold.placed(layout):
            pass
    assert hold.current(layout) is None
