"""Fixtures of the tests of the flow."""

from tests.flow.rig import rig

__all__ = ["rig"]
