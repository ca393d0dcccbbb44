"""Dagster's code location: the pipeline of the project in ``working_directory``, or else in the current directory."""

import os

import dagster as dg

from pgcdc_assets import logs
from pgcdc_assets.defs.pipeline import pipeline
from pgcdc_assets.defs.replication import Replication
from pgcdc_assets.project import SENSOR_ON, enter_project, load_catalog

_LOGGERS = {logs.JSON: {"console": dg.json_console_logger}}
"""Maps a log format to the loggers that replace Dagster's default logger, which writes a run's events to stderr."""

settings = enter_project()
# All steps of a run use one process, because more processes would not make a run faster: the cores are the limit.
defs = dg.Definitions.merge(
    pipeline(Replication(settings, running=os.environ.get(SENSOR_ON) == "on"), load_catalog(settings.catalog_file)),
    dg.Definitions(executor=dg.in_process_executor, loggers=_LOGGERS.get(settings.log_format)),
)
