"""The replication slot, and the positions of the WAL.

slotstatus  the slot as SQL shows it, and whether the change log may continue from it
creation    creates a slot, which waits for the transactions of the whole cluster
blockers    the transactions that the creation waits for
positions   positions of the WAL, by SQL
"""
