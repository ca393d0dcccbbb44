"""Reads the lake, without the source.

lake   ``Lake``: chooses a point by LSN or time
point  ``LakeAt``: what a reader can do with the mirrors of one point
scan   the rows of one version of a mirror, as a stream
views  mirrors as views of DuckDB, Polars and Spark

arrival     waits until the mirrors hold a transaction
tableat     one table at one point, and the changes of one row
changefeed  reads a change feed up to a point
netchange   the net change between two points
undo        what is reverted, and the SQL that reverts it
sqltext     names and values as SQL
"""
