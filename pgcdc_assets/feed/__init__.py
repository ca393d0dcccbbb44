"""Change feeds: the typed changes of one table each, derived from the change log.

Data flow: log -> transform -> task (in the workers): routing, events, protocol.columns -> file -> table

schema      the columns of a feed; which files hold a span
plan        plans what a transform does for each table
transform   derives the feeds of tables from a span of the log
task        what one Spark task does: segments in, feed files out
events      turns rows of the log into changes, with their old and new row images
routing     decides which table takes the rows of a relation
messages    the feed of logical messages
file        the Parquet file of one task        table       the feed as a Delta table
"""
