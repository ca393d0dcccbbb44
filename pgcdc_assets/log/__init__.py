"""The change log: the messages as PostgreSQL sent them, in an append-only Delta table.

receive/ -> framerun -> rows -> segment (spill) -> batch -> commit        written by one process
                                                              |
                                          reader, span <------+           read by everybody

framerun      received frames, indexed
streamed      which frame belongs to which transaction in progress, in the form of protocol version 1
relations     the Relation message in force for each row
transactions  transactions whose end has not come: open, in progress, prepared
rows          turns frames into rows of the log
segment       the Parquet files of the log
commitfacts   facts of rows that are known only at the commit, after the rows were written
content       content of transactions in progress
spill         keeps this content, and the content of prepared transactions, on disk
batch         the smallest durable piece
commit        compare-and-set; durable before it is reported; repairs the log; shuts out an earlier writer
summary       the summary row of a batch, and the check of the rows against it
reader        position, batches, segments
span          batches, shapes and row counts of one span
upkeep        compaction and retention
"""
