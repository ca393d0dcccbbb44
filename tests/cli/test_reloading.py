"""Dagster is asked to reload the definitions only when tables are added or removed, or when their columns change."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pgcdc_assets.cli.up import Reloading, by_code_server, by_webserver
from pgcdc_assets.core.catalog import Catalog, Column, Identity, PgType, Table
from pgcdc_assets.core.names import TableName
from pgcdc_assets.project import save_catalog
from tests.projectfiles import CATALOG_FILE
from tests.structure.marked import marks

OWNER = Identity("7000000000000000001", "shop", "pgcdc")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _saved(*names: str, version: int = 180000, **facts: Any) -> None:
    """Saves a catalog. Its file gets a later timestamp than before, even if the file system's clock is coarse."""
    before = CATALOG_FILE.stat().st_mtime_ns if CATALOG_FILE.exists() else 0
    tables = tuple(Table(number, TableName("public", name), **{"columns": (), **facts})
                   for number, name in enumerate(names))  # fmt: skip
    save_catalog(Catalog(OWNER, "p", version, tables), CATALOG_FILE)
    os.utime(CATALOG_FILE, ns=(before + 1_000_000, before + 1_000_000))


def test_definitions_are_reloaded_when_tables_are_added_or_removed() -> None:
    asked: list[bool] = []
    answers = [False, True, True]

    def reload() -> bool:
        asked.append(answers[len(asked)])
        return asked[-1]

    _saved("a")
    reloading = Reloading(CATALOG_FILE, reload)
    _saved("a", version=170000)
    reloading.load()
    assert asked == []
    _saved("a", "b")
    reloading.load()
    reloading.load()
    reloading.load()
    assert asked == [False, True], "a failed reload is tried again, a successful reload is not"
    _saved("b")
    reloading.load()
    CATALOG_FILE.write_text("{")
    reloading.load()
    assert asked == [False, True, True]


def test_definitions_are_reloaded_when_columns_or_comments_change() -> None:
    asked: list[int] = []

    def reload() -> bool:
        asked.append(1)
        return True

    column = Column(1, "id", PgType(23, "int4"))
    _saved("a", columns=(column,))
    reloading = Reloading(CATALOG_FILE, reload)
    _saved("a", columns=(column,), rows=5, pages=1, marks=marks(relfilenode=7))
    reloading.load()
    assert asked == [], "Dagster shows neither row estimates nor relfilenodes"
    _saved("a", columns=(replace(column, not_null=True),))
    reloading.load()
    _saved("a", columns=(replace(column, not_null=True),), comments=((1, "the number"),))
    reloading.load()
    reloading.load()
    assert len(asked) == 2


def test_the_check_for_a_new_catalog_returns_while_dagster_still_reloads() -> None:
    _saved("a")
    asked: list[int] = []

    def reload() -> bool:
        asked.append(1)
        return True

    reloading = Reloading(CATALOG_FILE, reload)
    reloading.look()
    _saved("a", "b")
    reloading.look()
    assert reloading._under_way is not None
    reloading._under_way.join(10)
    reloading.look()
    assert asked == [1]


def test_a_reload_counts_as_failed_if_dagster_does_not_answer() -> None:
    assert not by_webserver("http://127.0.0.1:9")
    assert not by_code_server("127.0.0.1", 9)
