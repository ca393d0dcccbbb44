"""Random histories of a source whose structure moves: how one is built, played and judged.

``story``     a seed becomes a :class:`~.story.Story`: a kind of publication, some tables, and a list of steps.
              A step is a write, a structural move, its way back, the begin or end of a transaction or savepoint,
              or a run of the project. Each step has a seed of its own, so a story stays itself where others of
              its steps are left out.
``source``    the tables as the catalog has them now, which is what a step chooses from.
``moves``     what is done to the structure, each with its way back where there is one.
``writes``    what is done to rows, on whatever tables there are.
``chronicle`` the oracle: the contents of all tables after each commit, and the LSN of each commit.
``judge``     every published point against the chronicle, and ``status`` against what is listed.
``player``    a story on a database of its own: real server, real receivers, the session's Spark.

A story fails where a point lists a table that is not the source's at that LSN, and where a table is neither listed
nor told. It is replayed by its seed, and cut to the steps it needs, by ``tests/property/test_history_structure.py``.
"""
