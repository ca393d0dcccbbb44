"""Runs the project's Dagster jobs in this process, on the project's instance, so that the UI shows the runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pgcdc_assets.cli.console import ConsoleProgress
from pgcdc_assets.core.catalog import Identity
from pgcdc_assets.core.names import TableName, nearest
from pgcdc_assets.errors import PgcdcError, UnknownTable
from pgcdc_assets.project import DAGSTER_FOLDER, LOCATION, dagster_home, load_catalog, required_catalog
from pgcdc_assets.settings import Settings
from pgcdc_assets.store.localfiles import private_log, rotated

if TYPE_CHECKING:
    import dagster as dg

    from pgcdc_assets.defs.replication import Replication

QUIET = {"console": {"config": {"log_level": "CRITICAL"}}}
"""Run configuration that keeps Dagster's events off the terminal. The instance stores them, and
:class:`ConsoleProgress` informs the user."""
_NO_COMPUTE_LOGS = {
    "compute_logs": {"module": "dagster._core.storage.noop_compute_log_manager", "class": "NoOpComputeLogManager"}
}
"""Without compute logs, a foreground command keeps its own stdout and stderr."""


def project_settings(*, set_up: bool = True) -> Settings:
    """The settings. Raises an error, before a run starts, if they are wrong, or if source or lake is not the project's
    own. With ``set_up``, raises SetupNeeded if there is no saved catalog."""
    from pgcdc_assets.flow.ownlake import refuse_other_lake
    from pgcdc_assets.projectsource import refuse_other_source

    settings = Settings.load()
    refuse_other_source(settings)
    refuse_other_lake(settings)
    if set_up:
        required_catalog(settings.catalog_file)
    dagster_home()
    return settings


def saved_settings() -> Settings:
    """The settings of a project that was set up, without a check of the source. Raises WrongLake, or SetupNeeded if
    there is no saved catalog."""
    from pgcdc_assets.flow.ownlake import refuse_other_lake

    settings = Settings.load()
    refuse_other_lake(settings)
    required_catalog(settings.catalog_file)
    return settings


def refuse_unknown(settings: Settings, tables: Sequence[TableName]) -> None:
    """Raise UnknownTable if the saved catalog does not contain one of the tables, before a run is started for them."""
    catalog = load_catalog(settings.catalog_file)
    for table in tables:
        if catalog and catalog.table(table) is None:
            near = nearest(table.name, (known.name for known in catalog.tables))
            do = f"did you mean {near}?" if near else None
            raise UnknownTable("is not among the published tables", thing=str(table), do=do)


def environment() -> dict[str, str]:
    """The environment variables for this project's Dagster processes."""
    return {"DAGSTER_HOME": str(dagster_home()), "DAGSTER_EVENT_BATCH_SIZE": "1000"}


def instance() -> dg.DagsterInstance:
    import dagster as dg
    from dagster._core.instance import InstanceRef

    os.environ.update(environment())
    return dg.DagsterInstance.from_ref(InstanceRef.from_dir(str(dagster_home()), overrides=_NO_COMPUTE_LOGS))


def claim_instance(settings: Settings, identity: Identity) -> None:
    """Raise WrongInstance if another project has the source's name in the Dagster instance."""
    from pgcdc_assets.defs.keys import Names
    from pgcdc_assets.defs.partitions import claim

    with instance() as runs:
        claim(runs, Names(settings.name), identity)


def release_instance(settings: Settings) -> None:
    """Release the source's name in the Dagster instance, if there is an instance and this project has the name."""
    from pgcdc_assets.defs.keys import Names
    from pgcdc_assets.defs.partitions import release

    catalog = None
    with suppress(PgcdcError, OSError):
        catalog = load_catalog(settings.catalog_file)
    if catalog is not None and Path(os.environ.get("DAGSTER_HOME") or DAGSTER_FOLDER).is_dir():
        with instance() as runs:
            release(runs, Names(settings.name), catalog.identity)


@contextmanager
def noise_in_file(log: Path) -> Iterator[None]:
    """Redirect stderr output of Java and libraries to a file, so that only the command writes to the terminal."""
    sys.stderr.flush()
    with private_log(log) as file, os.fdopen(os.dup(2), "wb") as kept, rotated(log):
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept.fileno(), 2)


def run_sync(settings: Settings, progress: ConsoleProgress, **config: Any) -> None:
    from pgcdc_assets.defs.sync import SYNC_OP, sync_job

    _run(settings, sync_job, SYNC_OP, config, progress)


def run_repair(settings: Settings, progress: ConsoleProgress, **config: Any) -> None:
    from pgcdc_assets.defs.sync import REPAIR_OP, repair_job

    _run(settings, repair_job, REPAIR_OP, config, progress)


def run_maintenance(settings: Settings, progress: ConsoleProgress, **config: Any) -> None:
    from pgcdc_assets.defs.maintenance import MAINTAIN_OP, maintain_job

    _run(settings, maintain_job, MAINTAIN_OP, config, progress)


def _run(
    settings: Settings,
    job: Callable[[Replication], dg.JobDefinition],
    op: str,
    config: Mapping[str, Any],
    progress: ConsoleProgress,
) -> None:
    """Run the job in this process. If the run fails, raise the error of the work itself, not Dagster's error."""
    import dagster as dg

    from pgcdc_assets.defs.replication import Replication
    from pgcdc_assets.defs.resources import Engines, Source, lake_spark
    from pgcdc_assets.defs.runs import NamedFailure, reserve

    of = Replication(settings, pooled=False)
    engines = Engines(pyspark=lake_spark(settings)(), source=Source())
    with instance() as runs, noise_in_file(settings.run_log):
        # The run calls reserve() too. It is called here first, so that a second project with the same source name fails
        # before it has a run. A failed run would stand in the instance, where the first project's sensor would take it
        # for its own.
        reserve(of, runs)
        try:
            job(of).execute_in_process(
                run_config={"ops": {of.names.of(op): {"config": dict(config)}}, "loggers": QUIET},
                instance=runs,
                resources={of.names.engines: engines, of.names.watcher: progress},
                tags={".dagster/repository": f"__repository__@{LOCATION}"},
            )
        except NamedFailure as failure:
            raise failure.error from None
        except dg.DagsterExecutionInterruptedError:
            # If the work does not handle signals itself, Dagster raises its own exception for an interruption.
            raise KeyboardInterrupt from None
