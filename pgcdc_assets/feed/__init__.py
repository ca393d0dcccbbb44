"""Change feeds: typed changes of one table each, derived from the log.

log -> transform -> task (in the workers): routing, events, protocol.columns -> file -> table

schema      the columns of a feed; which files hold a span
plan        plans what is to be done for each table
transform   derives the feeds of tables from a span of the log
task        what one Spark task does: segments in, feed files out
events      turns rows of the log into changes: which images there are, and which values they lack
routing     which table takes the rows of a relation
messages    the feed of logical messages
file        the Parquet file of one task        table       the feed as a Delta table
"""
