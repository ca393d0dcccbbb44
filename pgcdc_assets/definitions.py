"""Dagster's code location: the pipeline of the project in the working directory."""

from pgcdc_assets.defs.pipeline import pipeline
from pgcdc_assets.savedcatalog import load_catalog
from pgcdc_assets.settings import CATALOG_FILE, Settings

defs = pipeline(Settings.load(), load_catalog(CATALOG_FILE))
