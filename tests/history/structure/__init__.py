"""Random histories of a source whose structure changes: how a history is built, played and judged.

``story``     makes a :class:`~.story.Story` of a seed: a kind of publication, some tables, and a list of steps.
              A step is a write, a structural move, its undo, the begin or end of a transaction or savepoint,
              or a run. Each step has its own seed, so a step stays the same when other steps are left out.
``source``    the tables as the catalog has them. A step chooses from these tables.
``moves``     structural changes, each with its undo if it has an undo.
``writes``    changes of rows of any table.
``chronicle`` the oracle: the contents of all tables after each commit, and the LSN of each commit.
``judge``     compares every published point with the chronicle, and ``status`` with the tables listed.
``player``    plays a story on its own database: real server, real receivers, the session's Spark.

A story fails if a point lists a table that differs from the source at that LSN, or if a table is neither listed nor
reported. ``tests/property/test_history_structure.py`` replays a story by its seed, and cuts it to the steps it needs.
"""
