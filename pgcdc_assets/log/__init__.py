"""The change log: the messages as PostgreSQL sent them, in an append-only Delta table.

receive/ -> framerun -> rows -> segment (spill) -> batch -> commit        written by one process
                                                              |
                                          reader, span <------+           read by all processes

framerun      received frames (CopyData messages), with an index of their kinds and lengths
streamed      finds the frames of transactions in progress (sent before their commit), and converts them to version 1
relations     the Relation message that applies to each row
transactions  transactions whose end has not arrived: open, in progress, prepared
rows          turns frames into rows of the log
segment       the Parquet files of the log
commitfacts   facts that rows lack because they were written before their transaction committed
content       frames and segments of transactions in progress
spill         keeps the content of transactions in progress, and of prepared transactions, on disk
batch         batches: the smallest durable pieces of the log
commit        Delta commits to the log; also repairs the log, and makes commits of an earlier writer fail
summary       the summary row of a batch, and the check of the batch's rows against this summary
reader        position, batches, segments
announcements the transactions in progress, which the receiver shows to ``pgcdc status``
extent        up to which LSN the log is complete, if it is above the log's position
span          batches, relation shapes and row counts of one span of LSNs
upkeep        compaction and retention
"""
