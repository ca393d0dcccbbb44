"""The structure of a table, and what happens to its mirror when the structure changes. Uses no SQL, Spark or files.

For each mirror, a :class:`Table` is recorded: the table with the structure that the mirror has. The **catalog check**
compares it with the table in the source's catalog. To **reshape** a mirror is to rewrite its own rows with the new
structure, without a new copy.

    table recorded for a mirror, table in the catalog ─> differences ─> verdict ─> Reshape ─> successor
    Relation message of the log ─> rowshapes, alignment ─> how its rows are read, or why they cannot be read

differences    compares the table recorded for a mirror with the table in the catalog
verdict        decides what happens to the mirror; the module's docstring lists all cases
successor      computes the structure that a reshaped mirror gets, or says why the table must be copied again
rowshapes      decides how the rows that follow a Relation message are read
alignment      finds out which columns a Relation message lists, by their order
record         the states of a table, and all facts that the package flow has about one table; from which LSN on a point
               may list the table
"""
