"""The receiver's source, as its own tests have it."""

from tests.log.conftest import place, source

__all__ = ["place", "source"]
