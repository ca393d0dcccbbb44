"""Rates, latency, growth and memory, measured side by side with PostgreSQL's own tools: ``make bench``."""
