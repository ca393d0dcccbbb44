"""Power cuts during syncs in this process. Each cut leaves an image (files and folders that survive the cut), with
which the next sync continues. The source loses nothing, so the image's log must contain everything that was confirmed
to the slot."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.log.commit import recover_log
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.project import change_note, load_note
from pgcdc_assets.settings import STATE_FOLDER, Settings
from tests.power.images import Image
from tests.power.supply import Supply
from tests.power.victim import often
from tests.waiting import wait_for

_RECEIVED = "SELECT count(active_pid) FROM pg_replication_slots WHERE database = current_database() AND slot_name ~ %s"


@dataclass
class Outages:
    """``chance`` decides the time and the losses of each cut. The exact order of fsyncs depends on the machine."""

    supply: Supply
    folder: Path
    chance: random.Random
    settings: Settings
    conn: psycopg.Connection[Any]
    done: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    """By kind (name, removal, folder or content): how many changes were lost."""
    _confirmed_at_first: Lsn | None = None

    def cut(self, act: Callable[[], Any]) -> Image:
        """Calls ``act``, cuts the power during the call or right after it, and makes the folder with the image the
        current directory."""
        self._confirmed_at_first = self._confirmed_at_first or self._confirmed()
        self.done += 1
        image = self.supply.cut_during(act, self.chance, self.folder / str(self.done))
        os.chdir(self.supply.root)
        if load_note(STATE_FOLDER).log is not None:
            # The image is in a new folder, and the lake from before the cut still exists. Unless the project's note
            # names the new lake, pgcdc refuses the image as a copy of the old lake.
            change_note(STATE_FOLDER, lake=self.settings.layout.root.text)
        self.lost.update(one.split(" ")[0] for one in image.lost)
        given = (f"^({self.settings.slot}|pgcdc_drain_.*)$",)
        wait_for(lambda: self.conn.execute(_RECEIVED, given).fetchone() == (0,), what="the receiver's end")
        self._assert_log_holds_what_was_confirmed()
        return image

    def _assert_log_holds_what_was_confirmed(self) -> None:
        confirmed, layout = self._confirmed(), self.settings.layout
        recover_log(layout.change_log)
        log = ChangeLog(layout)
        stands = log.position() if log.exists else self._confirmed_at_first
        assert stands is not None
        assert stands >= confirmed, f"confirmed {confirmed}, but the log ends at {stands}"

    def _confirmed(self) -> Lsn:
        query = "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = %s"
        row = self.conn.execute(query, [self.settings.slot]).fetchone()
        assert row is not None
        return Lsn.parse(row[0])


@contextmanager
def outages(spark: SparkSession, settings: Settings, conn: psycopg.Connection[Any], seed: int) -> Iterator[Outages]:
    """Creates a project folder below the current folder, and after each cut a new project folder with the image. During
    the block, checkpoints, merges and clean-ups are frequent."""
    folder = Path.cwd()
    first = folder / "0"
    first.mkdir()
    supply = Supply(first, folder / "syncs")
    os.chdir(first)
    with pytest.MonkeyPatch.context() as patch, supply.on(spark):
        often(patch)
        yield Outages(supply, folder, random.Random(seed), settings, conn)
