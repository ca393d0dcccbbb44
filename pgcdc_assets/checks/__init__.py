"""Reports how things stand, and whether the mirrors equal the source. Plain SQL and delta-rs, no JVM.

source_facts, table_facts -> facts -> health -> status      facts in, problems in words out
compared -> rendering -> digest -> twosides -> verify       every row and value, at one LSN; report: what it says

slothealth, tablehealth     the rules           problem     what is wrong, in words
sentinel    the stream's positions
message_facts   how the feed of messages stands
last_runs   failures that nobody looked at      origin      which source a command means
"""
