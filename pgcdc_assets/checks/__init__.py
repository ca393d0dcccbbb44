"""Reports the state of source and lake, and whether the mirrors equal the source. Uses plain SQL and delta-rs, no JVM.

source_facts, table_facts -> facts -> health -> status      reads facts, and states problems in words
compared -> rendering -> digest -> twosides -> verify       compares every row and value at one LSN; report: the result

slothealth, tablehealth     the health rules    problem     one problem, in words
sentinel    the stream's positions
message_facts   the position of the feed of messages
last_runs   the last failed operations
"""
