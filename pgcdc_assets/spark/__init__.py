"""Spark: the session, jobs of plain functions, and the jars that pyspark lacks.

session        starts the session when a run needs it
configuration  the settings of the session
jars           Delta's jars, resolved once; Java
tasks          runs one function over many specs as one job
attempt        runs one spec in a worker that has the driver's versions
executors      how many tasks run at a time; waits for a cluster
archive        packs this environment for the executors
"""
