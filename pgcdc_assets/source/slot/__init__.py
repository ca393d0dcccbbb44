"""The replication slot.

slotstatus  the slot as SQL shows it, and whether the log may go on from it
creation    making one, which waits for the transactions of the whole cluster
blockers    whom it waits for
"""
