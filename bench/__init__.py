"""Measures rates, latency, growth and memory, next to PostgreSQL's own tools on the same data: ``make bench``."""
