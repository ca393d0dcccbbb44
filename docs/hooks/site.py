"""What the site adds to the pages: generated parts, the changelog, the folder of decisions, and files of the repository
that pages link to. MkDocs calls the functions that begin with ``on_``."""

from __future__ import annotations

import logging
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from docs.hooks.generated import MARKED, PARTS

ROOT = Path(__file__).parents[2]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
}
"""The page that shows what a file outside of ``docs`` says."""
MOVED = ("CHANGELOG.md", "CONTRIBUTING.md")
"""Files that are shown as pages."""
COPIES = "files"
"""The folder of the site with copies of other files that pages link to. Their names end in .txt, so that browsers show
them."""

_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)(#[^)\s]*)?(?=\))")
_CODE = re.compile(r"^( *)(```+|~~~+).*?^\1\2 *$|`[^`\n]+`", re.DOTALL | re.MULTILINE)
_log = logging.getLogger("mkdocs.hooks.site")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.nav = [_with_folders(entry) for entry in config.nav or []]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path in MOVED:
        text = _outside_code((ROOT / path).read_text(), lambda prose: _LINK.sub(_from_root, prose))
        files.append(File.generated(config, PAGES[path], content=text))
    for page in files.documentation_pages():
        for path in _outside(page.content_string, page.src_uri):
            if (ROOT / path).is_file() and files.get_file_from_path(_copy_of(path)) is None:
                files.append(File.generated(config, _copy_of(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    text = MARKED.sub(lambda part: PARTS[part[2]](), markdown)
    return _links_replaced(text, page.file.src_uri)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    # GitHub needs the backslash before a | in the code of a table cell. Python-Markdown shows it.
    return re.sub(r"<code>[^<]*</code>", lambda code: code[0].replace(r"\|", "|"), html)


def _from_root(link: re.Match[str]) -> str:
    return f"../{link[0].removeprefix('docs/')}" if link[0].startswith("docs/") else f"../../{link[0]}"


def _with_folders(entry: object) -> object:
    """The entry of the navigation, with a list of pages for each folder, in the order of the file names."""
    if isinstance(entry, dict):
        return {title: _with_folders(inner) for title, inner in entry.items()}
    if isinstance(entry, list):
        return [_with_folders(inner) for inner in entry]
    folder = ROOT / "docs" / str(entry)
    if folder.is_dir():
        pages = sorted(page.name for page in folder.glob("*.md") if page.name != "index.md")
        return [f"{entry}/{page}" for page in ["index.md", *pages]]
    return entry


def _links_replaced(text: str, src_uri: str) -> str:
    """The text with links to pages and copies instead of links that leave the folder ``docs``."""

    def replaced(link: re.Match[str]) -> str:
        path = _target(link[1], src_uri)
        if path is None:
            return link[0]
        if path in PAGES:
            return _relative(PAGES[path], src_uri) + (link[2] or "")
        if not (ROOT / path).is_file():
            _log.warning("%s links to %s, which is not a file", src_uri, path)
        return _relative(_copy_of(path), src_uri)

    return _outside_code(text, lambda prose: _LINK.sub(replaced, prose))


def _outside(text: str, src_uri: str) -> Iterator[str]:
    """The files outside of ``docs`` to which a page links, except those that have a page."""
    for link in _LINK.finditer(_CODE.sub("", text)):
        path = _target(link[1], src_uri)
        if path is not None and path not in PAGES:
            yield path


def _target(link: str, src_uri: str) -> str | None:
    """The path in the repository of a link that leaves the folder ``docs``."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(src_uri), link))
    if path.startswith("docs/"):
        return None
    return f"{path}/README.md" if (ROOT / path).is_dir() else path


def _copy_of(path: str) -> str:
    return f"{COPIES}/{path}.txt"


def _relative(uri: str, src_uri: str) -> str:
    return posixpath.relpath(uri, posixpath.dirname(src_uri) or ".")


def _outside_code(text: str, change: object) -> str:
    assert callable(change)
    parts, end = [], 0
    for code in _CODE.finditer(text):
        parts += [change(text[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, change(text[end:])])
