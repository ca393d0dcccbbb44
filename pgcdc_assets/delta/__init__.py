"""Delta tables by their logs and files: what delta-rs cannot do, or does by listing folders. No Spark.

datafile, vectors -> commit -> log -> references

logfiles    the actions of a commit's lines and of a checkpoint, read strictly
log         a table's versions, found by the numbers of their commits
commit      a commit that takes its number or fails; checkpoints
definition  tables made, their columns and properties changed
datafile    Parquet files with exact bounds
vectors     deletion vectors
references  which files some versions need
tombstones  what a checkpoint says of files that are gone
recovery    what a power cut left of a log, mended
"""
