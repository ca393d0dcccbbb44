from tests.flow.rig import rig

__all__ = ["rig"]
