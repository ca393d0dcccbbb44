"""Reads and writes Delta tables by their logs and files: what delta-rs cannot do, or does by listing folders. No Spark.

datafile, vectors -> log -> checkpoint -> commit; log -> references -> sweep

logfiles    the actions of a commit's lines and of a checkpoint, read strictly
log         a table's versions, found by the numbers of their commits
commit      a commit that takes its number or fails
checkpoint  writes a version as one file; deletes what the log then no longer needs
mapping     columns as the metadata states them, with ids if files use other names
definition  creates tables, changes their columns and properties
datafile    Parquet files with exact bounds; which small files are worth merging
vectors     deletion vectors
references  the files of a log, listed once; which files some versions need
sweep       deletes files that nobody needs any more, or a whole table
tombstones  which removed files a checkpoint names
recovery    repairs a log after a power cut
"""
