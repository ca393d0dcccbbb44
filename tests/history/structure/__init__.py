"""Random histories of a source with schema changes: how they are generated, executed and checked.

``generate``    generates a :class:`~.generate.History` from a seed: some tables, a kind of publication, and a list of
                steps. A step is a write, a schema change, the undo of a schema change, the begin or end of a
                transaction or savepoint, or a sync. A step has its own seed, so it does not change when other steps
                are left out.
``source``      the tables as the catalog shows them. A step selects one of these tables.
``changes``     the schema changes, some with an undo.
``writes``      changes of rows of any table.
``chronicle``   the oracle: the contents of all tables after each commit, and the LSN of each commit.
``comparison``  compares every published point with the chronicle, and ``status`` with the tables that no point lists.
``steprunner``  executes the steps of a history on the source.
``group``       several histories that share a database and its syncs.

A history fails if a point lists a table that differs from the source at the point's LSN, or if a table is neither
listed by the newest point nor reported by ``status``. ``tests/property/test_history_structure.py`` repeats a history by
its seed, and shortens it to the steps that it needs to fail.
"""
