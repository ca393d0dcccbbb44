"""Dagster's code location: the pipeline of the project in the working directory."""

from pgcdc_assets.core.catalog import Catalog
from pgcdc_assets.defs.pipeline import pipeline
from pgcdc_assets.settings import CATALOG_FILE, Settings

defs = pipeline(Settings.load(), Catalog.load(CATALOG_FILE))
