"""Reports the state of source and lake, and whether the mirrors equal the source. Uses plain SQL and delta-rs, no JVM.

source_facts, lake_facts -> slothealth, tablehealth -> status     reads facts, and states problems in words
sides -> rendering -> compare -> verify                           compares every row and value at one LSN

health      the facts that the health rules take, and the problems that they find
report      the results of a comparison
positions   the stream's positions
"""
