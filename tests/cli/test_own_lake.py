"""A project uses only its own lake, even if PGCDC_LAKE in the shell names a different lake."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import NoReturn

import pytest

from pgcdc_assets.cli.main import pgcdc
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.errors import StoreFailed, WrongLake
from pgcdc_assets.flow.decide import Bounds
from pgcdc_assets.flow.engine import Engine
from pgcdc_assets.flow.lock import lake_lock
from pgcdc_assets.flow.maintenance import Allowance
from pgcdc_assets.flow.ownlake import note_lake
from pgcdc_assets.flow.reports import Silent
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.project import load_catalog, load_note
from pgcdc_assets.settings import STATE_FOLDER, Settings
from tests.cli.conftest import Shell, traces
from tests.projectfiles import CATALOG_FILE, NOTE_FILE

COMMANDS = (
    ["status"], ["status", "--json"], ["setup"], ["setup", "--sql"], ["sync"], ["follow"], ["verify"],
    ["snapshot", "a"], ["heal", "a"], ["repair", "a", "--range", "0/1..0/2"], ["maintain"], ["forget", "a", "--yes"],
    ["up"], ["code-server"], ["until", "--current"], ["pause", "apply"], ["resume", "apply"], ["positions"],
    ["teardown", "--yes"], ["teardown", "--lake", "--forget", "--yes"], ["sql", "FROM t"],
)  # fmt: skip
WITHOUT_A_LAKE = {"pack", "demo", "metrics"}
"""Commands that are not refused if the settings name another lake: ``pack`` uses no lake, ``demo`` creates its own
project in a new folder, and ``metrics`` reports another lake as ``pgcdc_up{part="lake"} 0``."""


@pytest.fixture
def noted(shell: Shell) -> Shell:
    """A project that has created an empty change log in ./lake and has recorded it as its own, as the first sync
    does."""
    shell.pgcdc("setup")
    saved = load_catalog(CATALOG_FILE)
    assert saved is not None
    made = ChangeLog(Settings.load().layout)
    made.create(saved.identity, confirmed(shell), 1)
    note_lake(Settings.load(), made)
    return shell


@pytest.fixture
def synced(shell: Shell) -> Shell:
    """A project after a sync that only received changes: ./lake contains a change log, and the slot has advanced."""
    shell.pgcdc("setup")
    shell.pgcdc("pause", "apply")
    _write(shell, 1)
    shell.pgcdc("sync")
    return shell


def _write(shell: Shell, number: int) -> None:
    with shell.database.connect() as conn:
        conn.execute("INSERT INTO a VALUES (%s)", [number])


def confirmed(shell: Shell) -> Lsn:
    with shell.database.connect() as conn:
        row = conn.execute("SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = %s",
                           [f"s_{shell.database.name}"]).fetchone()  # fmt: skip
    assert row is not None
    return Lsn.parse(row[0])


def log() -> ChangeLog:
    return ChangeLog(Settings.load().layout).open()


def test_every_command_that_uses_a_lake_is_tested() -> None:
    assert {arguments[0] for arguments in COMMANDS} == pgcdc.commands.keys() - WITHOUT_A_LAKE


def test_every_command_refuses_another_lake_before_it_writes(noted: Shell) -> None:
    before, at, home = noted.files(), confirmed(noted), noted.folder / "lake"
    noted.set(LAKE="elsewhere")
    for arguments in COMMANDS:
        said = noted.pgcdc(*arguments, expect=2)
        assert f"lake {noted.folder / 'elsewhere'}: has no change log, and the lake of this project is {home}" in said
        assert f"set `lake` (PGCDC_LAKE, or pgcdc.yaml) to {home}" in said
        assert len(said.strip().splitlines()) == 2, arguments
        assert (noted.files(), confirmed(noted)) == (before, at), arguments
    noted.set(LAKE=str(home))
    noted.pgcdc("setup")


@pytest.mark.parametrize("arguments", [["status"], ["sync"], ["teardown", "--lake", "--yes"]], ids=" ".join)
def test_a_lake_of_another_project_is_refused(noted: Shell, arguments: list[str]) -> None:
    """The lake contains a different change log of the same source and slot, as after a sync into the wrong lake."""
    identity, start = log().identity, log().began
    noted.set(LAKE="elsewhere")
    ChangeLog(Settings.load().layout).create(identity, start, 1)
    before = noted.files()
    assert "holds the change log of another project" in noted.pgcdc(*arguments, expect=2)
    assert noted.files() == before
    noted.set(LAKE=None)
    shutil.rmtree("lake")
    Path("elsewhere").rename("lake")
    said = noted.pgcdc(*arguments, expect=2)
    assert "holds the change log of another project; move that lake away" in said
    assert Path("lake").is_dir()


@pytest.mark.long
def test_a_moved_lake_is_recognised_as_the_lake_of_its_project(synced: Shell) -> None:
    Path("lake").rename("moved")
    said = synced.pgcdc("sync", expect=2)
    assert "has lost the change log" in said
    assert "if the lake was moved, set `lake` to its new place" in said
    synced.set(LAKE="moved")
    assert "is set up for" not in synced.pgcdc("status", expect=None)
    _write(synced, 2)
    synced.pgcdc("sync")
    assert load_note(STATE_FOLDER).lake == str(synced.folder / "moved")
    assert log().position() > log().began


def test_a_lake_that_was_moved_together_with_its_project_is_recognised(
    noted: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = noted.folder.with_name("moved")
    noted.folder.rename(moved)
    monkeypatch.chdir(moved)
    noted.pgcdc("setup")
    assert load_note(STATE_FOLDER).lake == str(moved / "lake")


def test_a_copy_of_the_lake_is_refused_while_the_original_exists(noted: Shell) -> None:
    shutil.copytree("lake", "copied")
    noted.set(LAKE="copied")
    said = noted.pgcdc("sync", expect=2)
    assert f"is a copy of this project's lake, which is {noted.folder / 'lake'}" in said
    assert "rename the original's folder" in said
    Path("lake").rename("old")
    noted.pgcdc("setup")
    assert load_note(STATE_FOLDER).lake == str(noted.folder / "copied")


@pytest.mark.parametrize("mine", [True, False])
def test_teardown_removes_the_lake_but_no_files_of_other_programs(noted: Shell, mine: bool) -> None:
    if mine:
        Path("lake/mine.csv").write_text("1")
    said = noted.pgcdc("teardown", "--lake", "--yes")
    assert Path("lake").exists() == Path("lake/mine.csv").exists() == mine
    assert not Path("lake/_pgcdc").exists()
    assert (
        f"folder {noted.folder / 'lake'} stays, because it contains files of other programs: mine.csv" in said
    ) == mine
    assert "kept the change log" not in said, "the change log is deleted"


def _read_only(*arguments: object, **options: object) -> NoReturn:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS), "lake")


def test_teardown_drops_the_slot_even_if_the_lake_cannot_be_written(noted: Shell) -> None:
    with lake_lock(Settings.load().layout, "sync"):
        pass
    with noted.patch.context() as patch:
        patch.setattr("pgcdc_assets.store.lease._opened", _read_only)
        patch.setattr("pgcdc_assets.store.local.LocalStore.move_folder", _read_only)
        refused = noted.pgcdc("teardown", "--lake", "--yes", expect=1)
        assert "Read-only file system; make it writable, or run as its owner" in refused
        said = noted.pgcdc("teardown", "--yes", expect=1)
    assert f"removed slot s_{noted.database.name}" in said
    assert traces(noted.database) == []
    assert "could not be renamed: Read-only file system; make the lake writable, and run `pgcdc teardown`" in said
    assert "kept the change log, under the new name" in noted.pgcdc("teardown", "--yes")
    noted.pgcdc("setup")


def test_teardown_drops_the_slot_even_if_the_store_of_the_lake_does_not_answer(noted: Shell) -> None:
    def no_answer(*arguments: object) -> NoReturn:
        raise StoreFailed("there is no such bucket", thing="s3://bucket")

    with noted.patch.context() as patch:
        for reading in ("head", "list_after", "read"):
            patch.setattr(f"pgcdc_assets.store.local.LocalStore.{reading}", no_answer)
        assert "could not be renamed: there is no such bucket" in noted.pgcdc("teardown", "--yes", expect=1)
    assert traces(noted.database) == []


def test_commands_in_a_project_without_setup_are_refused_before_they_start_a_run(shell: Shell) -> None:
    with shell.patch.context() as patch:
        patch.setattr("pgcdc_assets.cli.jobs.instance", _read_only)
        patch.setattr("pgcdc_assets.flow.engine.Engine.__init__", _read_only)
        for arguments in COMMANDS[4:6] + COMMANDS[7:12]:
            assert "there is no saved catalog; run `pgcdc setup`" in shell.pgcdc(*arguments, expect=1), arguments


def test_a_symbolic_link_to_the_lake_is_accepted_as_the_lake(noted: Shell) -> None:
    Path("link").symlink_to("lake")
    noted.set(LAKE="link")
    noted.pgcdc("status")


@pytest.mark.long
def test_a_project_whose_lake_was_deleted_can_start_again(synced: Shell) -> None:
    """Sync refuses an empty folder in place of the lake, because the folder may be the mount point of a disk that is
    not mounted. After the advice in the error was followed, sync works."""
    shutil.rmtree("lake")
    Path("lake").mkdir()
    said = synced.pgcdc("sync", expect=2)
    assert "has lost the change log that this project made there" in said
    assert "run `pgcdc teardown`, then `pgcdc setup` and `pgcdc sync`" in said
    synced.pgcdc("teardown", "--yes")
    assert not NOTE_FILE.exists()
    synced.pgcdc("setup")
    synced.pgcdc("pause", "apply")
    synced.pgcdc("sync")
    assert load_note(STATE_FOLDER).log == log().id


@pytest.mark.long
def test_another_project_cannot_take_over_the_slot(synced: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other project is a colleague's checkout of the same project: it has the same settings, but a different lake
    and no record of the slot."""
    other = synced.folder.with_name("other")
    other.mkdir()
    monkeypatch.chdir(other)
    at = confirmed(synced)
    for command in (["setup"], ["up"]):
        said = synced.pgcdc(*command, expect=2)
        assert f"lake {other / 'lake'}: has no change log, but slot s_{synced.database.name} was read" in said
        assert "choose another name in the setting `slot`" in said
    assert confirmed(synced) == at
    synced.set(LAKE=str(synced.folder / "lake"))
    synced.pgcdc("setup")
    synced.pgcdc("sync")


