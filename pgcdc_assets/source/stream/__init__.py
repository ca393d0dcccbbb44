"""Reads frames from the slot.

subscribe -> catchup -> drain     reads a backlog through the SQL functions, then the stream

subscribe   checks, before the first frame, that log, slot and source belong together
catchup     gives the frames of a run: from a drain first, then from the stream
drain       reads a backlog of WAL through the SQL functions
clock       reads the source's positions during the stream
"""
