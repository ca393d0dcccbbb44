"""The built site: its files, the ids and links of each page, and the prose of the pages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Final

from docs.hooks.generated import MARKED

ROOT: Final = Path(__file__).parents[2]
DOCS: Final = ROOT / "docs"
SOURCES: Final = sorted(DOCS.rglob("*.md"))
"""The hand-written pages."""
_APART: Final = ("code", "pre", "h1", "h2", "h3", "h4")
_FENCE: Final = re.compile(r"^( *)(```+)([^\n]*)\n(.*?)^\1\2 *$", re.DOTALL | re.MULTILINE)


@dataclass
class BuiltPage(HTMLParser):
    """One HTML file. ``text`` is the text of the page itself, without code, headings and navigation."""

    ids: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    fetched: list[str] = field(default_factory=list)
    """The URLs that a browser loads with the page."""
    text: str = ""
    _code: int = 0
    _article: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    @classmethod
    def of(cls, file: Path) -> BuiltPage:
        page = cls()
        page.feed(file.read_text())
        return page

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self._code += tag in _APART
        self._article += tag == "article"
        if "id" in given:
            self.ids.add(given["id"])
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if "src" in given:
            self.fetched.append(given["src"])
        if tag == "link" and given.get("rel") in ("stylesheet", "preload", "icon", "preconnect", "modulepreload"):
            self.fetched.append(given["href"])

    def handle_endtag(self, tag: str) -> None:
        self._code -= tag in _APART
        self._article -= tag == "article"

    def handle_data(self, data: str) -> None:
        if self._article and not self._code:
            self.text += data


def words(text: str) -> int:
    """The number of words, without the marks of Markdown."""
    return len(re.findall(r"\S*\w\S*", text))


def blocks(page: Path, *languages: str) -> list[str]:
    """The code blocks in these languages, without the indentation of a list around them."""
    found = _FENCE.findall(page.read_text())
    return [re.sub(rf"^{indent}", "", body, flags=re.MULTILINE)
            for indent, _, language, body in found if language.strip() in languages]  # fmt: skip


def prose(text: str) -> str:
    """A page without code blocks, and without the parts that are generated."""
    return _FENCE.sub("", MARKED.sub("", text))


def sentences(text: str) -> Iterator[str]:
    """The sentences of the paragraphs, list entries and table cells."""
    for paragraph in re.split(r"\n\s*\n|\n(?= *(?:[-*|#>]|\d+\.) )", prose(text)):
        for part in re.split(r"(?<!\\)\|", paragraph) if paragraph.lstrip().startswith("|") else [paragraph]:
            plain = re.sub(r"\]\([^)]*\)|`[^`]*`", lambda found: "]" if found[0].startswith("]") else "code", part)
            yield from (one for one in re.split(r"(?<=[.!?])\s+", " ".join(plain.split())) if one)
