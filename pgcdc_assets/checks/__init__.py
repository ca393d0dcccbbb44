"""Reports the state of source and lake, and checks whether the mirrors equal the source. Uses plain SQL and delta-rs,
no JVM.

facts -> slothealth, tablehealth -> status     reads facts, finds problems, describes them in words
sides -> rendering -> compare -> verify        compares every row and value at one LSN

documents   the JSON documents of commands
health      the data types of the health rules: facts (input) and problems (output)
problemcodes  the codes of the problems
report      the results of a comparison; records the last result of each table
positions   up to which LSN changes are received and applied; how far each table is behind the source
"""
