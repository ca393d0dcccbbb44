"""The replication slot, and positions in the WAL.

slot        creates a slot, reads its state, and checks whether the change log may continue from it
blockers    finds the transactions for which the creation of a slot, a copy or setup waits
positions   reads the source's current WAL positions
"""
