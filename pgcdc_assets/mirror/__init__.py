"""Mirrors: each table's rows as the source has them at an LSN.

feed -> net/ (what is left of many changes) -> delta/ (into the mirror's files, one commit a table)
"""
