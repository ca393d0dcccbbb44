"""Spark: the session, jobs that run Python functions, and the jars that pyspark lacks.

session  starts the session when a run first needs it; the session's settings
jars     finds Java; downloads Delta's jars once
tasks    runs a function over many specs (its inputs) as one job; waits for a cluster's executors
attempt  runs the function for one spec in a worker, if the worker has the driver's versions
archive  packs this environment for the executors
"""
