"""The format of what is stored: the change log, the ledgers and the saved catalog each state its number."""

from __future__ import annotations

from typing import Final

from pgcdc_assets.errors import UnknownFormat

FORMAT: Final = "1"
"""The only format that this version reads and writes."""
FORMAT_PROPERTY: Final = "pgcdc.format"
"""The property of a Delta table that states its format."""


def check_format(found: object, thing: str) -> None:
    """Raise UnknownFormat if ``thing`` states another format than ours, or none (``found`` is None)."""
    if found != FORMAT:
        stated = "states no format" if found is None else f"has format {found}"
        raise UnknownFormat(f"{stated}, and this version of pgcdc reads format {FORMAT}", thing=thing)
