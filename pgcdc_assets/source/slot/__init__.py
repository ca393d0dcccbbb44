"""The replication slot, and the positions of the WAL.

slot        creates a slot; reads it by SQL, and checks whether the change log may continue from it
blockers    the transactions that the creation of a slot, a copy or setup waits for
positions   positions of the WAL, by SQL
"""
