"""Publishes facts about the mirrors in ledgers, which are small Delta tables to which rows are added.

points      consistent points: an LSN, and the version that each mirror has at that LSN
states      the state of each table; repairs after a power cut
untaken     counts of rows that were applied to no mirror
ledger      the class of all ledgers: a Delta table with rows in the order of their times
"""
