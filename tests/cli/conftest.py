"""The fixture ``shell``: a project directory for a source with two tables. Commands of pgcdc run in the process of the
test."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from pgcdc_assets.cli.main import run
from tests.fix_postgres import Database


@dataclass(frozen=True)
class Shell:
    """Sets environment variables, and runs commands of pgcdc in the project directory."""

    folder: Path
    database: Database
    patch: pytest.MonkeyPatch
    streams: pytest.CaptureFixture[str]

    def set(self, **variables: str | None) -> None:
        """Sets environment variables: ``SOURCE="..."`` is like ``export PGCDC_SOURCE=...``. None unsets the
        variable."""
        for name, value in variables.items():
            self.patch.delenv(f"PGCDC_{name}", raising=False)
            if value is not None:
                self.patch.setenv(f"PGCDC_{name}", value)

    def pgcdc(self, *arguments: str, expect: int | None = 0) -> str:
        """Returns all output of the command. Fails if the exit code is not ``expect``."""
        self.streams.readouterr()
        code = run(arguments)
        out, err = self.streams.readouterr()
        assert expect is None or code == expect, f"exit {code}\n{out}\n{err}"
        return out + err

    def files(self) -> dict[str, bytes]:
        return {str(path.relative_to(self.folder)): path.read_bytes() if path.is_file() else b""
                for path in sorted(self.folder.rglob("*"))}  # fmt: skip


def traces(database: Database) -> list[tuple[object, ...]]:
    """Returns the names of all publications and replication slots of the database."""
    with database.connect() as conn:
        return conn.execute(
            "SELECT pubname::text FROM pg_publication UNION ALL SELECT slot_name::text FROM pg_replication_slots"
            " WHERE database = current_database()"
        ).fetchall()


@pytest.fixture
def shell(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Shell:
    for name in [name for name in os.environ if name.startswith("PGCDC_") or name == "DAGSTER_HOME"]:
        monkeypatch.delenv(name)
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    with database.connect() as conn:
        conn.execute("CREATE TABLE a (id int PRIMARY KEY); CREATE TABLE b (id int PRIMARY KEY)")
    shell = Shell(folder, database, monkeypatch, capfd)
    name = f"s_{database.name}"
    shell.set(SOURCE=database.conninfo, SLOT=name, PUBLICATION=name)
    return shell
