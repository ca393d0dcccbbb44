"""Reads the lake, without the source.

lake   ``Lake``: chooses a point by LSN or time
point  ``LakeAt``: what a reader can do with the mirrors of one point
scan   the rows of one version of a mirror, as a stream
views  mirrors as views of DuckDB, Polars and Spark
"""
