"""Dagster's code location: the pipeline of the project in the code location's ``working_directory``, or else in the
current directory."""

from pgcdc_assets.defs.pipeline import pipeline
from pgcdc_assets.project import enter_project, load_catalog

settings = enter_project()
defs = pipeline(settings, load_catalog(settings.catalog_file))
