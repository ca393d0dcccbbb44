"""Reads the source's system catalog into dataclasses. :mod:`pgcdc_assets.structure` compares two readings, and decides
what a change of the catalog means for a mirror.

pgtypes -> pgclass --+
                     +-> assembly -> tables
published -----------+

pgtypes     reads types, with their base types and all types inside them
pgclass     reads relations with their columns, indexes and comments; chooses a mirror's key
published   reads what publications publish, even if a table is locked
assembly    builds core.catalog.Table from all these rows (no I/O)
tables      reads the tables that the settings select, and a fingerprint by which a later check notices changes
"""
