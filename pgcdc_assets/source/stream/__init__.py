"""Reads frames from the slot.

subscribe -> drain

subscribe   checks, before the first frame, that log, slot and source belong together; begins the drain or the stream
drain       reads a backlog of WAL through the SQL functions
"""
