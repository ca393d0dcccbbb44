"""The replication slot, and positions in the WAL.

slot        creates a slot, reads its state, checks whether the change log may continue from it, and reads WAL positions
blockers    finds the transactions for which the creation of a slot, a copy or setup waits
"""
