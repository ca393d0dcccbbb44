"""Reads and writes Delta tables directly by their logs and files, without Spark. delta-rs cannot do this work, or must
list folders for it.

datafile, vectors -> log -> checkpoint -> commit; log -> sweep

logfiles    reads commits and lists the files of a table's log
log         reads the versions of a table, by the numbers of its commits
commit      writes a commit under its number, or fails
checkpoint  writes checkpoints, decides which removed files they name, deletes files of the log not needed any more
mapping     a table's columns in its metadata, with column mapping and type widening
definition  creates tables, changes their columns and properties
datafile    writes Parquet files and their statistics; chooses small files to merge
vectors     deletion vectors
sweep       finds the files that versions need, and deletes the other files, or all files of a table
recovery    repairs a log after a power cut
"""
