"""The change log: the messages as PostgreSQL sent them, in an append-only Delta table.

receive/ -> framerun -> rows -> segment (spill) -> batch -> commit        written by one process
                                                              |
                                          reader, span <------+           read by everybody

framerun      received frames, indexed
streamed      finds the frames of each transaction in progress, and converts them to protocol version 1
relations     the Relation message that applies to each row
transactions  transactions whose end has not arrived: open, in progress, prepared
rows          turns frames into rows of the log
segment       the Parquet files of the log
commitfacts   facts that rows lack because they were written before their transaction committed
content       content of transactions in progress
spill         keeps the content of transactions in progress, and of prepared transactions, on disk
batch         batches: the smallest durable pieces of the log
commit        Delta commits to the log; also repairs the log, and shuts out an earlier writer
summary       the summary row of a batch, and the check of the batch's rows against this summary
reader        position, batches, segments
extent        how far the log is complete above its recorded position
span          batches, relation shapes and row counts of one span of LSNs
upkeep        compaction and retention
"""
