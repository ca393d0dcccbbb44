"""The Spark session as a Dagster resource: the resource of dagster-pyspark, with the same configuration. The session
stops at the end of the run."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster_pyspark import LazyPySparkResource

from pgcdc_assets.defs.pipeline import pipeline
from pgcdc_assets.defs.replication import Replication
from pgcdc_assets.defs.resources import Engines, LakeSpark, lake_spark
from pgcdc_assets.errors import SettingsError
from pgcdc_assets.flow.reports import Silent
from pgcdc_assets.settings import Settings
from pgcdc_assets.spark import session as sessions

QUIET = {"console": {"config": {"log_level": "CRITICAL"}}}


@dataclass
class Sessions:
    """Replaces :mod:`pgcdc_assets.spark.session`."""

    started: list[Settings] = field(default_factory=list)
    stopped: list[object] = field(default_factory=list)

    def spark_session(self, settings: Settings) -> object:
        self.started.append(settings)
        return self.started

    def stop_session(self, session: object) -> None:
        self.stopped.append(session)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Sessions:
    found = Sessions()
    monkeypatch.setattr(sessions, "spark_session", found.spark_session)
    monkeypatch.setattr(sessions, "stop_session", found.stop_session)
    return found


@pytest.fixture(autouse=True)
def _project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PGCDC_SOURCE", "dbname=nowhere")
    monkeypatch.setenv("PGCDC_SPARK", json.dumps({"master": "local[2]", "spark.driver.memory": "1g"}))


def run(*, uses: bool = True, fails: bool = False, spark_config: dict[str, Any] | None = None) -> bool:
    """Runs an op with pgcdc's resources. The op requests the session twice, as several parts of a run do."""

    @dg.op
    def work(pgcdc_engines: Engines, pgcdc_pyspark: LakeSpark) -> None:
        assert isinstance(pgcdc_pyspark, LazyPySparkResource)
        engine = pgcdc_engines.engine_at_rest(Settings.load(), Silent(), "test")
        if uses:
            assert engine._session() is engine._session() is pgcdc_pyspark.spark_session
        if fails:
            raise dg.Failure("broken")

    @dg.job
    def job() -> None:
        work()

    defs = dg.Definitions(jobs=[job], resources=pipeline(Replication(Settings.load()), None).resources)
    config: dict[str, Any] = {"loggers": QUIET}
    if spark_config is not None:
        config["resources"] = {"pgcdc_pyspark": {"config": {"spark_config": spark_config}}}
    return defs.resolve_job_def("job").execute_in_process(run_config=config, raise_on_error=False).success


def test_a_run_that_does_not_use_spark_starts_no_session(recorded: Sessions) -> None:
    assert run(uses=False)
    assert (recorded.started, recorded.stopped) == ([], [])


@pytest.mark.parametrize("fails", [False, True], ids=["ends well", "fails"])
def test_a_run_has_one_session_that_ends_with_the_run(recorded: Sessions, fails: bool) -> None:
    assert run(fails=fails) is not fails
    assert [found.spark for found in recorded.started] == [{"master": "local[2]", "spark.driver.memory": "1g"}]
    assert len(recorded.stopped) == 1


def test_a_run_configures_spark_as_dagster_pyspark_does(recorded: Sessions) -> None:
    """The ``spark_config`` of the resource may be nested, and overrides the values of the setting ``spark``."""
    given = {"spark.master": "local[1]", "spark": {"driver": {"memory": "2g"}, "ui": {"enabled": True}}}
    assert run(spark_config=given)
    assert [found.spark for found in recorded.started] == [
        {"master": "local[1]", "spark.driver.memory": "2g", "spark.ui.enabled": "true"}
    ]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"driver.memory": "2g"}, "has the key `driver.memory`, which is neither"),
        ({"spark.master": "spark://host:7077"}, "cannot be used with a lake on a local path"),
    ],
)
def test_spark_config_of_a_run_is_checked_by_the_same_rules_as_the_setting_spark(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingsError, match=message.replace("`", "['`]")):
        lake_spark(Settings.load())(spark_config=given).settings()


def test_the_ui_of_dagster_does_not_show_the_spark_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The setting may hold credentials."""
    monkeypatch.setenv("PGCDC_SPARK", json.dumps({"spark.hadoop.fs.s3a.secret.key": "hidden"}))
    from dagster._core.remote_representation.external_data import RepositorySnap

    snapshot = RepositorySnap.from_def(pipeline(Replication(Settings.load()), None).get_repository_def())
    assert "hidden" not in dg.serialize_value(snapshot)