@pytest.mark.parametrize("arguments", [["setup"], ["setup", "--sql"], ["teardown", "--yes"]], ids=" ".join)
def test_setup_and_teardown_refuse_another_slot_before_anything_changes(noted: Shell, arguments: list[str]) -> None:
    before, files = traces(noted.database), noted.files()
    noted.set(SLOT="other")
    said = noted.pgcdc(*arguments, expect=2)
    assert f"setting `slot`: is other, but this project was set up with slot s_{noted.database.name}" in said
    assert (traces(noted.database), noted.files()) == (before, files)


@pytest.mark.parametrize("content", ['{"lake": 1', "[" * 100_000], ids=["torn", "deep"])
def test_a_damaged_record_of_the_projects_lake_is_reported(noted: Shell, content: str) -> None:
    NOTE_FILE.write_text(content)
    said = noted.pgcdc("status", expect=2)
    assert f"{NOTE_FILE}: cannot be read; delete it" in said
    NOTE_FILE.unlink()
    noted.pgcdc("setup")
    assert load_note(STATE_FOLDER).log == log().id


@pytest.mark.long
def test_setup_and_sync_and_status_report_that_the_slot_was_dropped(synced: Shell) -> None:
    """Setup and sync do not create a new slot, because it would begin after the end of the change log and leave a
    gap."""
    with synced.database.connect() as conn:
        conn.execute(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = current_database()"
        )
    for command in ("setup", "sync", "status"):
        assert "run `pgcdc teardown`, then `pgcdc setup`" in synced.pgcdc(command, expect=1)


def test_a_dagster_run_with_another_lake_is_refused(noted: Shell) -> None:
    """A Dagster run takes its lake from the settings of its own process. If these settings name a wrong lake, the run
    fails before it creates or locks the wrong lake."""
    noted.set(LAKE="elsewhere")

    def no_spark() -> NoReturn:
        raise AssertionError

    engine = Engine(Settings.load(), "host=/nowhere", Silent(), no_spark, "test")
    for work in (lambda: engine.sync(Bounds()), lambda: engine.maintain(Allowance())):
        with pytest.raises(WrongLake, match="has no change log"):
            work()
    assert not Path("elsewhere").exists()
