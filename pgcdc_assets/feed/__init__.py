"""Change feeds, derived from the change log. Each feed contains the typed changes of one table.

Data flow: log -> plan -> transform -> task (in Spark's workers): events, protocol.columns -> file -> table

A span is a part of the log between two boundaries. A relation shape is one version of a relation: its columns and their
types. Each shape has a number in the log, its schema_id.

schema      the columns of a feed; the facts of a feed file
plan        decides to which table rows belong; plans what a transform does for each table
transform   derives the feeds of tables from a span of the log
task        the work of one Spark task: reads segments, writes feed files
events      turns rows of the log into changes, with their old and new row images
messages    the feed of logical messages
file        the Parquet file of one task        table       the feed as a Delta table
"""
