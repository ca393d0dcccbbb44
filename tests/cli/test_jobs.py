"""How the Dagster run that a command starts in its own process ends. No source is needed."""

from __future__ import annotations

import os
import signal
import time

import dagster as dg
import pytest

from pgcdc_assets.cli import jobs
from pgcdc_assets.cli.console import ConsoleProgress
from tests.cli.conftest import Shell


@dg.op(name="pgcdc_deaf", config_schema={})
def deaf() -> None:
    """A job that ignores all signals."""
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(30)


@dg.job
def deaf_job() -> None:
    deaf()


@pytest.mark.long
def test_an_interrupted_run_is_not_reported_as_a_dagster_error(shell: Shell) -> None:
    settings = jobs.project_settings(set_up=False)
    with pytest.raises(KeyboardInterrupt):
        jobs._run(settings, lambda of: deaf_job, "deaf", {}, ConsoleProgress())
