"""The change log: the messages as PostgreSQL sent them, in an append-only Delta table.

receive/ -> framerun -> rows -> segment (spill) -> batch -> commit        written by one process
                                                              |
                                          reader, counting <--+           read by everybody

framerun    received frames, indexed            rows        turns frames into rows of the log
streamed    which frame belongs to which transaction in progress, in the form of protocol version 1
inprogress  transactions in progress
prepared    prepared transactions, whose content came at PREPARE    preparedfolder  keeps their content
segment     the Parquet files of the log        spill       segments of open transactions
spool       content of transactions in progress
latefacts   facts of a file's rows that are known only at the commit, after the file was written
batch       the smallest durable piece          commit      compare-and-set; durable before it is reported; repair
reader      position, batches, segments         counting    the receiver's counts of rows by relation
summary     the summary row of a batch          soundness   checks the rows against the summaries
transactions  the transaction that is open after a run
relations   the Relation message in force for each row
fencing     shuts out a writer that has lost the lake
upkeep      compaction and retention
"""
