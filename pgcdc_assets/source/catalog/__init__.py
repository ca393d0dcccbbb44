"""Reads the source's catalog as plain facts. :mod:`pgcdc_assets.structure` compares these facts.

pgtypes -> pgclass --+
                     +-> assembly -> tables
published -----------+

pgtypes     types down to their base types, and the types inside a type
pgclass     relations with their columns, indexes and comments
published   what publications publish, even if a table is locked
mirrorkey   chooses a mirror's key (pure)
assembly    builds core.catalog.Table from all these rows (pure)
tables      reads the tables that the settings select; the snapshot of the catalog that a catalog check compares
"""
