"""The documentation site is built without a warning. Its pages load nothing from other servers, and every link and
anchor exists."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

from docs.hooks.generated import EXAMPLES, PARTS, field_docs, kebab, with_parts
from pgcdc_assets import errors, settings
from pgcdc_assets.checks import problemcodes
from pgcdc_assets.checks.problemcodes import ProblemCode
from pgcdc_assets.cli.main import pgcdc
from pgcdc_assets.errors import PgcdcError
from pgcdc_assets.metrics.families import FAMILIES
from pgcdc_assets.settings import Settings
from tests.docs.site import ROOT, SOURCES, BuiltPage

pytestmark = pytest.mark.takes(10)
LINKS_FROM_OUTSIDE = [ROOT / name for name in ("README.md", "CHANGELOG.md", "SECURITY.md", "CONTRIBUTING.md")]
QUESTIONS = {
    "undo a trial": "guides/remove.html",
    "three tables of 400": "guides/choose_tables.html",
    "RDS": "guides/managed_postgresql.html",
    "DuckDB": "guides/read_mirrors.html",
    "an hour ago": "guides/read_mirrors.html",
    "an alarm mean": "guides/alarms.html",
    "own Dagster project": "guides/own_dagster.html",
    "two databases": "guides/own_dagster.html",
    "ALTER TABLE": "guides/schema_changes.html",
    "hide a column": "guides/choose_tables.html",
}
"""Maps a part of each question on the home page to the page with the answer."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, BuiltPage]:
    """The pages of the site by their paths. The build is strict: a warning fails it."""
    folder = tmp_path_factory.mktemp("site")
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True)
    config.plugins.on_startup(command="build", dirty=False)
    build(config)
    return {str(file.relative_to(folder)): BuiltPage.of(file) for file in folder.rglob("*.html")}


def test_every_page_is_built(site: Mapping[str, BuiltPage]) -> None:
    assert {f"{page.relative_to(ROOT / 'docs').with_suffix('')}.html" for page in SOURCES} < site.keys()


def test_pages_of_the_site_load_nothing_from_other_servers(site: Mapping[str, BuiltPage]) -> None:
    assert {name: page.fetched for name, page in site.items() if any(_elsewhere(url) for url in page.fetched)} == {}


def test_every_link_and_anchor_of_the_site_exists(site: Mapping[str, BuiltPage]) -> None:
    broken = [(name, link) for name, page in site.items() for link in page.links
              if name != "404.html" and not _elsewhere(link) and not _exists(site, name, link)]  # fmt: skip
    assert broken == []


@pytest.mark.parametrize("file", [file for file in LINKS_FROM_OUTSIDE if file.exists()], ids=lambda file: file.name)
def test_every_link_and_anchor_of_a_file_outside_of_the_site_exists(file: Path, site: Mapping[str, BuiltPage]) -> None:
    for link in re.findall(r"\]\(((?!https?:|mailto:)[^)\s]+)\)", file.read_text()):
        path, _, anchor = link.partition("#")
        assert (ROOT / path).exists(), link
        if anchor and path.startswith("docs/"):
            assert anchor in site[f"{path.removeprefix('docs/').removesuffix('.md')}.html"].ids, link


@pytest.mark.parametrize("folder", ["pgcdc_assets", "tests", "deploy", "examples", "bench"])
def test_every_page_of_the_documentation_that_the_code_names_exists(folder: str) -> None:
    texts = [path.read_text() for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".yml", ".yaml", ".md")]
    named = {name for text in texts for name in re.findall(r"\bdocs/[\w/]+\.md\b", text)}
    assert sorted(name for name in named if not (ROOT / name).exists()) == []


def test_no_markdown_is_left_in_the_text_of_a_built_page(site: Mapping[str, BuiltPage]) -> None:
    """GitHub shows some Markdown that the site does not, such as a list right under a paragraph."""
    for name, page in site.items():
        left = re.findall(r"\n *(?:[-*] \S.*|\|.*\||1\. .*\n *2\. .*)|```.*|\]\(\S+|\{#.*|generated: \w+", page.text)
        assert not left, name


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_home_page_links_to_the_page_with_the_answer(question: str, site: Mapping[str, BuiltPage]) -> None:
    lines = (ROOT / "docs/index.md").read_text().splitlines()
    link = next(found[1] for line in lines if question in line and (found := re.search(r"\]\(([^)#]+)\.md", line)))
    assert f"{link}.html" == QUESTIONS[question]
    assert f"{link}.html" in site


def test_settings_commands_errors_problem_codes_and_metrics_have_anchors(site: Mapping[str, BuiltPage]) -> None:
    classes = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, PgcdcError)]
    expected = {
        "settings": set(Settings.model_fields),
        "commands": set(pgcdc.commands),
        "errors": {kebab(kind.__name__) for kind in classes if kind is not PgcdcError} | {*map(str, ProblemCode)},
        "metrics": set(FAMILIES),
    }
    for page, ids in expected.items():
        assert ids - site[f"reference/{page}.html"].ids == set()


def test_every_setting_has_a_docstring_and_an_example() -> None:
    assert field_docs(settings, "Settings").keys() == Settings.model_fields.keys()
    assert EXAMPLES.keys() == Settings.model_fields.keys()


def test_every_problem_code_has_a_docstring() -> None:
    assert field_docs(problemcodes, "ProblemCode").keys() == ProblemCode.__members__.keys()


def test_every_generated_part_is_in_exactly_one_page() -> None:
    used = [name for page in SOURCES for name in re.findall(r"<!-- generated: (\w+) -->", page.read_text())]
    assert sorted(used) == sorted(PARTS)


def test_the_generated_parts_in_the_pages_are_current() -> None:
    assert [str(page) for page in SOURCES if with_parts(page.read_text()) != page.read_text()] == [], "run `make docs`"


def _elsewhere(url: str) -> bool:
    return re.match(r"(\w+:)?//|mailto:", url) is not None


def _exists(site: Mapping[str, BuiltPage], name: str, link: str) -> bool:
    path, _, anchor = unquote(link).partition("#")
    target = posixpath.normpath(posixpath.join(posixpath.dirname(name), path)) if path else name
    if target in site:
        return not anchor or anchor in site[target].ids
    return target in (".", "") or not target.endswith(".html")
