"""The source, PostgreSQL: its catalog, slot, stream and snapshots. Uses neither Spark nor Delta.

connect/ --> catalog/ --+--> setup/      creates publications and slot, reports findings
    |                   +--> snapshot/   exports a snapshot, reads tables in pieces
    +------> slot/ -----+--> stream/     reads frames from the slot: first a drain, then the stream
"""
