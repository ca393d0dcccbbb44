"""Docstrings, comments and messages do not use words that have a plainer replacement."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterable, Iterator
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
IN_MESSAGES = INSTEAD | {
    "any more": "no longer",
    "at work": "running",
    "beside": "together with, next to",
    "for (it|they) (is|are|waits?)": "because it ...",
    "goe?s? on": "continues",
    "going on": "continuing",
    "gone for good": "lost",
    "in pieces": "small files",
    "looks? at": "checks",
    "nobody|somebody": "the noun, or a passive",
    "none of (its|a)": "not of the",
    "of (its|their|your) own": "separate",
    "tells?": "shows, says",
    "the while": "during ...",
    "where (it|that|this) is": "if it is",
}
"""The same for the texts that the program prints."""


def messages(source: str) -> Iterator[str]:
    """The strings of several words that are not docstrings: errors, findings, log lines, help, descriptions."""
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and " " in str(node.value) and id(node) not in docstrings:
            yield str(node.value)


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
    assert not _found(INSTEAD, texts), "see INSTEAD"


def test_messages_use_plain_words() -> None:
    assert not _found(IN_MESSAGES, messages), "see IN_MESSAGES"


def _found(words: Iterable[str], texts_of: Callable[[str], Iterator[str]]) -> dict[str, list[str]]:
    """The words that occur, by file."""
    pattern = re.compile(rf"\b({'|'.join(words)})\b", re.IGNORECASE)
    return {
        str(path.relative_to(ROOT)): found
        for path in FILES
        if (
            found := [match[0] for text in texts_of(path.read_text()) for match in pattern.finditer(_in_one_line(text))]
        )
    }


def _in_one_line(text: str) -> str:
    return " ".join(text.split())
