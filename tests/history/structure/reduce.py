"""Shortens a failing story to the steps that the failure needs, by leaving out shorter and shorter sequences of
steps."""

from __future__ import annotations

from collections.abc import Callable

from tests.history.structure.story import Story


def reduced(story: Story, fails: Callable[[Story], bool]) -> Story:
    """Returns a shorter story that still fails. Each try executes a story, which takes seconds."""
    for part in reversed(range(len(story.parts))):
        length = len(story.parts[part])
        while length:
            start = 0
            while start < len(story.parts[part]):
                shorter = story.without(part, range(start, start + length))
                if fails(shorter):
                    story = shorter
                else:
                    start += length
            length //= 2
    return story
