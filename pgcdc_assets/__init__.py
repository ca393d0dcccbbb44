"""Delta Lake tables kept exactly equal to a PostgreSQL database, by logical replication."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pgcdc_assets.defs.pipeline import PgcdcComponent, build_pgcdc_defs
    from pgcdc_assets.defs.replication import PgcdcTable, PgcdcTranslator
    from pgcdc_assets.defs.resources import PgcdcLake, mirror_updated
    from pgcdc_assets.lake.lake import Lake
    from pgcdc_assets.spark.session import delta_session

__all__ = [
    "Lake", "PgcdcComponent", "PgcdcLake", "PgcdcTable", "PgcdcTranslator", "build_pgcdc_defs", "delta_session",
    "mirror_updated",
]  # fmt: skip

_MODULES = {
    "Lake": "lake.lake",
    "PgcdcComponent": "defs.pipeline",
    "PgcdcLake": "defs.resources",
    "PgcdcTable": "defs.replication",
    "PgcdcTranslator": "defs.replication",
    "build_pgcdc_defs": "defs.pipeline",
    "delta_session": "spark.session",
    "mirror_updated": "defs.resources",
}


def __getattr__(name: str) -> Any:
    """Imports each name on first use, so that importing the package loads neither Dagster nor Delta Lake."""
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names. ``dg`` finds the component by this list."""
    return [*globals(), *__all__]
