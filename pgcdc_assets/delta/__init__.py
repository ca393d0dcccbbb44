"""Reads and writes Delta tables directly, by their logs and files, without Spark. delta-rs cannot do some of this work,
such as writing deletion vectors. For other work it lists whole folders, which is slow.

datafile, vectors -> log -> checkpoint -> commit; log -> sweep

logfiles    reads commits and lists the files of a table's log
log         reads the versions of a table, by the numbers of its commits
commit      writes a commit under its number, or fails
checkpoint  writes checkpoints, decides which removed files they name, deletes old files of the log
mapping     a table's columns in its metadata, with column mapping and type widening
definition  creates tables, changes their columns and properties
datafile    writes and checks Parquet files, with statistics; chooses small files to merge
vectors     deletion vectors
sweep       finds the files that versions need, and deletes the other files, or all files of a table
recovery    repairs a log after a power cut
"""
