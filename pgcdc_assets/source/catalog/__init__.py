"""The source's catalog as plain facts. :mod:`pgcdc_assets.structure` compares them.

tables      the mirrored tables, read        assembly    how they are put together of relations: pure
pgclass     relations with their columns     mirrorkey   the choice of a mirror's key: pure
pgtypes     types down to their base         typeparts   what values of a type are made of
published   what publications publish        bare        the same without waiting for a lock
comments    what COMMENT ON has set
patterns    what the setting `tables` means  look        the published tables and a fingerprint
"""
