"""Reads and writes Delta tables by their logs and files: work that delta-rs cannot do, or does by listing folders.
No Spark.

datafile, vectors -> log -> checkpoint -> commit; log -> sweep

logfiles    the actions of a commit's lines and of a checkpoint, read strictly
log         a table's versions, found by the numbers of their commits
commit      a commit that takes its number or fails
checkpoint  writes a version as one file; deletes what the log then no longer needs
mapping     columns as the metadata states them, with ids if files use other names
definition  creates tables, changes their columns and properties
datafile    Parquet files with exact bounds; which small files are worth merging
vectors     deletion vectors
sweep       finds the files that versions need; deletes the others, or a whole table
tombstones  which removed files a checkpoint names
recovery    repairs a log after a power cut
"""
