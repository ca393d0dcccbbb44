"""Reads the lake, without the source. A consistent point, or only "point", is an LSN at which all mirrors can be read
together.

lake   ``Lake``: chooses a point by LSN or time
point  ``LakeAt``: reads the mirrors at one point
scan   the rows of one version of a mirror, as a stream
views  mirrors as views of DuckDB, Polars and Spark

arrival     waits until the mirrors contain a transaction
tableat     one table at one point, and the changes of one row
changefeed  reads a change feed up to a point
netchange   the rows of a mirror that differ between two points
undo        the SQL that reverts changes on the source
sqltext     names and values as SQL
"""
