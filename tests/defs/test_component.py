"""The component for ``dg``, and ``build_pgcdc_defs``, in a user's own Dagster project."""

from __future__ import annotations

import inspect
import re
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster.components.testing import create_defs_folder_sandbox

from pgcdc_assets import PgcdcComponent, build_pgcdc_defs
from pgcdc_assets.defs.pipeline import PgcdcFreshness
from pgcdc_assets.errors import SettingsError
from pgcdc_assets.project import save_catalog
from tests.defs.catalogs import catalog_of

GUIDES = Path(__file__).parents[2] / "docs/guides"
DSN = "host=db.example.org dbname=shop password=geheim"


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dg.BetaWarning)
        warnings.simplefilter("ignore", dg.PreviewWarning)
        yield


def keys_of(defs: dg.Definitions) -> set[str]:
    return {key.to_user_string() for key in defs.resolve_asset_graph().get_all_asset_keys()}


def sources(folder: Path, *names: str, **options: Any) -> list[dg.Definitions]:
    found = []
    for name in names:
        save_catalog(catalog_of(("public", "orders"), slot=name), folder / name / "catalog.json")
        found.append(build_pgcdc_defs(name, DSN, folder / f"{name}_lake", folder / name, **options))
    return found


def test_a_scaffolded_component_describes_one_source() -> None:
    with create_defs_folder_sandbox() as sandbox:
        path = sandbox.scaffold_component(
            component_cls=PgcdcComponent, defs_path="shop", scaffold_params={"source": DSN, "lake": "lake/shop"}
        )
        root = sandbox.defs_folder_path.parents[2]
        save_catalog(catalog_of(("public", "orders")), root / ".pgcdc/shop/catalog.json")
        with sandbox.load_component_and_build_defs(defs_path=path) as (component, defs):
            assert isinstance(component, PgcdcComponent)
            assert (component.name, component.lake) == ("shop", "lake/shop")
            assert {"shop/public/orders", "shop/change_log", "shop/source/public/orders"} <= keys_of(defs)


def test_a_translation_changes_asset_keys_owners_and_tags_and_keeps_the_dependencies() -> None:
    attributes = {
        "name": "shop", "source": DSN, "lake": "lake", "settings": {"retention": "14 days"},
        "translation": {"key_prefix": "acme", "owners": ["team:payments"], "tags": {"stage": "{{ stage }}"}},
    }  # fmt: skip
    with create_defs_folder_sandbox() as sandbox:
        path = sandbox.scaffold_component(
            component_cls=PgcdcComponent,
            defs_path="shop",
            defs_yaml_contents={"type": "pgcdc_assets.PgcdcComponent", "attributes": attributes},
        )
        root = sandbox.defs_folder_path.parents[2]
        save_catalog(catalog_of(("public", "orders")), root / ".pgcdc/shop/catalog.json")
        with sandbox.load_component_and_build_defs(defs_path=path) as (_, defs):
            graph = defs.resolve_asset_graph()
            mirror = graph.get(dg.AssetKey(["acme", "shop", "public", "orders"]))
            assert mirror.owners == ["team:payments"]
            assert mirror.tags["stage"] == "mirror"
            assert mirror.parent_keys == {
                dg.AssetKey(["acme", "shop", stage, "public", "orders"]) for stage in ("changes", "snapshot")
            }


def test_a_component_applies_post_processing_and_freshness() -> None:
    """Dagster's own attribute ``post_processing`` may change every asset of the component."""
    contents = {
        "type": "pgcdc_assets.PgcdcComponent",
        "attributes": {
            "name": "shop", "source": DSN, "lake": "lake", "freshness": {"fail": "15 minutes", "warn": "5 minutes"},
        },
        "post_processing": {"assets": [{"target": "*", "attributes": {"owners": ["team:data"]}}]},
    }  # fmt: skip
    with create_defs_folder_sandbox() as sandbox:
        path = sandbox.scaffold_component(component_cls=PgcdcComponent, defs_path="shop", defs_yaml_contents=contents)
        root = sandbox.defs_folder_path.parents[2]
        save_catalog(catalog_of(("public", "orders")), root / ".pgcdc/shop/catalog.json")
        with sandbox.load_component_and_build_defs(defs_path=path) as (_, defs):
            graph = defs.resolve_asset_graph()
            assert {tuple(graph.get(key).owners) for key in graph.get_all_asset_keys()} == {("team:data",)}
            policy = graph.get(dg.AssetKey(["shop", "consistent_points"])).freshness_policy
            assert policy == dg.FreshnessPolicy.time_window(timedelta(minutes=15), timedelta(minutes=5))


def test_loading_a_source_without_setup_logs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    build_pgcdc_defs("shop", DSN, tmp_path / "lake", tmp_path / "state")
    (message,) = [record.getMessage() for record in caplog.records if record.name.startswith("pgcdc_assets")]
    assert message.startswith("source shop has no assets yet: ")
    assert message.endswith(f"is missing; run `pgcdc setup` with PGCDC_STATE={tmp_path / 'state'}")


