"""Resources of runs: the engine, the Spark session, the connection to the source. Each is created on first use.

For the assets that users build on mirrors: the lake as a resource and as inputs, and an automation condition. All
inputs of a run are read at one consistent point."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, ClassVar

import dagster as dg
from dagster_pyspark import LazyPySparkResource
from dagster_spark.utils import flatten_dict

from pgcdc_assets.core import retention
from pgcdc_assets.core.ending import ENDING
from pgcdc_assets.core.names import TableName
from pgcdc_assets.defs.dagsterinternals import read_lsn, record_read_lsn
from pgcdc_assets.errors import LakeError
from pgcdc_assets.settings import MASTER, SPARK_MASTER, Settings

if TYPE_CHECKING:
    import pyarrow as pa

    from pgcdc_assets.core.lsn import Lsn
    from pgcdc_assets.flow.engine import Engine
    from pgcdc_assets.flow.reports import Observer
    from pgcdc_assets.lake.point import LakeAt
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


# For downstream assets -------------------------------------------------------------------------------


def mirror_updated() -> dg.AutomationCondition[dg.AssetKey]:
    """True when a mirror that the asset depends on has changed. Like :meth:`dagster.AutomationCondition.eager`, but
    true also if ranges of a mirror are missing.

    If a table was copied later than others (because it was published later, or was not followed for some time), its
    mirror has no materialisation for the ranges before its copy. ``eager`` would wait until retention deletes the keys
    of these ranges, although the mirror contains their rows.
    """
    return dg.AutomationCondition.eager().without(~dg.AutomationCondition.any_deps_missing())


TABLE = "table"
"""The key in an input's metadata that names the table, as ``schema.table``."""
TABLE_NAME = "dagster/table_name"


class PgcdcLake(dg.ConfigurableIOManager):
    """The lake of one source, as a resource and as an IO manager for inputs.

    As an IO manager, it loads the mirror of an upstream asset as ``pyarrow.Table``, or as ``pandas.DataFrame`` or
    ``polars.DataFrame`` if the parameter has this type. All inputs of all steps of a run are read at the same LSN: the
    newest point that was published before the run was created, or a newer point. As a resource, :meth:`at` reads any
    point.
    """

    root: str
    """The lake's folder or URL."""

    def at(self, lsn: "Lsn | str | int | datetime | None" = None) -> "LakeAt":
        """The lake at a consistent point. See :meth:`pgcdc_assets.lake.lake.Lake.at`."""
        from pgcdc_assets.lake.lake import Lake

        return Lake(self.root).at(lsn)

    def load_input(self, context: dg.InputContext) -> Any:
        """The rows of the input's mirror. Raises UnknownTable if the point does not list the table, and LakeError if
        there is no point, or if the run has read other inputs at a point that was deleted since."""
        rows = self._of_run(context).arrow(_table(context))
        return _converted(rows, context.dagster_type.typing_type)

    def _of_run(self, context: dg.InputContext) -> "LakeAt":
        """The point at which the run reads its inputs. The run's first input chooses the point, and records its LSN in
        the run's events. Without the record, a later input would be read at an older point if the point was deleted
        in the meantime."""
        record = _run(context)
        if record is None:
            return self.at()
        run = record.dagster_run
        if read_lsn(context.instance, run.run_id, self.root) is None:
            record_read_lsn(context.instance, run, self.root, str(self._chosen(record.create_timestamp).lsn))
        # Another step of the run may have recorded an LSN first.
        lsn = read_lsn(context.instance, run.run_id, self.root)
        at = self.at(lsn)
        if str(at.lsn) != lsn:
            raise LakeError(
                f"no longer has the consistent point {lsn}, at which this run has read other inputs",
                thing=f"lake {self.root}", do="start a new run, and let it read all mirrors within an hour",
            )  # fmt: skip
        return at

    def _chosen(self, created: datetime) -> "LakeAt":
        """The point for a run that was created at ``created``: the newest point that was published before. Of older
        points, only some are kept. So if the newest that is left is old, a newer one may have been deleted. The run
        then reads the next newer point, because it must see the change of a mirror that has started it."""
        from pgcdc_assets.core.layout import Layout
        from pgcdc_assets.core.lsn import ZERO
        from pgcdc_assets.points.points import ConsistentPoints

        points = ConsistentPoints(Layout.of(self.root))
        point = points.published_by(created)
        if point is None or datetime.now(UTC) - point.at > retention.EVERY_POINT / 2:
            point = points.above(ZERO if point is None else point.replay_lsn) or point
        return self.at(None if point is None else point.replay_lsn)

    def handle_output(self, context: dg.OutputContext, obj: Any) -> None:
        raise dg.DagsterInvariantViolationError(
            f"{context.asset_key.to_user_string()} cannot be written to the lake {self.root}: only the sync writes "
            "mirrors; use another IO manager for the asset"
        )


def _run(context: dg.InputContext) -> dg.RunRecord | None:
    """The run that loads the input. None outside a run."""
    try:
        run_id = context.step_context.run_id
    except dg.DagsterInvariantViolationError:
        return None
    return context.instance.get_run_record_by_id(run_id)


def _table(context: dg.InputContext) -> TableName:
    """The table that the input's metadata names, or the table of the upstream asset."""
    if given := (context.definition_metadata or {}).get(TABLE):
        return TableName.parse(str(given))
    upstream: Mapping[str, Any] = (context.upstream_output.definition_metadata if context.upstream_output else {}) or {}
    if TABLE_NAME in upstream:
        # The text is `<source>.<schema>.<table>`. The source's name is removed.
        return TableName.parse(str(getattr(upstream[TABLE_NAME], "value", upstream[TABLE_NAME])).partition(".")[2])
    return TableName(*context.asset_key.path[-2:])


def _converted(rows: "pa.Table", wanted: Any) -> Any:
    package = getattr(wanted, "__module__", "").partition(".")[0]
    if package == "pandas":
        return rows.to_pandas()
    if package == "polars":
        import polars

        return polars.from_arrow(rows)
    return rows
