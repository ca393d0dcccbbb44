"""Reads the lake, without the source. A consistent point, or only "point", is an LSN at which all mirrors can be read
together.

lake   ``Lake``: chooses a point by LSN or time, or waits for a point
point  ``LakeAt``: reads the mirrors at one point
scan   the rows of one version of a mirror, as a stream
views  mirrors as views of DuckDB, Polars and Spark

tableat    one table at one point: its change feed, and the changes of one row
netchange  the rows of a mirror that differ between two points
undo       the SQL that reverts changes on the source
"""
