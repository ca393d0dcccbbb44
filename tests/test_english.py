"""Docstrings, comments and messages do not use words that have a plainer replacement."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tests.plainwords import IN_MESSAGES, INSTEAD, found

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "pgcdc_assets").rglob("*.py"))


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
    assert not _found(INSTEAD, texts), "see INSTEAD in tests/plainwords.py"


def test_messages_use_plain_words() -> None:
    assert not _found(IN_MESSAGES, messages), "see IN_MESSAGES in tests/plainwords.py"


def _found(words: Iterable[str], texts_of: Callable[[str], Iterator[str]]) -> dict[str, list[str]]:
    """The words that occur, by file."""
    return {
        str(path.relative_to(ROOT)): odd
        for path in FILES
        if (odd := [word for text in texts_of(path.read_text()) for word in found(words, text)])
    }
