"""The saved catalog of a project."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pgcdc_assets.core.catalog import Catalog, Column, Identity, Leaf, Lineage, PgType, Table
from pgcdc_assets.core.marks import Composite, EnumLabel, Files, TableMarks
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import SetupNeeded, UnknownFormat
from pgcdc_assets.project import SavedCatalog, load_catalog, save_catalog

NAME = TableName("public", "t")
COLUMN = Column(1, "id", PgType(20, "int8"))
TABLE = Table(
    1, NAME, (COLUMN,), key=(1,), partitioned=True, leaves=(Leaf(2, NAME, Files(3), ((1, 7),), ((1, 0),)),),
    lineage=Lineage(1, 1, 5, former=(COLUMN,), left=(7,)), comments=((0, "of the table"),),
    marks=TableMarks(
        Files(4), columns=((1, 7),), labels=(EnumLabel(9, "a", 5),), composites=(Composite(8, "c", "1:23"),)
    ),
)  # fmt: skip
CATALOG = Catalog(Identity("7", "shop", "pgcdc"), "pgcdc", 180000, (TABLE,), ("pgcdc",))


def test_catalog_is_unchanged_after_saving_and_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "made" / "catalog.json"
    assert load_catalog(path) is None
    save_catalog(CATALOG, path)
    assert load_catalog(path) == CATALOG


def test_saved_catalog_in_an_unknown_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "catalog.json"
    path.write_text(json.dumps({"format": "2", "table": "of another form"}))
    with pytest.raises(UnknownFormat, match=r"saved catalog .*: has format 2, .* reads format 1; use the version"):
        load_catalog(path)


@pytest.mark.parametrize("text", ["", "{}", "[]", '"a"', '{"format": "1"}', '{"forma'])
def test_error_of_a_damaged_catalog_advises_to_delete_the_file(text: str, tmp_path: Path) -> None:
    path = tmp_path / "catalog.json"
    path.write_text(text)
    with pytest.raises(SetupNeeded, match=r"is damaged, and cannot be read: .*; delete it, then run `pgcdc setup`"):
        load_catalog(path)


def test_catalog_is_read_again_after_it_was_saved_again(tmp_path: Path) -> None:
    path = tmp_path / "catalog.json"
    saved = SavedCatalog(path)
    assert saved.read() is None
    save_catalog(CATALOG, path)
    assert saved.read() == CATALOG
    assert saved.read() is saved.read()
    more = replace(CATALOG, tables=())
    save_catalog(more, path)
    assert saved.read() == more
