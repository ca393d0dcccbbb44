"""Reports the state of source and lake, and checks whether the mirrors equal the source. Uses plain SQL and delta-rs,
no JVM.

source_facts, lake_facts -> slothealth, tablehealth -> status     reads facts, and states problems in words
sides -> rendering -> compare -> verify                           compares every row and value at one LSN

documents   the JSON documents of commands
health      the input and output of the health rules: facts and problems
problemcodes  the codes of the problems
report      the results of a comparison; the record of the last one of each table
positions   the stream's positions
lag         how far each table is behind the source
"""
