"""Random histories of the source, and the oracles that the mirrors are compared with.

**Rows** (the modules here): the structure of the tables stays the same. ``tables`` and ``values`` make tables of every
form and type. ``steps`` draws a list of steps with hypothesis. ``workload`` runs the steps over three connections whose
transactions overlap, roll back and are prepared. ``driver`` plays a history over the whole path (syncs to any LSN,
copies, repairs). ``derived`` and ``mirror`` play it without Spark. The oracle is ``tests/journal.py``, whose triggers
record each row.

**Structure** (``structure/``): few and tiny tables. DDL changes names, schemas, partitions, columns, keys, types,
storage and publications, in transactions and savepoints, between runs and during runs. The oracle reads the source
after each commit.
"""
