"""Spark: the session, jobs of plain functions, and the jars that pyspark lacks.

session        the session, started when a run        configuration  its settings
               needs it                               jars           Delta's jars, resolved once; Java
tasks          one function over many specs           attempt        what a worker does with one of them, if it has
               as one job                                            the driver's versions
executors      how many tasks run at a time;          archive        this environment as an archive for the executors
               waiting for a cluster
"""
