"""The JSON documents that commands print match their schemas and ``docs/reference/json.md``."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from pgcdc_assets.checks.status import refused
from pgcdc_assets.cli.main import pgcdc
from pgcdc_assets.errors import SettingsError, StoreFailed, WrongLake, WrongSource
from tests import jsondocuments
from tests.jsondocuments import DOCUMENTS

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "json.md"


@pytest.mark.parametrize("command", DOCUMENTS)
def test_the_schema_in_the_docs_is_current(command: str) -> None:
    held = jsondocuments.FOLDER / f"{command}.schema.json"
    assert held.read_text() == jsondocuments.text(command), "run `python -m tests.jsondocuments`"
    assert f"json/{held.name}" in PAGE.read_text()


def test_every_command_with_the_option_json_has_a_document_type() -> None:
    asked = {name for name, command in pgcdc.commands.items() if any("--json" in p.opts for p in command.params)}
    assert asked == DOCUMENTS.keys()


def test_a_document_that_does_not_match_its_schema_is_refused() -> None:
    """Otherwise the tests that check real documents would prove nothing."""
    document = refused(SettingsError("is wrong", thing="setting `x`")).to_json()
    assert jsondocuments.checked("status", document)["ok"] is False
    for wrong in ({**document, "more": 1}, {**document, "ok": "no"}, {**document, "slot": {"name": "s"}}):
        with pytest.raises(ValidationError):
            jsondocuments.checked("status", wrong)
    with pytest.raises(ValidationError):
        jsondocuments.checked("status", {name: value for name, value in document.items() if name != "lag_bytes"})


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SettingsError("x", thing="t"), "wrong_settings"),
        (WrongSource("x", thing="t"), "wrong_source"),
        (WrongLake("x", thing="t"), "wrong_lake"),
        (StoreFailed("x", thing="t"), "lake_unreachable"),
    ],
)
def test_the_document_of_a_refused_command_has_the_code_of_its_error(
    error: SettingsError | StoreFailed, code: str
) -> None:
    (problem,) = jsondocuments.checked("status", refused(error).to_json())["problems"]
    assert (problem["code"], problem["severity"]) == (code, "error")
