from __future__ import annotations

import pytest

from pgcdc_assets.core.settingvalues import PrefixPatterns


@pytest.mark.parametrize(
    ("patterns", "prefix", "chosen"),
    [
        ([], "outbox", False),
        (["outbox"], "outbox", True),
        (["outbox"], "outbox.orders", False),
        (["outbox"], "an outbox", False),
        (["outbox.*"], "outbox.orders", True),
        (["outbox.*"], "outbox.", True),
        (["outbox.*"], "outboxes", False),
        (["out?"], "outs", True),
        (["out?"], "outer", False),
        (["*"], "two\nlines", True),
        (["*", "-debug.*"], "debug.x", False),
        (["*", "-debug.*"], "debug", True),
        (["-debug.*", "app", "*x"], "box", True),
        (['"a*b"'], "a*b", True),
        (['"a*b"'], "axb", False),
        (['"a""b"'], 'a"b', True),
        (['-"a*b"', "a*"], "a*b", False),
    ],
)
def test_prefix_is_chosen_if_it_is_included_and_not_excluded(patterns: list[str], prefix: str, chosen: bool) -> None:
    assert PrefixPatterns.parse(patterns).match(prefix) is chosen


@pytest.mark.parametrize("pattern", ["", " app", "app ", 'a"b', "a\0b", "-", "- app", '""'])
def test_text_that_is_not_a_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=f"^{pattern!r} is not a pattern".replace("\\", "\\\\")):
        PrefixPatterns.parse([pattern, "*"])


def test_exclusions_alone_are_refused() -> None:
    with pytest.raises(ValueError, match="excludes prefixes and includes none"):
        PrefixPatterns.parse(["-debug.*"])
