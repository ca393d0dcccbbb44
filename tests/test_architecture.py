"""docs/project/architecture.md names existing files, and every package."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "pgcdc_assets"
TEXT = (ROOT / "docs" / "project" / "architecture.md").read_text()


def test_files_that_the_architecture_page_names_exist() -> None:
    named = re.findall(r"`([\w/]+(?:\.py|/))`", TEXT)
    assert not [name for name in named if not any((root / name).exists() for root in (PACKAGE, ROOT))]


def test_the_architecture_page_names_every_package() -> None:
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert packages == set(re.findall(r"^\| `(\w+)` \|", TEXT, re.MULTILINE))
