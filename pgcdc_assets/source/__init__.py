"""PostgreSQL, the source: its catalog, slot, stream and snapshots. Neither Spark nor Delta.

connect/ --> catalog/ --+--> setup/      publications and slot, findings in words
    |                   +--> snapshot/   an exported snapshot, read in pieces
    +------> slot/ -----+--> stream/     frames from the slot: a drain, then the stream

positions   where the WAL stands, as SQL says it
"""
