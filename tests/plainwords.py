"""Words that have a plainer replacement."""

from __future__ import annotations

import re
from collections.abc import Iterable

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
"""The words of ``INSTEAD``, and more words that the texts printed by the program must not contain."""


def found(words: Iterable[str], text: str) -> list[str]:
    """The words that occur in the text, also across lines."""
    pattern = re.compile(rf"\b({'|'.join(words)})\b", re.IGNORECASE)
    return [match[0] for match in pattern.finditer(" ".join(text.split()))]
