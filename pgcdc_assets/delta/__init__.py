"""Delta tables by their logs and files: what delta-rs cannot do, or does by listing folders. No Spark.

datafile, vectors -> log -> checkpoint -> commit; log -> loglisting -> references -> sweep

logfiles    the actions of a commit's lines and of a checkpoint, read strictly
log         a table's versions, found by the numbers of their commits
commit      a commit that takes its number or fails
checkpoint  what a version holds as one file; what a log forgets then
mapping     columns as the metadata states them, with ids where files name them otherwise
definition  tables made, their columns and properties changed
datafile    Parquet files with exact bounds
vectors     deletion vectors
loglisting  the files of a log, listed once
references  which files some versions need
sweep       the files that nobody needs any more
removal     a whole table goes
foreign     tables as delta-rs opens them
smallfiles  those that are worth writing as one
tombstones  what a checkpoint says of files that are gone
recovery    what a power cut left of a log, mended
"""
