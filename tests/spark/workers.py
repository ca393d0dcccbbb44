"""Modules that Spark starts in its Python workers."""

from __future__ import annotations

WORKERS = {
    "feed.task", "feed.events", "feed.file", "feed.schema", "mirror.delta.applytask", "mirror.delta.rowlookup",
    "mirror.delta.keyindex", "mirror.delta.rowgroups", "mirror.delta.copytask", "mirror.delta.compaction",
    "mirror.delta.projection", "delta.vectors",
    "spark.attempt",
}  # fmt: skip
"""Imported by Spark's Python workers for each job: neither Spark nor psycopg, by any way."""
READ_THE_SOURCE = {"mirror.delta.copytask"}
"""Workers that connect to the source, with psycopg."""
