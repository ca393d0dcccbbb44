"""Resources of runs: the engine, Spark's session, a connection to the source. Each is made on first use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import PrivateAttr

from pgcdc_assets.core.ending import ENDING
from pgcdc_assets.project import started_source
from pgcdc_assets.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from pgcdc_assets.flow.engine import Engine
    from pgcdc_assets.flow.observer import Observer
    from pgcdc_assets.source.connect.connection import SourceConnection


class LakeSpark(dg.ConfigurableResource[Any]):
    """The run's Spark session: started on first use, stopped at the end of the run, also of a failed one."""

    _session: Any = PrivateAttr(default=None)

    def session(self, settings: Settings) -> SparkSession:
        if self._session is None:
            from pgcdc_assets.spark.session import spark_session

            self._session = spark_session(settings)
        return self._session

    def teardown_after_execution(self, context: dg.InitResourceContext) -> None:
        # Once the process has been asked to end, the JVM ends with it.
        if self._session is not None and not ENDING.asked:
            from pgcdc_assets.spark.session import stop_session

            session, self._session = self._session, None
            stop_session(session)


class Source(dg.ConfigurableResource[Any]):
    """The source, for plain SQL: runs of the pipeline open their replication connections themselves."""

    def conninfo(self, settings: Settings) -> str:
        """The source's conninfo. This does not start the embedded server."""
        from pgcdc_assets.checks.origin import source_of

        return source_of(settings)

    def started(self, settings: Settings) -> str:
        """The conninfo of the project's own source, which runs: this starts the embedded server if needed."""
        return started_source(settings)

    @contextmanager
    def connection(self, settings: Settings) -> Iterator[SourceConnection]:
        from pgcdc_assets.source.connect.connection import connect

        with connect(self.conninfo(settings), connect_timeout=5) as conn:
            yield conn


class Engines(dg.ConfigurableResource[Any]):
    """Makes the engine that works on the project's lake."""

    spark: LakeSpark
    source: Source

    def engine(self, settings: Settings, observer: Observer, command: str) -> Engine:
        from pgcdc_assets.flow.engine import Engine

        conninfo = self.source.started(settings)
        return Engine(settings, conninfo, observer, lambda: self.spark.session(settings), command)

    def engine_at_rest(self, settings: Settings, observer: Observer, command: str) -> Engine:
        """An engine for work on the lake alone: the source is neither asked nor started."""
        from pgcdc_assets.flow.engine import Engine

        conninfo = self.source.conninfo(settings)
        return Engine(settings, conninfo, observer, lambda: self.spark.session(settings), command)
