"""Publishes facts about the mirrors in ledgers: small Delta tables that only grow.

points      consistent points: an LSN, and the version that each mirror has at that LSN
states      the state of each table; repairs    untaken     rows that were applied to no mirror
ledger      one such Delta table, with rows in the order of their times
"""
