"""The project directory: its source, the embedded server, Dagster's home.

Imports no Dagster, so that ``pgcdc status`` starts fast.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from pgcdc_assets.core.master import on_this_host
from pgcdc_assets.errors import SettingsError
from pgcdc_assets.projectfile import SETTINGS_FILE
from pgcdc_assets.settings import STATE_FOLDER, Settings
from pgcdc_assets.store.private import private_folder

LOCATION = "pgcdc_assets"
DAGSTER_FOLDER = ".dagster"

INSTANCE_YAML = """\
# Dagster's instance for this project; docs/operations.md says why each line is there.
telemetry:
  enabled: false
nux:
  enabled: false

# Seconds count here: a run that the sensor asked for should start at once.
run_coordinator:
  module: dagster._core.run_coordinator.queued_run_coordinator
  class: QueuedRunCoordinator
  config:
    dequeue_interval_seconds: 1

# One writer per lake: a backfill waits in the queue until the running sync gives way.
concurrency:
  runs:
    max_concurrent_runs: 1

run_monitoring:
  enabled: true
  start_timeout_seconds: 180
  cancel_timeout_seconds: 180
  poll_interval_seconds: 10

# A tick every few seconds. Runs and their events go with the ranges, by `pgcdc maintain` and its schedule.
retention:
  schedule:
    purge_after_days: 30
  sensor:
    purge_after_days:
      skipped: 1
      started: 7
      success: 7
      failure: 30
"""

WORKSPACE_YAML = f"""\
load_from:
  - python_module:
      module_name: pgcdc_assets.definitions
      location_name: {LOCATION}
"""


def enter_project() -> Settings:
    """Change to the ``working_directory`` of a code location, if it is a project's folder. Returns the settings there.

    While Dagster imports the definitions, also for a run, it puts that folder first on ``sys.path``, but does not
    change to it. A code location without a project has no assets; this logs a warning.
    """
    named = Path(sys.path[0] if sys.path else "").absolute()
    if (named / STATE_FOLDER).is_dir() or (named / SETTINGS_FILE).is_file():
        os.chdir(named)
    settings = Settings.load()
    if not settings.catalog_file.is_file():
        logging.getLogger(__name__).warning(
            "there is no saved catalog %s, so this code location has no assets: run `pgcdc setup` in the project's "
            "folder; if that is another folder, set it as `working_directory` of the code location",
            settings.catalog_file.absolute(),
        )
    return settings


def started_source(settings: Settings, *, survive: bool = True) -> str:
    """The source's conninfo. If the source is the embedded server, this starts the server and fills its sample shop.

    Raises WrongSource, before anything is started, if the project was set up with another source, and SettingsError if
    Spark's executors cannot reach the embedded server.
    """
    # Imported here, so that Dagster's code location loads without delta-rs.
    from pgcdc_assets.checks.origin import is_embedded, require_same_source, source_of

    require_same_source(settings)
    if not is_embedded(settings):
        return source_of(settings)
    from pgcdc_assets.demo import shop

    if not on_this_host(settings.master):
        raise SettingsError(
            f"is the embedded server, which listens on this machine alone, but executors of {settings.master} read it",
            thing="setting `source`", do="name a source that they reach, or set `spark` to local[*]",
        )  # fmt: skip
    private_folder(settings.state)
    server = shop.server(settings.state).start(survive=survive)
    shop.ensure(server.conninfo)
    return server.conninfo


def dagster_home() -> Path:
    """The folder ``DAGSTER_HOME``, or else ``./.dagster``. A new or empty folder gets our instance settings."""
    if given := os.environ.get("DAGSTER_HOME"):
        home = Path(given).expanduser().absolute()
        if not home.is_dir():
            raise SettingsError(f"{home} is no folder", thing="DAGSTER_HOME",
                                do="make it, or unset the variable: .dagster is used then")  # fmt: skip
        ours = not any(home.iterdir())
    else:
        home, ours = private_folder(Path(DAGSTER_FOLDER).absolute()), True
    config = home / "dagster.yaml"
    if ours and not config.exists():
        config.write_text(INSTANCE_YAML)
    return home


def workspace_file() -> Path:
    """Write a workspace file for the installed package, next to the saved catalog."""
    path = STATE_FOLDER.absolute() / "workspace.yaml"
    private_folder(path.parent)
    path.write_text(WORKSPACE_YAML)
    return path
