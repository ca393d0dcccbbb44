"""The change log: the messages as PostgreSQL sent them, in an append-only Delta table.

receive/ -> framerun -> rows -> segment (spill) -> batch -> commit        written by one process
                                                              |
                                          reader, counting <--+           read by everybody

framerun    frames as they came, indexed        rows        frames into rows of the log
streamed    which frames are of which transaction in progress, and as version 1 has them
inprogress  transactions in progress
prepared    those whose content came at their PREPARE          preparedfolder  where that is kept
segment     its Parquet files                   spill       segments of open transactions
spool       content of transactions in progress
latefacts   what only a commit says of a file that was written before it
batch       the smallest durable piece          commit      compare-and-set, on disk before anybody is told
reader      position, batches, segments         counting    rows by relation, as the receiver counted them
summary     what a batch says of itself         soundness   whether its rows are those
transactions  which one is open after a run
relations   which Relation message is in force for which row
fencing     shuts out a writer that has lost the lake
recovery    what a power cut left, mended       upkeep      compaction and retention
"""
