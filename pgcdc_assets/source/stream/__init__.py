"""Reads pgoutput's messages from the slot, as frames of the streaming replication protocol.

subscribe -> drain

subscribe   checks that log, slot and source belong together; then begins a drain or the stream
drain       reads a large backlog of WAL through SQL functions, which is faster than the stream
"""
