"""Takes a snapshot with an exact LSN, and reads tables under it while other sessions use these tables.

export -> shown -> pieces -> reading

export      exports the snapshot of a temporary slot, after a check that it is safe to read
shown       the tables as the snapshot shows them
pieces      cuts a table into ranges of pages; each range is one COPY statement
reading     reads one piece, and waits for a lock only while it holds no other lock
waiters     interrupts readings of a table that another session waits for
"""
