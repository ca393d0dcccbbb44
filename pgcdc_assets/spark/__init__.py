"""Spark: the session, jobs of plain functions, and the jars that pyspark lacks.

session  starts the session when a run needs it, with its settings
jars     Delta's jars, resolved once; Java
tasks    runs one function over many specs as one job; how many tasks run at a time; waits for a cluster
attempt  runs one spec in a worker that has the driver's versions
archive  packs this environment for the executors
"""
