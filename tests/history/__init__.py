"""Random histories of the source, and the records of the source's rows with which the mirrors are compared.

**Rows** (the modules in this folder): the columns of the tables do not change. ``tables`` and ``values`` generate
tables of every form and type. ``steps`` generates a list of steps with hypothesis. ``workload`` executes the steps over
three connections, whose transactions overlap, roll back and are prepared. ``driver`` plays a history with whole syncs
(to any LSN), copies and repairs. ``derived`` and ``mirror`` play it without Spark. The mirrors are compared with
``tests/journal.py``, whose triggers record each row.

**Structure** (``structure/``): few and tiny tables. DDL changes names, schemas, partitions, columns, keys, types,
storage and publications, in transactions and savepoints, between syncs and during syncs. The mirrors are compared with
``structure/chronicle.py``, which reads the source's rows after each commit.
"""
