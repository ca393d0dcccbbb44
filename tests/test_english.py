"""Docstrings and comments do not use words that have a plainer replacement."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "pgcdc_assets").rglob("*.py"))
INSTEAD = {
    "anew": "again, new",
    "astray": "the rule itself",
    "by now": "now",
    "from then on": "after that",
    "from there on": "above that LSN",
    "heeds?": "follows, reads",
    "is told": "learns",
    "let go of": "deleted, released",
    "lets go": "deletes, releases",
    "meanwhile": "during ...",
    "none that": "no ... that",
    "nobody's": "the noun",
    "of another hand": "owned by another writer",
    "of before": "earlier",
    "of then": "at that time",
    "so far": "until ...",
    "stands? at": "is at",
    "stands? where": "is at",
    "told of": "reported",
    "until now": "before",
    "whatever": "a rewrite",
    "wherever": "a rewrite",
    "whoever": "a rewrite",
}
"""Words that make a sentence hard to read, and their replacement."""
_FOUND = re.compile(rf"\b({'|'.join(INSTEAD)})\b", re.IGNORECASE)


def texts(source: str) -> Iterator[str]:
    """The docstrings, including docstrings of fields, and the comments."""
    for node in ast.walk(ast.parse(source)):
        for inner in getattr(node, "body", []) if isinstance(getattr(node, "body", None), list) else []:
            if isinstance(inner, ast.Expr) and isinstance(inner.value, ast.Constant):
                yield str(inner.value.value)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def test_docstrings_and_comments_use_plain_words() -> None:
    found = {
        str(path.relative_to(ROOT)): words
        for path in FILES
        if (words := [match[0] for text in texts(path.read_text()) for match in _FOUND.finditer(_in_one_line(text))])
    }
    assert not found, "see INSTEAD"


def _in_one_line(text: str) -> str:
    return " ".join(text.split())
