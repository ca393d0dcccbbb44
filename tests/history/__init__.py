"""Random histories of the source, and what the mirrors are held to.

Two kinds:

**Rows** (the modules here). ``tables`` and ``values`` make tables of every form and type, ``steps`` a list of steps by
hypothesis, ``workload`` takes them over three connections that overlap, roll back and prepare. ``driver`` plays them
over the whole path (syncs to any LSN, copies, repairs), ``derived`` and ``mirror`` without Spark. The
oracle is ``tests/journal.py``: triggers write each row down. Structure stands still.

**Structure** (``structure/``). Tables are tiny and few, and everything that DDL can move moves: names, schemas,
partitions, columns, keys, types, storage, publications; in transactions and savepoints, between runs and beside them.
The oracle is the source read after each commit.
"""
