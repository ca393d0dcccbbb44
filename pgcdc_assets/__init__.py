"""Delta Lake tables kept exactly equal to a PostgreSQL database, by logical replication."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pgcdc_assets.lake import Lake

__all__ = ["Lake"]


def __getattr__(name: str) -> Any:
    """Imports ``Lake`` on first use, so that importing the package loads neither Arrow nor Delta Lake."""
    if name == "Lake":
        from pgcdc_assets.lake import Lake

        return Lake
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
