"""Random histories of the source, and the records of the source's rows with which the mirrors are compared. A history
is a list of random steps: statements on the source, and syncs between them.

**Rows** (the modules in this folder): the columns of the tables do not change. ``tables`` and ``values`` generate
tables of every form and type. ``steps`` generates a list of steps with hypothesis. ``workload`` executes the steps over
three connections, whose transactions overlap, roll back and are prepared. ``driver`` plays a history with whole syncs
(to any LSN), copies and repairs. ``derived`` and ``mirror`` play a history without Spark. The mirrors are compared with
``tests/journal.py``, whose triggers record each change of a row.

**Structure** (``structure/``): few and tiny tables. DDL changes names, schemas, partitions, columns, keys, types,
storage and publications, in transactions and savepoints, between syncs and during syncs. The mirrors are compared with
``structure/chronicle.py``, which reads the source's rows after each commit.
"""
