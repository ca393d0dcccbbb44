"""Random histories of a source with schema changes (stories): how they are generated, executed and checked.

``story``     generates a :class:`~.story.Story` from a seed: a kind of publication, some tables, and a list of steps.
              A step is a write, a move (schema change), the undo of a move, the begin or end of a transaction or
              savepoint, or a sync. A step has its own seed, so it does not change when other steps are left out.
``source``    the tables as the catalog shows them. A step selects one of these tables.
``moves``     the schema changes, some with an undo.
``writes``    changes of rows of any table.
``chronicle`` the oracle: the contents of all tables after each commit, and the LSN of each commit.
``judge``     compares every published point with the chronicle, and ``status`` with the tables listed.
``player``    executes the steps of a story on the source.
``cohort``    several stories that share a database and its syncs.

A story fails if a point lists a table that differs from the source at that LSN, or if a table is neither listed nor
reported. ``tests/property/test_history_structure.py`` repeats a story by its seed, and shortens it.
"""
