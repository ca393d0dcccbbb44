"""Frames from the slot.

subscribe -> catchup -> drain     a backlog through the SQL functions, then the stream

subscribe   what must hold before the first frame: log, slot and source belong together
catchup     where the frames of a run come from
clock       the source's own positions, asked beside the stream
"""
