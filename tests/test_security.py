"""SECURITY.md links to existing places, and the examples of the docs follow its advice."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
SECURITY = (ROOT / "SECURITY.md").read_text()
TEXTS = [*sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "deploy").rglob("*.env*"))]


def test_links_in_security_md_have_a_target() -> None:
    for place, anchor in re.findall(r"\]\((?!https?:)([^)#]+)#?([^)]*)\)", SECURITY):
        assert (ROOT / place).exists(), place
        headings = re.findall(r"^#+ (.*)$", (ROOT / place).read_text(), re.MULTILINE)
        assert not anchor or anchor in {re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in headings}


def test_examples_with_a_remote_source_verify_its_certificate() -> None:
    examples = [(path.name, line) for path in TEXTS for line in path.read_text().splitlines()
                if re.search(r"\bhost=[\w-]+\.", line)]  # fmt: skip
    assert examples
    assert not [example for example in examples if "sslmode=verify-full" not in example[1]]
