"""Reads the source's catalog as plain facts. :mod:`pgcdc_assets.structure` compares these facts.

tables      reads the mirrored tables             assembly    builds tables from relations (pure)
pgclass     relations with their columns          mirrorkey   chooses a mirror's key (pure)
pgtypes     types down to their base types        typeparts   the types inside a type
published   what publications publish             bare        the same, without waiting for locks
comments    comments of tables and columns
patterns    which tables the setting `tables` selects
look        the published tables and a fingerprint of their catalog rows
"""
