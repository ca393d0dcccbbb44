"""Mirrors: the rows of each table, as they were on the source at an LSN.

change feed -> net/ (the net effect of the changes) -> delta/ (writes the mirror's files, one commit per table)

target      the contract between the flow and a target, which is the place that keeps the mirrors
net/        net effect, the same for every target     delta/      the implemented target: Delta tables
"""
