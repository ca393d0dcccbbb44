from tests.log.conftest import place, source

__all__ = ["place", "source"]
