"""Takes a snapshot with an exact LSN, and reads tables under it while other sessions use these tables.

export -> pieces -> reading

export      exports the snapshot of a temporary slot, after a check that it is safe to read; the tables that it shows
pieces      cuts a table into ranges of pages; each range is one COPY statement
reading     reads one piece, and waits for a lock only while it holds no other lock; interrupts readings of a table
            that another session waits for
"""