def test_freshness_attribute_that_is_not_a_duration_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"attribute `freshness`.*soon.*write it like 7 days"):
        PgcdcFreshness(fail="soon").policy()


def test_two_sources_and_the_users_own_assets_load_in_one_code_location(tmp_path: Path) -> None:
    @dg.asset(deps=[["shop", "public", "orders"], ["crm", "public", "orders"]])
    def report() -> None: ...

    own = dg.Definitions(assets=[report], executor=dg.multiprocess_executor, resources={"engines": 1, "source": 2})
    defs = dg.Definitions.merge(*sources(tmp_path, "shop", "crm"), own)
    dg.Definitions.validate_loadable(defs)
    assert {"shop/public/orders", "crm/public/orders", "report"} <= keys_of(defs)
    assert {job.name for job in defs.resolve_all_job_defs()} >= {"shop_sync", "crm_sync", "shop_repair", "crm_maintain"}


def test_the_lineage_of_a_column_begins_at_the_source(tmp_path: Path) -> None:
    (defs,) = sources(tmp_path, "shop")
    graph, key, seen = defs.resolve_asset_graph(), dg.AssetKey(["shop", "public", "orders"]), []
    while "dagster/column_lineage" in graph.get(key).metadata:
        (dep,) = graph.get(key).metadata["dagster/column_lineage"].value.deps_by_column["id"]
        key = dep.asset_key
        seen.append(key.to_user_string())
    assert seen == ["shop/changes/public/orders", "shop/source/public/orders"]


def test_build_pgcdc_defs_ignores_the_environment_and_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PGCDC_SLOT", "not a slot")
    (tmp_path / "pgcdc.yaml").write_text("no_such_setting: 1\n")
    (defs,) = sources(tmp_path, "shop")
    assert "shop/public/orders" in keys_of(defs)


def test_no_definition_contains_the_password_of_the_source(tmp_path: Path) -> None:
    (defs,) = sources(tmp_path, "shop")
    graph = defs.resolve_asset_graph()
    shown = [str(graph.get(key).metadata) + str(graph.get(key).description) for key in graph.get_all_asset_keys()]
    assert shown
    assert not any("geheim" in text for text in shown)
    assert "geheim" not in str(defs.resources)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lake": "lake"}, "lake is not an absolute path"),
        ({"source": dg.EnvVar("NO_SUCH_DSN")}, "environment variable NO_SUCH_DSN is not set"),
        ({"name": "Shop"}, "begins with a letter"),
        ({"settings": {"retentoin": 1}}, "did you mean `retention`"),
    ],
    ids=["a relative lake", "an environment variable that is not set", "a name with a capital", "an unknown setting"],
)
def test_error_for_a_wrong_argument_of_build_pgcdc_defs_does_not_contain_the_password(
    tmp_path: Path, given: dict[str, Any], message: str
) -> None:
    values: dict[str, Any] = {"name": "shop", "source": DSN, "lake": tmp_path / "lake", "state": tmp_path / "state"}
    with pytest.raises(SettingsError) as refused:
        build_pgcdc_defs(**values | given)
    assert message in str(refused.value)
    assert "geheim" not in str(refused.value)


def test_the_guide_lists_each_attribute_of_the_component_and_each_option_of_build_pgcdc_defs() -> None:
    _, _, attributes, arguments, *_ = re.split(r"^## ", (GUIDES / "own_dagster.md").read_text(), flags=re.MULTILINE)
    assert set(re.findall(r"^\| `(\w+)` \|", attributes, re.MULTILINE)) == set(PgcdcComponent.model_fields)
    listed = re.findall(r"`(\w+)`", " ".join(re.findall(r"^- ([^:]+):", arguments, re.MULTILINE)))
    given = inspect.signature(build_pgcdc_defs).parameters.values()
    assert set(listed) == {one.name for one in given if one.kind is one.KEYWORD_ONLY}


def test_definitions_have_all_names_that_the_guide_to_the_ui_mentions(tmp_path: Path) -> None:
    (defs,) = sources(tmp_path, "shop", settings={"messages": ["*"]})
    repository = defs.get_repository_def()
    names = {job.name for job in repository.get_all_jobs()} | {"shop_lake"}
    names |= {one.name for one in repository.sensor_defs} | {one.name for one in repository.schedule_defs}
    names |= {node.name for job in repository.get_all_jobs() for node in job.nodes}
    page = (GUIDES / "dagster_ui.md").read_text()
    assert (found := set(re.findall(r"\bshop_\w+", page)))
    assert found <= names
    keys = {key.replace("public/orders", "<schema>/<table>") for key in keys_of(defs)}
    assert set(re.findall(r"^\| `(shop/[^`]+)`", page, re.MULTILINE)) == keys
