"""Dagster's code location: the pipeline of the project in the code location's ``working_directory``, or else in the
current directory."""

from pgcdc_assets.defs.pipeline import pipeline
from pgcdc_assets.project import enter_project
from pgcdc_assets.savedcatalog import load_catalog
from pgcdc_assets.settings import CATALOG_FILE, Settings

enter_project()
defs = pipeline(Settings.load(), load_catalog(CATALOG_FILE))
