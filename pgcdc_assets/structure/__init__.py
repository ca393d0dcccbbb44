"""The structure of a table, and what happens to the mirror when the structure changes. Uses no SQL, Spark or files.

    table recorded for a mirror, table in the catalog ─> differences ─> verdict ─> Reshape ─> successor
    Relation message of the log ─> rowshapes, alignment ─> how its rows are read, or why they cannot be read
    record ─> listing ─> the tables that a consistent point may list

differences    compares the table recorded for a mirror with the table in the catalog
verdict        decides what happens to the mirror: one function, whose header lists all cases
successor      computes the structure that a mirror can get without a copy, or says why it needs a copy; which
               changes of type keep the text of every value
rowshapes      decides how the rows that belong to a Relation message are read
alignment      finds the columns of a Relation message by their order
record         all facts that the flow has about one table
listing        decides which tables a consistent point may list
"""
