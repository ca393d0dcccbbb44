"""Which structure a table has, and what becomes of its mirror when that changes. Pure: no SQL, no Spark, no files.

    catalog, before and now ─> differences ─> verdict ─> Reshape: successor ─> the mirror's next structure
    row of the log ─> rowshapes, alignment ─> how it is read, or why it waits for a look
    record ─> listing ─> what a point may list

differences    what differs between a table as its mirror has it and as the catalog shows it
verdict        what becomes of the mirror then: one function, with its cases in a table
successor      the structure that a mirror gets by its own rows, and what stands in the way
casts          types whose values keep their text under another one
rowshapes      whether rows under a Relation message fit a mirror
alignment      which columns a message means, told by their order
record         what the flow knows of one table
listing        which tables a point may list
"""
