"""The page ``docs/guides/troubleshoot.md`` quotes messages as the code writes them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "guides" / "troubleshoot.md"
_QUOTED = re.compile(r"`([^`]+)`")
_OF_STATUS = frozenset({"in progress", "status"})
"""Texts that headings quote and that are not messages: words from the output of ``pgcdc status``."""


def texts(path: Path) -> Iterator[str]:
    """The strings of a module. ``\\0`` stands for each value in an f-string. Strings joined by ``+`` are separate."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values)


def fragments() -> list[str]:
    """The parts of the quoted messages between their ``...``."""
    headings = [line for line in PAGE.read_text().splitlines() if line.startswith("### ")]
    quoted = [text for line in headings for text in _QUOTED.findall(line) if text not in _OF_STATUS]
    return [part.strip() for text in quoted for part in text.split("...") if re.search(r"\w{3}", part)]


def test_messages_quoted_in_the_troubleshoot_page_are_in_the_code() -> None:
    code = "\n".join(text for path in sorted((ROOT / "pgcdc_assets").rglob("*.py")) for text in texts(path))
    missing = [part for part in fragments() if part not in code]
    assert not missing, "the code no longer says this: change the page"


def test_the_troubleshoot_page_quotes_messages() -> None:
    assert len(fragments()) > 30
