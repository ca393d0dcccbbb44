"""What a user sees on a terminal while `pgcdc follow` copies and follows, and what a log collector gets instead."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.end_to_end.command import Project
from tests.end_to_end.terminal import ends, terminal
from tests.fix_postgres import Database
from tests.waiting import wait_for

ROWS = 300_000


@pytest.mark.long
@pytest.mark.process
def test_follow_shows_copies_position_lag_and_rate(database: Database, tmp_path: Path) -> None:
    with database.connect() as conn:
        conn.execute("CREATE TABLE public.t (id int PRIMARY KEY, v text); CREATE TABLE public.u (id int PRIMARY KEY)")
        conn.execute("INSERT INTO public.t SELECT g, repeat(md5(g::text), 8) FROM generate_series(1, %s) g", [ROWS])
    project = Project(tmp_path, {"PGCDC_SOURCE": database.conninfo, "PGCDC_SLOT": f"s_{database.name}"[:60]})
    project.run("setup")
    with terminal(project, "follow") as shown:
        shown.wait_for("follow: copying, ")
        shown.wait_for("copies: table 1 of 2, 0 rows, 0 B of ")
        # The pieces of one table are counted as their tasks end.
        counted = re.compile(r"copies: table \d of 2, (\d+,\d+) rows, [\d.]+ MiB of [\d.]+ MiB, \d+ s left")
        wait_for(lambda: counted.search(shown.words) is not None, 120, "a part of the copy")
        shown.wait_for("follow: following, at ")
        with database.connect() as conn:
            conn.execute("UPDATE public.t SET v = 'x' WHERE id <= 20000")
        moved = re.compile(r"follow: (following|catching up), at [0-9A-F]+/[0-9A-F]+, .* behind, [1-9][\d,]* rows/s")
        wait_for(lambda: moved.search(shown.words) is not None, 60, "a rate")
        shown.ctrl_c()
        assert ends(shown.process) == 0, shown.words
