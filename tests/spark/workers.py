from __future__ import annotations

WORKERS = {
    "feed.task", "feed.events", "feed.file", "feed.schema", "mirror.delta.applytask", "mirror.delta.rowlookup",
    "mirror.delta.keyindex", "mirror.delta.rowgroups", "mirror.delta.copytask", "mirror.delta.compaction",
    "mirror.delta.reshape", "delta.vectors",
    "spark.attempt",
}  # fmt: skip
"""Modules that Spark's Python workers import for each job. None of them imports Spark, even indirectly. Only the
modules in ``READ_THE_SOURCE`` import psycopg."""
READ_THE_SOURCE = {"mirror.delta.copytask"}
"""Modules of workers that connect to the source with psycopg."""
