"""The receiver's source, as its own tests have it."""

from tests.log.conftest import source

__all__ = ["source"]
