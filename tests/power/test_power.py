"""Power cuts: syncs are stopped at many moments, and any part of the changes without an fsync is lost. What may be left
of the project's folder is called an image.

Before the recovery, every published point in an image is read correctly or refused with an error. The next sync
recovers the image. After that, every point is read correctly. ``PGCDC_TEST_POWER_IMAGES`` is the number of images,
``PGCDC_TEST_SEED`` the seed. A repeated run with the same seed stops the syncs at other moments, so the message of a
failure lists what was lost.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.demo.server import EmbeddedServer
from tests.conftest import SEED
from tests.crash.faults import wait_until
from tests.fix_postgres import Database, fresh_database
from tests.power.images import Disk, Folder, Image, Syncs, described, fresh
from tests.power.rig import PowerRig, suspended

pytestmark = pytest.mark.spark

logger = logging.getLogger(__name__)

IMAGES = 60
PER_RUN = 60
"""How many power cuts, each with an image, are simulated for one victim (a process that runs syncs). The next victim
has a new source and a new lake."""
PER_MOMENT = 2
STEPS, FEW_STEPS = (0, 1, 3, 10, 30, 60, 100), (5, 40, 80, 120)
"""How many fsyncs the victim makes between two observed moments. ``FEW_STEPS`` is used if few moments are observed."""
_SEED = int(SEED)


@dataclass
class Moment:
    folder: Folder
    syncs: Syncs
    confirmed: Lsn


@pytest.fixture
def images() -> int:
    return int(os.environ.get("PGCDC_TEST_POWER_IMAGES") or IMAGES)


@pytest.mark.long
@pytest.mark.timeout(14400)
@pytest.mark.takes(400)
def test_next_sync_after_a_power_cut_recovers_every_point(
    server: EmbeddedServer, spark: SparkSession, images: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(_SEED)
    done = read = 0
    started = time.monotonic()
    for number in range(-(-images // PER_RUN)):
        wanted = min(PER_RUN, images - done)
        project = tmp_path / f"project{number}"
        project.mkdir()
        monkeypatch.chdir(project)
        with fresh_database(server) as database, closing(_rig(database, project, spark)) as rig:
            disk, moments = _cut(rig, tmp_path / f"syncs{number}", -(-wanted // PER_MOMENT), chance)
            for place in range(wanted):
                seed = chance.getrandbits(32)
                monkeypatch.chdir(tmp_path)
                # Each image has its own folder, because Spark's session caches tables by path.
                folder = tmp_path / f"image{done}"
                read += _survived(rig, disk, moments[place // PER_MOMENT], seed, folder, monkeypatch)
                monkeypatch.chdir(tmp_path)
                shutil.rmtree(folder)
                done += 1
                logger.info("image %d of %d, %.1f s", done, images, time.monotonic() - started)
    print(f"{done} images, {read} points read, {time.monotonic() - started:.0f} s, PGCDC_TEST_SEED={_SEED}")
    assert done == images


def _rig(database: Database, project: Path, spark: SparkSession) -> PowerRig:
    return PowerRig(database, project, spark, f"s_{database.name}"[:50])


def _cut(rig: PowerRig, journal: Path, moments: int, chance: random.Random) -> tuple[Disk, list[Moment]]:
    """Observes a victim process at some moments, starting during its first copy."""
    disk = Disk(rig.project, journal)
    found: list[Moment] = []
    with rig.victim(journal, chance.getrandbits(32)) as run:
        while len(found) < moments:
            # Time is counted in fsyncs, which does not depend on the speed of the machine.
            goal = disk.count() + chance.choice(STEPS if moments > 10 else FEW_STEPS)
            assert wait_until(lambda goal=goal: disk.count() >= goal or not run.is_running(), 300)  # type: ignore[misc]
            time.sleep(chance.random() * 0.05)
            with suspended(run):
                assert run.is_running(), journal.with_suffix(".log").read_text()[-3000:]
                found.append(Moment(disk.look(), disk.syncs(), rig.confirmed()))
            assert run.status() != "zombie", journal.with_suffix(".log").read_text()[-3000:]
    return disk, found


def _survived(
    rig: PowerRig, disk: Disk, moment: Moment, seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> int:
    image = Image(disk, moment.folder, moment.syncs, random.Random(seed))
    image.write(fresh(folder))
    monkeypatch.chdir(folder)
    chance = random.Random(seed)
    try:
        points = rig.before(moment.confirmed, chance)
        rig.recovered()
        return rig.after(points, chance)
    except Exception as error:
        kept = _kept(disk, moment, seed)
        raise AssertionError(
            f"{error}\nPGCDC_TEST_SEED={_SEED}, image of seed {seed}, kept in {kept}\n{described(image.lost)}"
        ) from error


_ROOT = Path.cwd()


def _kept(disk: Disk, moment: Moment, seed: int) -> Path:
    """Saves the image for inspection."""
    kept = fresh(_ROOT / "build" / "power" / str(seed))
    Image(disk, moment.folder, moment.syncs, random.Random(seed)).write(kept)
    shutil.copy(disk.journal.with_suffix(".log"), kept / "run.log")
    return kept


def test_image_keeps_synced_files_and_may_lose_any_other_change(tmp_path: Path) -> None:
    root, journal = tmp_path / "root", tmp_path / "journal"
    (root / "old").mkdir(parents=True)
    (root / "old" / "file").write_text("before")
    disk = Disk(root, journal)
    (root / "new").mkdir()
    (root / "new" / "file").write_text("a\nb\nc\n")
    (root / "old" / "file").unlink()
    moment = disk.look()
    seen = set()
    for seed in range(300):
        target = tmp_path / "image"
        Image(disk, moment, disk.syncs(), random.Random(seed)).write(fresh(target))
        old, new = target / "old" / "file", target / "new" / "file"
        seen.add((old.read_text() if old.exists() else None, new.read_text() if new.exists() else None))
    assert {old for old, _ in seen} == {None, "before"}
    assert {new for _, new in seen} >= {None, "", "a\nb\nc\n", "a\n", "a\nb\n", "\0" * 6}
