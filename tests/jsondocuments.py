"""The schemas of the JSON documents that commands print, made from the documents' types: ``python -m
tests.jsondocuments`` writes ``docs/json/``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from pydantic import ConfigDict, TypeAdapter

from pgcdc_assets.checks.documents import MaintainDocument, SetupDocument, StatusDocument, SyncDocument
from pgcdc_assets.checks.positions import PositionsDocument
from pgcdc_assets.checks.report import VerifyDocument

DOCUMENTS: Final = {
    "status": StatusDocument, "positions": PositionsDocument, "verify": VerifyDocument, "sync": SyncDocument,
    "setup": SetupDocument, "maintain": MaintainDocument,
}  # fmt: skip
"""The documents by command."""
FOLDER: Final = Path(__file__).parents[1] / "docs" / "json"
_EXACT = ConfigDict(extra="forbid", strict=True)
"""Pydantic's settings for documents that this version wrote: a field that the type does not have is an error."""
_OPEN = ConfigDict(use_attribute_docstrings=True)
"""Pydantic's settings for the published schemas: readers must ignore fields that they do not know."""


def checked(command: str, document: Any) -> Any:
    """The document as a program reads it from JSON. Fails unless the document has exactly the fields and types that its
    Python type declares."""
    read = json.loads(json.dumps(document))
    _adapter(command, _EXACT).validate_python([read])
    return read


def schema(command: str) -> dict[str, Any]:
    made = _adapter(command, _OPEN).json_schema()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **_plain({"$defs": made["$defs"], **made["items"]}),
    }


def _plain(part: Any) -> Any:
    """Returns the part of a schema without the titles that pydantic makes from names. Replaces double backticks by the
    single backticks of Markdown."""
    if isinstance(part, dict):
        return {name: _plain(value) for name, value in part.items() if not (name == "title" and isinstance(value, str))}
    if isinstance(part, list):
        return [_plain(value) for value in part]
    return part.replace("``", "`").replace("\n", " ") if isinstance(part, str) else part


def _adapter(command: str, config: ConfigDict) -> TypeAdapter[Any]:
    # The type is put into a list, because pydantic takes no configuration for a TypedDict itself.
    listed: Any = list
    return TypeAdapter(listed[DOCUMENTS[command]], config=config)


def text(command: str) -> str:
    return json.dumps(schema(command), indent=1) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in DOCUMENTS:
        (FOLDER / f"{name}.schema.json").write_text(text(name))
