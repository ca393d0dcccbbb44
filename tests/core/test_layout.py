"""Parsing, joining, splitting and comparing instances of :class:`Location`."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from pgcdc_assets.core.layout import LOCAL, Location


def test_path_is_made_absolute_and_url_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert Location.of("lake").text == str(tmp_path / "lake")
    assert Location.of(Path("lake//./")).text == str(tmp_path / "lake")
    assert Location.of("lake/../other").text == f"{tmp_path}/lake/../other", "lake may be a link"
    assert Location.of("memory://store/lake/").text == "memory://store/lake"
    assert Location.of(Location.of("lake")) == Location.of("lake")


@pytest.mark.parametrize("root", ["/lake", "memory://store/lake"])
def test_locations_are_joined_and_split(root: str) -> None:
    lake = Location.of(root)
    file = lake / "public/t" / "part"
    assert str(file) == f"{root}/public/t/part"
    assert (file.name, file.parent, file.with_name("other")) == ("part", lake / "public/t", lake / "public/t/other")
    assert pickle.loads(pickle.dumps(file)) == file
    assert {file: 1}[lake / "public/t/part"] == 1


def test_the_scheme_of_a_url_decides_the_store() -> None:
    assert Location.of("/lake").scheme == LOCAL
    assert Location.of("s3://bucket/key").scheme == "s3"


def test_parent_folders_are_listed_up_to_the_one_above_the_lake() -> None:
    lake = Location.of("/srv/lake")
    assert (lake / "public/t").up_to(lake) == [lake / "public/t", lake / "public", lake, Location("/srv")]
    assert Location("/lake").up_to(Location("/lake")) == [Location("/lake"), Location("/")]


def test_local_path_is_given_to_other_programs_as_a_uri() -> None:
    assert Location("/srv/a lake").uri == "file:///srv/a%20lake"
    assert Location("s3://bucket/key").uri == "s3://bucket/key"
