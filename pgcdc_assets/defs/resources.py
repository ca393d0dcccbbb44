"""Resources of runs: the engine, the Spark session, the connection to the source. Each is created on first use."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import dagster as dg
from dagster_pyspark import LazyPySparkResource
from dagster_spark.utils import flatten_dict

from pgcdc_assets.core.ending import ENDING
from pgcdc_assets.settings import MASTER, SPARK_MASTER, Settings

if TYPE_CHECKING:
    from pgcdc_assets.flow.engine import Engine
    from pgcdc_assets.flow.reports import Observer
    from pgcdc_assets.source.connect.connection import SourceConnection


class LakeSpark(LazyPySparkResource):
    """The lazy session of dagster-pyspark, with Delta. It is stopped at the end of the run, also if the run fails.

    ``spark_config`` is the field of dagster-pyspark's resource, and overrides the setting ``spark``. It is empty by
    default, because Dagster's UI shows it and the setting may hold credentials.
    """

    spark_config: dict[str, Any] = {}  # noqa: RUF012  (pydantic copies it)
    project: ClassVar[Settings]
    """The settings of the source. It is a class variable, because Dagster's UI shows the fields of a resource."""

    def settings(self) -> Settings:
        """The source's settings, with ``spark_config`` merged into the setting ``spark``. Raises SettingsError."""
        flat = dict(flatten_dict(self.spark_config))  # type: ignore[no-untyped-call]
        given = {MASTER if key == SPARK_MASTER else key: value for key, value in flat.items()}
        return self.project.changed(spark=self.project.spark | given) if given else self.project

    def _init_session(self) -> None:
        if self._spark_session is None:
            from pgcdc_assets.spark.session import spark_session

            self._spark_session = spark_session(self.settings())

    def teardown_after_execution(self, context: dg.InitResourceContext) -> None:
        # If the process has been asked to end, the session is not stopped, because the JVM ends with the process.
        if self._spark_session is not None and not ENDING.asked:
            from pgcdc_assets.spark.session import stop_session

            session, self._spark_session = self._spark_session, None
            stop_session(session)


def lake_spark(settings: Settings) -> type[LakeSpark]:
    """A subclass of LakeSpark whose sessions use these settings."""

    class SourceSpark(LakeSpark):
        project = settings

    return SourceSpark


class Source(dg.ConfigurableResource[Any]):
    """The connection to the source for plain SQL. Runs of the pipeline open their own replication connections."""

    def conninfo(self, settings: Settings) -> str:
        """The source's conninfo. This does not start the embedded server."""
        from pgcdc_assets.projectsource import source_of

        return source_of(settings)

    def started(self, settings: Settings) -> str:
        """The conninfo of the project's own source. Starts the embedded server if it is the source and does not run."""
        from pgcdc_assets.projectsource import started_source

        return started_source(settings)

    @contextmanager
    def connection(self, settings: Settings) -> Iterator["SourceConnection"]:
        from pgcdc_assets.source.connect.connection import connect

        with connect(self.conninfo(settings), connect_timeout=5) as conn:
            yield conn


class Engines(dg.ConfigurableResource[Any]):
    """Creates the engine that works on the project's lake."""

    pyspark: LakeSpark
    source: Source

    def engine(self, settings: Settings, observer: "Observer", command: str) -> "Engine":
        from pgcdc_assets.flow.engine import Engine

        conninfo = self.source.started(settings)
        return Engine(settings, conninfo, observer, lambda: self.pyspark.spark_session, command)

    def engine_at_rest(self, settings: Settings, observer: "Observer", command: str) -> "Engine":
        """An engine that works only on the lake. It does not connect to the source, and does not start it."""
        from pgcdc_assets.flow.engine import Engine

        conninfo = self.source.conninfo(settings)
        return Engine(settings, conninfo, observer, lambda: self.pyspark.spark_session, command)
