"""Mirrors: each table's rows as the source has them at an LSN.

feed -> net/ (what is left of many changes) -> delta/ (into the mirror's files, one commit a table)

target      what the flow asks of the place that keeps the mirrors, whichever that is
net/        target-neutral net effect           delta/      the target that there is: Delta tables
"""
