"""A wrong setting is refused with a message of one sentence that names the setting."""

from __future__ import annotations

import json
import string
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from deltalake.transaction import AddAction

from pgcdc_assets.core.layout import Location
from pgcdc_assets.errors import SettingsError
from pgcdc_assets.settings import Settings

ODD = [*string.punctuation.replace("/", ""), " ", "%41", "%zz", "ü", "~2F"]


@pytest.mark.parametrize("odd", ODD)
def test_lake_path_is_refused_if_and_only_if_delta_cannot_open_it(
    odd: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = tmp_path / f"a{odd}b"
    monkeypatch.setenv("PGCDC_LAKE", str(lake))
    assert _settled(lake) == _opened(lake / "t")


@pytest.mark.parametrize(
    "url", ["s3://bucket", "s3://bucket/a/lake/", "gs://bucket/lake", "abfss://held@account.dfs.core.windows.net/lake"]
)
def test_a_lake_may_be_in_an_object_store(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGCDC_LAKE", url)
    assert Settings.load().layout.root == Location(url.rstrip("/"))


@pytest.mark.parametrize(
    "url", ["file:///tmp/lake", "s3://", "s3:///lake", "s3://key:secret@bucket/lake", "abfss://container/lake",
            "abfss://c:secret@account/lake", "https://bucket/lake", "s3a://bucket", "s3://bucket?secret=x"],
)  # fmt: skip
def test_lake_url_with_an_unsupported_scheme_or_form_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGCDC_LAKE", url)
    with pytest.raises(SettingsError, match=r"setting `lake`: is neither .* nor a URL like s3://bucket") as raised:
        Settings.load()
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("odd", ["a//b", "a/../b", "a%20b", "a\\b", "a\tb"])
def test_lake_url_with_special_characters_is_refused(odd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGCDC_LAKE", f"s3://bucket/{odd}")
    with pytest.raises(SettingsError, match="some programs cannot open tables there"):
        Settings.load()


@pytest.mark.parametrize("lake", [".", "..", "{project}", "{home}", "/", "link", "sub/.."])
def test_lake_that_is_or_contains_the_project_or_home_folder_is_refused(
    lake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`teardown --lake` deletes the lake, and would delete these folders, too."""
    project, home = tmp_path / "a/project", tmp_path / "home"
    (project / "sub").mkdir(parents=True)
    home.mkdir()
    (project / "link").symlink_to(home)
    monkeypatch.chdir(project)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PGCDC_LAKE", lake.format(project=project, home=home))
    with pytest.raises(SettingsError, match=r"setting `lake`: /.* is .*, or contains it; use a separate folder"):
        Settings.load()
    for fine in (home / "lake", project / "sub", tmp_path / "a/proj"):
        monkeypatch.setenv("PGCDC_LAKE", str(fine))
        Settings.load()


def test_empty_lake_setting_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pgcdc.yaml").write_text('lake: ""\n')
    with pytest.raises(SettingsError, match="setting `lake`: is empty; give a folder"):
        Settings.load()


def _settled(lake: Path) -> bool:
    try:
        return Settings.load().layout.root == Location.of(lake)
    except SettingsError:
        return False


def _opened(folder: Path) -> bool:
    """Whether delta-rs can commit a file that it did not write, make a checkpoint and run VACUUM in this folder."""
    try:
        table = DeltaTable.create(folder, pa.schema([("a", pa.int64())]))
        pq.write_table(pa.table({"a": [1, 2]}), folder / "f.parquet")
        size = (folder / "f.parquet").stat().st_size
        table.create_write_transaction([AddAction("f.parquet", size, {}, 0, True, "{}")], "append", table.schema())
        table = DeltaTable(folder)
        table.create_checkpoint()
        table.cleanup_metadata()
        table.vacuum(0, dry_run=True, enforce_retention_duration=False, full=True)
        table.update_incremental()
        return DeltaTable.is_deltatable(str(folder)) and table.to_pyarrow_table()["a"].to_pylist() == [1, 2]
    except Exception:  # noqa: BLE001 - delta-rs raises errors of several kinds
        return False


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("MESSAGES", '[""]', r"setting `messages`: '' is not a pattern"),
        ("MESSAGES", '["-debug"]', "setting `messages`: excludes prefixes and includes none"),
        ("MESSAGES", '"app"', "setting `messages`: must be a list of patterns for message prefixes"),
        ("MESSAGES", "app", "the variable PGCDC_MESSAGES does not contain JSON"),
        ("ORIGIN", "local", "setting `origin`: 'local' is neither `any` nor `none`"),
        ("STREAMING", "on", "setting `streaming`: 'on' is neither `auto` nor `off`"),
    ],
)
def test_invalid_messages_origin_or_streaming_setting_is_refused_in_one_line(
    name: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"PGCDC_{name}", value)
    with pytest.raises(SettingsError, match=message) as refused:
        Settings.load()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("master", ["spark://host:7077", "yarn", "k8s://https://host:443", "local-cluster[2,1,700]"])
def test_lake_on_a_local_path_is_refused_for_a_spark_cluster_unless_the_path_is_shared(
    master: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGCDC_SPARK", json.dumps({"master": master}))
    with pytest.raises(SettingsError) as refused:
        Settings.load()
    message = str(refused.value)
    assert message.startswith(f"setting `spark`: executors of {master} cannot be used with a lake on a local path")
    assert "`lake_shared: true`" in message
    assert "\n" not in message
    for name, value in (("PGCDC_LAKE_SHARED", "true"), ("PGCDC_LAKE", "s3://bucket/lake")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert Settings.load().master == master


@pytest.mark.parametrize(
    "master",
    ["sc://host:15002/;token=secret", "mesos://host:5050", "locally", "spark", "local[0]", "local[]", "local[*,0]"],
)
def test_unknown_spark_master_is_refused(master: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGCDC_SPARK", json.dumps({"master": master}))
    with pytest.raises(SettingsError) as caught:
        Settings.load()
    assert str(caught.value).startswith("setting `spark`: names an unknown master; use local[N], spark://HOST:PORT")
    assert "secret" not in str(caught.value)


def test_key_spark_master_in_the_setting_spark_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """``spark.master`` would circumvent all checks of the key ``master``."""
    monkeypatch.setenv("PGCDC_SPARK", json.dumps({"spark.master": "yarn"}))
    with pytest.raises(SettingsError, match=r"setting `spark`: has the key `spark.master`; write `master` instead"):
        Settings.load()


def test_yaml_values_of_the_spark_setting_become_texts_that_spark_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pgcdc.yaml").write_text("spark: {spark.dynamicAllocation.enabled: true, spark.ui.port: 4040}\n")
    found = Settings.load().spark
    assert (found["spark.dynamicAllocation.enabled"], found["spark.ui.port"]) == ("true", "4040")


@pytest.mark.parametrize("master", ["local", "local[*]", "local[4]", "local[*,4]"])
def test_local_spark_master_is_accepted_but_not_together_with_an_archive(
    master: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGCDC_SPARK", json.dumps({"master": master}))
    assert Settings.load().master == master
    monkeypatch.setenv("PGCDC_SPARK", json.dumps({"master": master, "archive": "env.tar.gz"}))
    with pytest.raises(SettingsError, match="`archive` is for the executors of a cluster"):
        Settings.load()


def test_the_settings_messages_and_origin_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (Settings.load().messages, Settings.load().origin) == ((), "any")
    monkeypatch.setenv("PGCDC_MESSAGES", '["outbox.*", "app"]')
    monkeypatch.setenv("PGCDC_ORIGIN", "none")
    assert (Settings.load().messages, Settings.load().origin) == (("outbox.*", "app"), "none")


@pytest.mark.parametrize("value", ["auto", "off"])
def test_the_setting_streaming_is_read_from_the_environment_or_the_file(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert Settings.load().streaming == "auto"
    monkeypatch.setenv("PGCDC_STREAMING", value)
    assert Settings.load().streaming == value
    monkeypatch.delenv("PGCDC_STREAMING")
    # YAML reads a bare `off` as False.
    for written in (value, f'"{value}"'):
        Path("pgcdc.yaml").write_text(f"streaming: {written}\n")
        assert Settings.load().streaming == value


@pytest.mark.parametrize("written", ["on", "parallel", "1", "0", "[]"])
def test_unknown_value_of_the_setting_streaming_is_refused(
    written: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pgcdc.yaml").write_text(f"streaming: {written}\n")
    with pytest.raises(SettingsError, match=r"setting `streaming`: .* is neither `auto` nor `off`") as refused:
        Settings.load()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "written", ["-3 days", "999999999999 days", "36501 days", "-P3D", "P9999999999D", "soon", "-5"]
)
def test_retention_that_is_not_a_duration_in_the_allowed_range_is_refused(
    written: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pgcdc.yaml").write_text(f"retention: {written}\n")
    with pytest.raises(SettingsError, match=r"setting `retention`: .* is not a duration from 0 to") as refused:
        Settings.load()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("written", "days"), [("0 days", 0), ("36500 days", 36500), ("P3D", 3), ("86400", 1)])
def test_retention_may_be_written_in_several_forms(
    written: str, days: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pgcdc.yaml").write_text(f"retention: {written}\n")
    assert Settings.load().retention == timedelta(days=days)


@pytest.mark.parametrize("name", ["source", "lake", "slot", "publication"])
@pytest.mark.parametrize("written", ["123", "", "true", "[a]"])
def test_yaml_value_that_is_not_text_is_refused_for_a_text_setting(
    name: str, written: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(f"PGCDC_{name.upper()}", raising=False)
    if name == "source" and not written:
        return  # An empty source means that no source is set.
    Path("pgcdc.yaml").write_text(f"{name}: {written}\n")
    with pytest.raises(SettingsError) as refused:
        Settings.load()
    assert str(refused.value) == f'setting `{name}`: must be text; write it in quotes, like {name}: "123"'


@pytest.mark.parametrize(
    ("text", "twice"),
    [("slot: a\nslot: b\n", "slot"), ("slot: a\nSlot: b\n", "Slot"),
     ("spark:\n  master: local\n  master: yarn\n", "master")],
)  # fmt: skip
def test_repeated_name_in_the_settings_file_is_refused(
    text: str, twice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pgcdc.yaml").write_text(text)
    line = len(text.splitlines())
    with pytest.raises(SettingsError, match=rf"pgcdc.yaml: holds `{twice}` twice, .* in line {line}; keep"):
        Settings.load()


@pytest.mark.parametrize("text", ["~/lake", "~", "~someone/lake"])
def test_lake_path_that_begins_with_a_tilde_is_refused(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pgcdc.yaml").write_text(f'lake: "{text}"\n')
    with pytest.raises(
        SettingsError, match="setting `lake`: begins with ~, which is not expanded; write the whole path"
    ):
        Settings.load()


def test_lake_that_is_a_file_or_inside_a_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    for lake in (file, file / "lake"):
        monkeypatch.setenv("PGCDC_LAKE", str(lake))
        with pytest.raises(SettingsError, match=f"setting `lake`: {file} is a file; give a folder"):
            Settings.load()


@pytest.mark.parametrize(
    "source", ["host=db replication=true", "postgresql://db/shop?replication=database", "host=db replication=''"]
)
def test_source_that_sets_replication_is_refused(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGCDC_SOURCE", source)
    with pytest.raises(SettingsError, match=r"setting `source`: sets `replication`, which pgcdc sets .*; remove it"):
        Settings.load()


@pytest.mark.parametrize(
    "source",
    [
        "postgresql://owner:Gehe@1m@db.example.org/shop",
        "postgresql://owner:12/Gehe1m@db.example.org/shop",
        "host=db port=Gehe1m",
    ],
)
def test_source_with_an_unescaped_password_or_a_wrong_port_is_refused(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Error messages show host, port and database. With the sources in this test, they would show a part of the
    password."""
    monkeypatch.setenv("PGCDC_SOURCE", source)
    with pytest.raises(SettingsError, match=r"setting `source`: has an? (`@`|port)") as raised:
        Settings.load()
    assert "Gehe" not in str(raised.value)
    assert "1m" not in str(raised.value)


@pytest.mark.parametrize(
    "source",
    ["postgresql://owner:a%40b%2Fc@h1:5432,h2:5433/shop", "host=db dbname=a@b", "postgresql:///shop?host=/tmp/sockets"],
)
def test_source_with_an_escaped_password_or_an_odd_name_is_accepted(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGCDC_SOURCE", source)
    assert Settings.load().source == source
