"""The fixtures of the receiver's own tests."""

from tests.log.conftest import place, source

__all__ = ["place", "source"]
