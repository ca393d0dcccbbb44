"""Takes a snapshot whose LSN is known exactly, and reads tables under it while other sessions use these tables.

export -> pieces -> reading

export      exports the snapshot of a temporary slot, as soon as it is safe to read; finds which tables it shows
pieces      cuts a table into pieces: ranges of pages, each read by one COPY statement
reading     reads one piece; stops, and reads it again, if another session waits for a lock on the table
"""
