"""A failing story cut to steps that it needs, by leaving out ever smaller runs of them."""

from __future__ import annotations

from collections.abc import Callable

from tests.history.structure.story import Story


def reduced(story: Story, fails: Callable[[Story], bool]) -> Story:
    """A story that still fails, and of whose steps none can be left out alone. Each try is a replay of seconds."""
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
