"""Everything that talks to the source, which is a PostgreSQL server. Uses neither Spark nor Delta.

connect/ --> catalog/ --+--> setup/      creates publications and slot, reports what the source lacks
    |                   +--> snapshot/   exports a snapshot, reads tables under it
    +------> slot/ -----+--> stream/     reads changes from the slot: a large backlog by SQL calls, then the stream
"""
