"""Takes a snapshot with an exact LSN, and reads tables under it while others use them.

export -> shown -> pieces -> reading

export      by a temporary slot, behind a gate
shown       the tables as the snapshot shows them
pieces      ranges of a table's pages, each one COPY statement
reading     one piece, read with no lock held while another is waited for
waiters     sessions that want a table that is being read: they get it at once
"""
