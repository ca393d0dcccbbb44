"""The project directory: where its source is, the embedded server, Dagster's home.

Imports no Dagster, so that ``pgcdc status`` starts fast.
"""

from __future__ import annotations

import os
from pathlib import Path

from pgcdc_assets.settings import STATE_FOLDER, Settings

LOCATION = "pgcdc_assets"

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
"""

WORKSPACE_YAML = f"""\
load_from:
  - python_module:
      module_name: pgcdc_assets.definitions
      location_name: {LOCATION}
"""


def source_of(settings: Settings) -> str:
    """Where the source is: the setting, or the embedded server's conninfo. Starts nothing."""
    if settings.source is not None:
        return settings.source
    from pgcdc_assets.demo import shop

    return shop.server().conninfo


def started_source(settings: Settings, *, survive: bool = True) -> str:
    """As :func:`source_of`, with the embedded server running and its shop filled."""
    if settings.source is not None:
        return settings.source
    from pgcdc_assets.demo import shop

    server = shop.server().start(survive=survive)
    shop.ensure(server.conninfo)
    return server.conninfo


def dagster_home() -> Path:
    """``DAGSTER_HOME``, else ``./.dagster``, made with our instance settings if it is not there yet."""
    if given := os.environ.get("DAGSTER_HOME"):
        return Path(given).expanduser().absolute()
    home = Path(".dagster").absolute()
    home.mkdir(exist_ok=True)
    config = home / "dagster.yaml"
    if not config.exists():
        config.write_text(INSTANCE_YAML)
    return home


def workspace_file() -> Path:
    """A workspace file for the installed package, beside the saved catalog."""
    path = STATE_FOLDER.absolute() / "workspace.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(WORKSPACE_YAML)
    return path
