"""Takes a snapshot with an exact LSN, and reads tables under it while other sessions use these tables.

export -> pieces -> reading

export      exports the snapshot of a temporary slot once it is safe to read; reads which tables it shows
pieces      cuts a table into ranges of pages; each range is one COPY statement
reading     reads one piece, and interrupts the reading if another session waits for the table
"""
